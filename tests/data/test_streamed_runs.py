"""Runs on streamed rows: they take the steps of prepared ones, resume, and meet signals, bad rows and dead readers."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from tests.conftest import DEMO_MODEL, demo_rows
from tests.data.test_streaming import windows
from tests.jobs import assert_same, copy_until, ends, signal_the_job_in
from tests.peak_memory import most_memory
from tests.ranks import run_ranks, train
from unsloth_ddp.data.order.batch_plan import RowOrder
from unsloth_ddp.data.order.stream_order import FIRST, StreamPosition
from unsloth_ddp.data.order.stream_windows import TokenizedWindow, read_ahead

TOLERANCE = 1e-6
STREAMED = (
    "--streaming --max_grad_norm 0.5 --warmup_steps 2 --global_batch_size 4 --logging_steps 1 --save_total_limit none"
)
# 13 rows: in steps of 4 the second epoch begins within the fourth.
WHOLE = f"{STREAMED} --shuffle_buffer 5 --max_steps 9 --save_steps 1"
LAST = 9
SEED = 42


def train_in_small_windows(argv: list[str], cwd: str) -> None:
    """train_ddp.py that plans from the first rows only and tokenizes few rows at a time."""
    from unsloth_ddp.data.order import stream_windows
    from unsloth_ddp.data.sources import examples
    from unsloth_ddp.run import file_checks

    # Only these are checked before the run.
    file_checks.FIRST_ROWS = 6
    examples.STREAM_HEAD, stream_windows.ROWS_AT_A_TIME, stream_windows.PACKED_WINDOW = 6, 3, 5
    train(argv, cwd)


@pytest.fixture(scope="module")
def stream(job, place):
    """Run with small windows; returns the run's folder and what was printed."""

    def run(options: str, name: str, ranks: int = 1, **more: Any) -> tuple[Path, str]:
        result = job(options, name, ranks, target=more.pop("target", train_in_small_windows), **more)
        return place / "outputs" / name, result.output

    return run


@pytest.fixture(scope="module")
def whole(stream):
    """An uninterrupted streamed run of two ranks, with dropout and a checkpoint a step."""
    return stream(f"{WHOLE} --lora_dropout 0.1", "streamed", ranks=2)


def logged(folder: Path, name: str) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in history if name in entry]


@pytest.fixture(scope="module")
def prepared(job, place, uneven_rows) -> tuple[Path, Path]:
    """A run that is not streamed, and a file with the rows in the order that it trained them in."""
    folder = place / "outputs" / "prepared"
    job("--global_batch_size 4 --max_steps 3 --logging_steps 1 --save_strategy no --seed 42 --packing off", "prepared")
    lines = uneven_rows.read_text().splitlines()
    order = RowOrder(len(lines), 1, SEED).indices()
    ordered = place / "ordered.jsonl"
    ordered.write_text("".join(f"{lines[i]}\n" for i in order))
    return folder, ordered


@pytest.mark.parametrize(("ranks", "per_device"), [pytest.param(1, 1, marks=pytest.mark.slow), (2, 2)])
def test_streamed_rows_take_the_steps_of_prepared_ones(job, place, tiny_model, prepared, ranks, per_device):
    folder, ordered = prepared
    name = f"in-order-{ranks}"
    options = (
        f"--model {tiny_model} --dataset {ordered} --run_name {name} --learning_rate 0.01 --max_length 64 --streaming "
        f"--shuffle_buffer 0 --per_device_train_batch_size {per_device} --global_batch_size 4 --max_steps 3 "
        "--gradient_checkpointing none --logging_steps 1 --save_strategy no --report_to none"
    )
    run_ranks(ranks, train_in_small_windows, options.split(), str(place), folder=place / f"{name}.out").check()
    found, expected = (load_file(f / "adapter_model.safetensors") for f in (place / "outputs" / name, folder))
    difference = max((found[key] - expected[key]).abs().max().item() for key in expected)
    losses, expected_losses = logged(place / "outputs" / name, "loss"), logged(folder, "loss")
    assert logged(place / "outputs" / name, "num_tokens") == logged(folder, "num_tokens")
    if ranks == 1:
        assert losses == expected_losses
        assert difference == 0
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE)
    # Adam divides by the size of a gradient, and so magnifies its rounding.
    assert difference < 1e-4


@pytest.mark.slow
def test_packs_of_streamed_rows_are_the_same_on_two_ranks(stream, place):
    """Rows of a folder of Parquet files, too, in which a file of metadata lies."""
    (place / "shards").mkdir()
    (place / "shards" / "dataset_infos.json").write_text("{}")
    for number, rows in enumerate((demo_rows()[:5], demo_rows()[5:9])):
        pq.write_table(pa.Table.from_pylist(rows), place / "shards" / f"{number}.parquet")
    options = (
        f"--dataset {place}/shards --streaming --shuffle_buffer 6 --packing on --global_batch_size 2 --max_steps 6 "
        "--logging_steps 1 --optim sgd"
    )
    one, printed = stream(f"{options} --learning_rate 1.0 --save_strategy no", "packs-1")
    two, _ = stream(f"{options} --learning_rate 1.0 --save_strategy no", "packs-2", ranks=2)
    assert printed.count(f"{place}/shards/dataset_infos.json is not read: of a folder, only .jsonl") == 1
    assert "packs of up to 64 tokens" in printed and "The stream holds 22 rows" in printed
    assert logged(one, "num_tokens") == logged(two, "num_tokens")
    assert logged(one, "loss") == pytest.approx(logged(two, "loss"), rel=TOLERANCE)
    summary = json.loads((two / "summary.json").read_text())
    assert (summary["packing"], summary["packs"], summary["tokens"]) == (True, None, logged(one, "num_tokens")[-1])


def test_the_table_says_what_is_known_of_a_stream(whole):
    _, printed = whole
    table = " ".join(printed.split())
    assert "training rows streamed, shuffled among 5 rows at a time; the first 6 have" in table
    assert "tokens a step about " in table and " steps 9 written to" in table
    assert printed.count("The stream holds 13 rows, and begins again after them.") == 1


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_a_resumed_stream_ends_like_an_uninterrupted_one(stream, whole, step):
    resumed = copy_until(whole[0], step, f"streamed-from-{step}")
    _, printed = stream(f"{WHOLE} --lora_dropout 0.1", resumed.name, ranks=2)
    skipped = {2: "Epoch 1 of the stream goes on after 6 rows", 5: "Epoch 2 of the stream goes on after 5 rows"}[step]
    assert f"{skipped}, which are read again and skipped." in printed
    assert_same(ends(resumed, LAST), ends(whole[0], LAST), f"from step {step}")


def test_another_world_size_goes_on_with_the_same_rows(stream, whole):
    resumed = copy_until(whole[0], 5, "streamed-on-one")
    _, printed = stream(f"{WHOLE} --lora_dropout 0.1 --dataset_num_proc 2", resumed.name, ranks=1)
    assert "world_size 2 -> 1" in printed
    assert logged(resumed, "num_tokens") == logged(whole[0], "num_tokens")
    assert logged(resumed, "loss") == pytest.approx(logged(whole[0], "loss"), rel=0.02)


def test_another_stream_is_refused_with_both_values(stream, whole, place, uneven_rows):
    resumed = copy_until(whole[0], 5, "streamed-changed")
    options = WHOLE.replace("--shuffle_buffer 5", "--shuffle_buffer 6")
    # Of an option that takes a list, both count.
    _, printed = stream(f"{options} --lora_dropout 0.1 --dataset {uneven_rows}", resumed.name, code=2)
    assert "was written by another run (shuffle_buffer 5 -> 6, " in printed
    assert f"sources {uneven_rows} -> {uneven_rows}, " in printed
    not_streamed = WHOLE.replace("--streaming", "").replace("--shuffle_buffer 5", "")
    _, printed = stream(f"{not_streamed} --lora_dropout 0.1", resumed.name, code=2)
    assert "was written by another run (rows streamed -> 13, data " in printed


@pytest.mark.slow
def test_a_bad_row_in_the_stream_ends_every_rank_with_its_sentence(place, tiny_model):
    lines = [json.dumps(row) for row in demo_rows()[:40]]
    lines[29] = '{"messages": [}'
    (place / "broken.jsonl").write_text("\n".join(lines))
    options = (
        f"--model {tiny_model} --dataset {place}/broken.jsonl --streaming --shuffle_buffer 0 --max_steps 20 "
        "--global_batch_size 8 --logging_steps 1 --report_to none --run_name broken --save_steps 1"
    )
    result = run_ranks(2, train_in_small_windows, options.split(), str(place), folder=place / "broken.out")
    assert result.codes[0] == 2 and result.codes[1] != 0, result.output
    assert "Traceback" not in result.output, result.output
    told = [line for line in result.output.splitlines() if "error:" in line]
    assert len(told) == 1 and f"{place}/broken.jsonl:30 is not JSON" in told[0], result.output
    assert (place / "outputs" / "broken" / "checkpoint-3").is_dir()
    assert not (place / "outputs" / "broken" / "checkpoint-4").exists()


def train_and_signal_the_job(argv: list[str], cwd: str) -> None:
    """train_ddp.py whose processes get SIGTERM in the second step."""
    signal_the_job_in(2)
    train_in_small_windows(argv, cwd)


@pytest.mark.slow
def test_a_signal_to_all_processes_of_a_job_leaves_a_checkpoint(stream, whole):
    stopped, printed = stream(f"{WHOLE} --lora_dropout 0.1", "signalled", 2, code=75, target=train_and_signal_the_job)
    assert "Stopped on SIGTERM; the same command resumes from" in printed
    steps = sorted(int(path.name.removeprefix("checkpoint-")) for path in stopped.glob("checkpoint*"))
    assert steps == [*range(1, len(steps) + 1)] and 2 <= len(steps) < LAST
    stream(f"{WHOLE} --lora_dropout 0.1", "signalled", 2)
    assert_same(ends(stopped, LAST), ends(whole[0], LAST))


def read_some_and_leave() -> None:
    """Leave as a script does, with the readers still at work and nothing closed."""
    readers = read_ahead(windows(), FIRST, 2)
    next(readers)
    globals()["kept"] = readers
    raise SystemExit(7)


def test_readers_end_with_the_script_that_started_them() -> None:
    process = multiprocessing.get_context("fork").Process(target=read_some_and_leave)
    process.start()
    # Without an end to the readers it would wait for ever.
    process.join(timeout=100)
    assert process.exitcode == 7


def train_and_kill_the_reader(argv: list[str], cwd: str) -> None:
    """train_ddp.py whose main process loses its reading worker in the third step."""
    from unsloth_ddp.distributed.signals import StopRequest

    ask, asked = StopRequest.start_poll, itertools.count(1)

    def ask_and_kill(self: StopRequest) -> None:
        if next(asked) == 3 and os.environ["RANK"] == "0":
            for worker in psutil.Process().children():
                worker.send_signal(signal.SIGKILL)
        ask(self)

    StopRequest.start_poll = ask_and_kill  # type: ignore[method-assign]
    train_in_small_windows(argv, cwd)


def test_a_reader_that_is_killed_ends_every_rank(place, tiny_model, uneven_rows):
    options = (
        f"--model {tiny_model} --dataset {uneven_rows} --streaming --max_steps 200 --run_name killed "
        "--global_batch_size 4 --report_to none --save_strategy no --max_length 64"
    )
    result = run_ranks(2, train_and_kill_the_reader, options.split(), str(place), folder=place / "killed.out")
    assert result.codes == [1, 1], result.output
    assert "DataLoader worker" in result.output and "killed by signal" in result.output, result.output


def read_a_million(path: str, count: int, buffer: int) -> None:
    """Read all rows, tokenize the last ones, and print the memory that this took beyond that of the imports."""
    from transformers import AutoTokenizer

    from unsloth_ddp.config.options import Settings
    from unsloth_ddp.data.order.stream_windows import streamed_windows

    settings = Settings(dataset=[path], streaming=True, shuffle_buffer=buffer)
    found = streamed_windows(settings, None, AutoTokenizer.from_pretrained(DEMO_MODEL), seed=1)
    found.start = StreamPosition(0, count - 1000)
    before = most_memory()
    for window in itertools.islice(found, 20):
        assert isinstance(window, TokenizedWindow) and len(window.rows) == 100
    print(json.dumps({"bytes": most_memory() - before, "epoch": window.start.epoch}))


@pytest.mark.slow
def test_a_million_short_rows_take_bounded_memory(tmp_path: Path) -> None:
    count = 1_000_000
    with (tmp_path / "a.csv").open("w") as file:
        file.write("prompt,completion\n")
        file.writelines(f"{number}? ,yes\n" for number in range(count))
    done = run_ranks(1, read_a_million, str(tmp_path / "a.csv"), count, 10_000, folder=tmp_path / "out").check()
    found = json.loads(done.output.splitlines()[-1])
    assert found["epoch"] == 1
    # Less than 10 MiB were measured; as Python objects the rows would take over 500 MiB.
    assert found["bytes"] < 50 << 20, f"{found['bytes'] / (1 << 20):.0f} MiB"
