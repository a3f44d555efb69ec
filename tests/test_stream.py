"""Streamed rows: their order, the steps they fill, and runs that read, resume, and meet a bad row."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from tests.conftest import DEMO_MODEL, demo_rows
from tests.jobs import assert_same, copy_until, ends
from tests.ranks import run_ranks, train
from unsloth_ddp.batch import BatchPlan, RowOrder
from unsloth_ddp.errors import UserError
from unsloth_ddp.rows import Row, read_rows, streamed_sources
from unsloth_ddp.stream import FIRST, Position, Steps, Window, Windows, endless, read_ahead, shuffled

# ---- the order of the rows ----


def numbers(count: int) -> Callable[..., Iterator[Row]]:
    """Reads that many rows which are numbers."""
    return lambda shift=0: (Row(f"rows:{n}", {"n": n + shift}) for n in range(count))


def test_a_buffer_of_none_keeps_the_order_of_the_source() -> None:
    assert list(shuffled(iter(range(20)), 0, seed=1, epoch=0)) == list(range(20))
    assert [placed.row for placed in itertools.islice(endless(numbers(3), 0, seed=1), 4)] == [
        *numbers(3)(),
        *numbers(1)(),
    ]


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_an_epoch_holds_each_row_once_in_an_order_of_its_own(size: int) -> None:
    first, again, second, other = (
        list(shuffled(iter(range(100)), size, seed, epoch)) for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))
    )
    assert first == again
    assert sorted(first) == sorted(second) == sorted(other) == list(range(100))
    # A row cannot come before it was read.
    assert all(row <= place + size for place, row in enumerate(first))
    if size > 1:
        assert len({tuple(order) for order in (first, second, other)}) == 3
        assert first != list(range(100))


def test_the_order_is_the_one_of_every_release() -> None:
    """Checkpoints of an older release would go on with other rows."""
    assert list(shuffled(iter(range(12)), 4, seed=42, epoch=0)) == [0, 3, 2, 1, 7, 5, 4, 6, 11, 10, 8, 9]


def test_a_stream_goes_on_anywhere() -> None:
    whole = list(itertools.islice(endless(numbers(10), 4, seed=3), 35))
    assert [placed.epoch for placed in whole] == [0] * 10 + [1] * 10 + [2] * 10 + [3] * 5
    assert [placed.number for placed in whole[:12]] == [*range(10), 0, 1]
    for place in (1, 9, 10, 27):
        start = Position(*whole[place][:3])
        assert list(itertools.islice(endless(numbers(10), 4, seed=3, start=start), 35 - place)) == whole[place:]


@pytest.mark.parametrize(
    "changed", [lambda: numbers(10)(shift=1), lambda: numbers(5)(), lambda: reversed([*numbers(10)()])]
)
def test_rows_that_changed_before_the_checkpoint_are_refused(changed) -> None:
    start = Position(*list(itertools.islice(endless(numbers(10), 4, seed=3), 17))[16][:3])
    assert (start.epoch, start.row) == (1, 6)
    with pytest.raises(UserError, match="the first 6 streamed rows are not those that were trained before"):
        next(endless(changed, 4, seed=3, start=start))
    # --resume_anyway
    found = next(endless(changed, 4, seed=3, start=dataclasses.replace(start, seen=None)))
    assert (found.epoch, found.number) in ((1, 6), (2, 0))
    # What comes later may be another.
    start = Position(*list(itertools.islice(endless(numbers(10), 0, seed=3), 5))[4][:3])
    longer = next(endless(lambda: itertools.chain(numbers(10)(), numbers(3)(shift=50)), 0, 3, start))
    assert longer.row.columns == {"n": 4}


def test_sources_that_hold_nothing_any_more_end_the_stream() -> None:
    passes = iter([numbers(2)(), []])
    with pytest.raises(UserError, match="come to an end"):
        list(endless(lambda: next(passes), 0, seed=1))


# ---- windows and steps ----

LENGTHS = np.random.default_rng(0).integers(2, 30, size=57)
MAX_LENGTH = 24


def read_lengths(bad: int | None = None) -> Iterator[Row]:
    """Rows that are only as long as LENGTHS says; row `bad` cannot be read."""
    for number, length in enumerate(LENGTHS.tolist()):
        if number == bad:
            raise UserError(f"rows:{number} is bad.")
        yield Row(f"rows:{number}", (number, length))


def encode_length(row: Row) -> dict[str, Any]:
    number, length = row.columns
    ids = [number] * min(length, MAX_LENGTH)
    return {"input_ids": ids, "labels": ids, "overlong": length > MAX_LENGTH}


def windows(start: Position = FIRST, **changed: Any) -> Windows:
    asked: dict[str, Any] = {"size": 10, "buffer": 8, "seed": 5, "drop": False, "start": start}
    return Windows(changed.pop("read", read_lengths), changed.pop("encode", encode_length), **(asked | changed))


def rows_of(share: list[list[dict[str, np.ndarray]]]) -> list[list[list[int]]]:
    """The rows of each unit of each micro-batch, which know their number by their tokens."""
    return [[list(dict.fromkeys(unit["input_ids"].tolist())) for unit in batch] for batch in share]


def take_steps(steps: Steps, found: Any, count: int, used: int = 0) -> list[tuple[list[Any], Position]]:
    filled = itertools.islice(steps.fill(found, used), count)
    return [([rows_of(share) for share in shares], position) for shares, position in filled]


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("capacity", [None, MAX_LENGTH])
def test_steps_go_on_from_every_position_with_the_same_rows(capacity: int | None, drop: bool) -> None:
    steps = Steps(BatchPlan(2, 2, 1), capacity, keep_order=False, seed=5)
    whole = take_steps(steps, windows(drop=drop), 40)
    assert whole[-1][1].epoch > 1
    for place, (_, position) in enumerate(whole[:20]):
        found = windows(position, drop=drop)
        assert take_steps(steps, found, 39 - place, position.used) == whole[place + 1 :]


@pytest.mark.parametrize("capacity", [None, MAX_LENGTH])
def test_a_step_holds_the_same_rows_in_every_layout(capacity: int | None) -> None:
    def rows(plan: BatchPlan) -> list[Any]:
        taken = take_steps(Steps(plan, capacity, False, 5), windows(), 12)
        return [sorted(unit for share in shares for batch in share for unit in batch) for shares, _ in taken]

    layouts = [BatchPlan(8, 1, 1), BatchPlan(1, 8, 1), BatchPlan(2, 2, 2), BatchPlan(2, 1, 4)]
    one, *others = [rows(plan) for plan in layouts]
    assert all(other == one for other in others)
    assert sum(len(unit) for step in one for unit in step) > (8 * 12 if capacity else 8 * 12 - 1)


def test_rows_that_are_too_long_are_left_out_before_steps_are_filled() -> None:
    steps = Steps(BatchPlan(4, 1, 1), None, keep_order=True, seed=5)
    kept = [number for number, length in enumerate(LENGTHS) if length <= MAX_LENGTH]
    assert len(kept) < len(LENGTHS)
    taken = take_steps(steps, windows(buffer=0, drop=True), len(kept) // 4)
    assert sorted(row for shares, _ in taken for batch in shares[0] for (row,) in batch) == kept[: len(kept) // 4 * 4]


def test_packs_hold_each_row_once_and_are_in_the_order_of_the_source_where_it_is_kept() -> None:
    steps = Steps(BatchPlan(1, 1, 1), MAX_LENGTH, keep_order=True, seed=5)
    packs = [shares[0][0][0] for shares, _ in take_steps(steps, windows(buffer=0, size=len(LENGTHS)), 20)]
    assert [pack[0] for pack in packs] == sorted(pack[0] for pack in packs)
    rows = [row for pack in packs for row in pack]
    assert len(set(rows)) == len(rows) and len(rows) > 30


def test_a_row_longer_than_the_packs_were_planned_for_gets_a_longer_pack() -> None:
    steps = Steps(BatchPlan(1, 1, 1), 5, keep_order=True, seed=5)
    units = steps.units(next(iter(windows())))
    assert sum(len(unit["lengths"]) for unit in units) == 10


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_share_the_windows_out(workers: int) -> None:
    expected = itertools.islice(windows(), 7)
    loader = DataLoader(windows(), batch_size=None, num_workers=workers, collate_fn=lambda window: window)
    found = itertools.islice(loader, 7)
    for one, other in zip(found, expected, strict=True):
        assert [row["input_ids"].tolist() for row in one.rows] == [row["input_ids"].tolist() for row in other.rows]
        assert (one.start, one.ended) == (other.start, other.ended)


def test_the_end_of_the_first_epoch_is_told_once() -> None:
    ended = [window.ended for window in itertools.islice(windows(), 20)]
    assert [number for number in ended if number is not None] == [len(LENGTHS)]
    # Also where the window ends with the epoch.
    ended = [window.ended for window in itertools.islice(windows(size=len(LENGTHS)), 3)]
    assert ended == [None, len(LENGTHS), None]


def encode_but_23(row: Row) -> dict[str, Any]:
    if row.columns[0] == 23:
        raise UserError("the chat template cannot render the row.")
    return encode_length(row)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"read": lambda: read_lengths(bad=23)}, "rows:23 is bad."),
        ({"encode": encode_but_23}, "rows:23: the chat template cannot render the row."),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_row_is_told_when_it_is_needed_and_not_before(changed: dict, sentence: str, workers: int) -> None:
    loader = DataLoader(
        windows(buffer=0, **changed), batch_size=None, num_workers=workers, collate_fn=lambda window: window
    )
    filled = Steps(BatchPlan(4, 1, 1), None, keep_order=True, seed=5).fill(iter(loader))
    trained = [row for _ in range(5) for batch in rows_of(next(filled)[0][0]) for (row,) in batch]
    assert sorted(trained) == list(range(20))
    with pytest.raises(UserError, match=sentence):
        next(filled)


def test_no_pack_is_trained_of_a_window_that_is_not_whole() -> None:
    steps = Steps(BatchPlan(1, 1, 1), MAX_LENGTH, keep_order=False, seed=5)

    def trained(found: Windows) -> list[Any]:
        taken = []
        with pytest.raises(UserError, match="rows:23"):
            for shares, _ in steps.fill(found):
                taken += rows_of(shares[0])[0]
        return taken

    packs = trained(windows(buffer=0, encode=encode_but_23))
    assert sorted(row for pack in packs for row in pack) == list(range(20))
    mended = [rows_of(shares[0])[0][0] for shares, _ in itertools.islice(steps.fill(windows(buffer=0)), len(packs))]
    assert mended == packs


def test_a_folder_stands_for_its_files_by_name(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/2.parquet", "a/1.csv", "notes.txt", ".hidden.jsonl", ".cache/x.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = streamed_sources([str(tmp_path), "owner/name", f"{tmp_path}/b.jsonl"])
    names = [f"{tmp_path}/{name}" for name in ("a/1.csv", "a/2.parquet", "b.jsonl")]
    assert found == [*names, "owner/name", f"{tmp_path}/b.jsonl"]


def test_sources_that_cannot_be_streamed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a folder without a \.jsonl"):
        streamed_sources([str(tmp_path)])
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match=r"list.json is one JSON list, .* write one row a line, as .jsonl"):
        streamed_sources([str(tmp_path)])


def test_a_hub_set_is_streamed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load_dataset(*args: Any, **more: Any) -> list[dict[str, str]]:
        asked.update(more, args=args)
        return [{"text": "a"}, {"text": "b"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    rows = list(read_rows("owner/name", "train", "en", streaming=True))
    assert rows == [Row("owner/name train row 1", {"text": "a"}), Row("owner/name train row 2", {"text": "b"})]
    assert asked == {"args": ("owner/name", "en"), "split": "train", "streaming": True}


# ---- runs ----

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
    from unsloth_ddp import data, stream

    data.STREAM_HEAD, stream.ROWS_AT_A_TIME, stream.PACKED_WINDOW = 6, 3, 5
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


@pytest.mark.parametrize(("ranks", "per_device"), [(1, 1), (2, 2)])
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


def test_packs_of_streamed_rows_are_the_same_on_two_ranks(stream, place):
    """Rows of a folder of Parquet files, too."""
    (place / "shards").mkdir()
    for number, rows in enumerate((demo_rows()[:5], demo_rows()[5:9])):
        pq.write_table(pa.Table.from_pylist(rows), place / "shards" / f"{number}.parquet")
    options = (
        f"--dataset {place}/shards --streaming --shuffle_buffer 6 --packing on --global_batch_size 2 --max_steps 6 "
        "--logging_steps 1 --optim sgd"
    )
    one, printed = stream(f"{options} --learning_rate 1.0 --save_strategy no", "packs-1")
    two, _ = stream(f"{options} --learning_rate 1.0 --save_strategy no", "packs-2", ranks=2)
    assert "packs of up to 64 tokens" in printed and "The stream holds 22 rows" in printed
    assert logged(one, "num_tokens") == logged(two, "num_tokens")
    assert logged(one, "loss") == pytest.approx(logged(two, "loss"), rel=TOLERANCE)
    summary = json.loads((two / "summary.json").read_text())
    assert (summary["packing"], summary["packs"], summary["tokens"]) == (True, None, logged(one, "num_tokens")[-1])


def test_the_table_says_what_is_known_of_a_stream(whole):
    _, printed = whole
    table = " ".join(printed.split())
    assert "training rows streamed, drawn from 5 rows at a time; the first 6 have" in table
    assert "tokens a step about " in table and " steps 9 written to" in table
    assert printed.count("The stream holds 13 rows; its second epoch begins.") == 1


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.slow), 5])
def test_a_resumed_stream_ends_like_an_uninterrupted_one(stream, whole, step):
    resumed = copy_until(whole[0], step, f"streamed-from-{step}")
    _, printed = stream(f"{WHOLE} --lora_dropout 0.1", resumed.name, ranks=2)
    skipped = {2: "The first 6 rows of epoch 1", 5: "The first 5 rows of epoch 2"}[step]
    assert f"{skipped} of the stream were trained before the checkpoint: they are read again and skipped." in printed
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
    assert f"was made by another run (sources {uneven_rows} -> {uneven_rows}, " in printed
    assert "shuffle_buffer 5 -> 6" in printed
    not_streamed = WHOLE.replace("--streaming", "").replace("--shuffle_buffer 5", "")
    _, printed = stream(f"{not_streamed} --lora_dropout 0.1", resumed.name, code=2)
    assert "was made by another run (rows streamed -> 13, data " in printed


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
    """train_ddp.py whose main process and readers get SIGTERM in the second step, as schedulers send it to all."""
    from unsloth_ddp.stop import Stop

    ask, asked = Stop.ask, itertools.count(1)

    def ask_and_signal(self: Stop) -> None:
        if next(asked) == 2 and os.environ["RANK"] == "0":
            for process in (*psutil.Process().children(), psutil.Process()):
                process.send_signal(signal.SIGTERM)
        ask(self)

    Stop.ask = ask_and_signal  # type: ignore[method-assign]
    train_in_small_windows(argv, cwd)


def test_a_signal_to_all_processes_of_a_job_leaves_a_checkpoint(stream, whole):
    stopped, printed = stream(f"{WHOLE} --lora_dropout 0.1", "signalled", 2, code=75, target=train_and_signal_the_job)
    assert "Stopped on SIGTERM; the same command goes on from" in printed
    assert sorted(path.name for path in stopped.glob("checkpoint*")) in (
        ["checkpoint-1", "checkpoint-2"],
        ["checkpoint-1", "checkpoint-2", "checkpoint-3"],
    )
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
    began = time.monotonic()
    process.start()
    process.join(timeout=30)
    assert process.exitcode == 7
    assert time.monotonic() - began < 10


def train_and_kill_the_reader(argv: list[str], cwd: str) -> None:
    """train_ddp.py whose main process loses its reading worker in the third step."""
    from unsloth_ddp.stop import Stop

    ask, asked = Stop.ask, itertools.count(1)

    def ask_and_kill(self: Stop) -> None:
        if next(asked) == 3 and os.environ["RANK"] == "0":
            for worker in psutil.Process().children():
                worker.send_signal(signal.SIGKILL)
        ask(self)

    Stop.ask = ask_and_kill  # type: ignore[method-assign]
    train_in_small_windows(argv, cwd)


def test_a_reader_that_is_killed_ends_every_rank(place, tiny_model, uneven_rows):
    options = (
        f"--model {tiny_model} --dataset {uneven_rows} --streaming --max_steps 200 --run_name killed "
        "--global_batch_size 4 --report_to none --save_strategy no --max_length 64"
    )
    result = run_ranks(2, train_and_kill_the_reader, options.split(), str(place), folder=place / "killed.out")
    assert result.codes == [1, 1], result.output
    assert "DataLoader worker" in result.output and "killed by signal" in result.output, result.output
    assert result.seconds < 30


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read_a_million(path: str, count: int, buffer: int) -> None:
    """Read all rows, tokenize the last ones, and print the memory that this took beyond that of the imports."""
    from transformers import AutoTokenizer

    from unsloth_ddp.options import Settings
    from unsloth_ddp.stream import windows_of

    settings = Settings(dataset=[path], streaming=True, shuffle_buffer=buffer)
    found = windows_of(settings, None, AutoTokenizer.from_pretrained(DEMO_MODEL), seed=1)
    found.start = Position(0, count - 1000)
    before = peak()
    for window in itertools.islice(found, 20):
        assert isinstance(window, Window) and len(window.rows) == 100
    print(json.dumps({"bytes": peak() - before, "epoch": window.start.epoch}))


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
