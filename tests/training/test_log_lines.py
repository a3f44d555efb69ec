"""The lines of a log file or a pipe: aligned, with a header now and then, and nothing twice."""

from __future__ import annotations

import json
import math
import re
from types import SimpleNamespace

import pytest

from unsloth_ddp.distributed.watch.progress import Progress
from unsloth_ddp.training.callbacks import log_interval
from unsloth_ddp.training.shown.display import LINES_A_HEADER, ShowTraining, joined, training_cells
from unsloth_ddp.training.shown.status import Status, TimeLeft, shown_clock, shown_number

LOGS = {
    "loss": 1.5, "grad_norm": 0.25, "learning_rate": 1e-4, "tokens_per_second": 15904.2, "peak_memory_bytes": 2.0**31,
}  # fmt: skip


def begun(steps: int, step: int = 0, epoch: float = 0.0) -> tuple[ShowTraining, SimpleNamespace]:
    """What shows a run, and the run's state."""
    state = SimpleNamespace(is_world_process_zero=True, max_steps=steps, global_step=step, epoch=epoch)
    shown = ShowTraining(None, Progress())
    shown.on_train_begin(None, state, None)
    return shown, state


def printed(capsys: pytest.CaptureFixture[str], steps: int, lines: int, **logs: float) -> list[str]:
    shown, state = begun(steps)
    for _ in range(lines):
        state.global_step += 1
        shown.on_step_end(None, state, None)
        shown.on_log(None, state, None, {**LOGS, **logs})
    return capsys.readouterr().out.splitlines()


def test_columns_stand_below_their_names_and_the_header_comes_again(capsys) -> None:
    lines = printed(capsys, 1000, 2 * LINES_A_HEADER + 1)
    headers = [number for number, line in enumerate(lines) if "loss" in line]
    assert headers == [0, LINES_A_HEADER + 1, 2 * LINES_A_HEADER + 2] and len(lines) == 2 * LINES_A_HEADER + 4
    assert len({len(line) for line in lines}) == 1
    assert " ".join(lines[0].split()) == "step epoch loss grad norm learning rate tokens/s memory time left"
    assert lines[1].split()[:7] == ["1/1000", "0.00", "1.5000", "0.250", "1.00e-04", "15,904", "2.0"]
    # Every value ends where its name does.
    for name, value in (("loss", "1.5000"), ("tokens/s", "15,904"), ("memory", "2.0 GiB")):
        assert lines[0].index(name) + len(name) == lines[1].index(value) + len(value)


def test_a_line_without_margin_keeps_the_columns(capsys) -> None:
    shown, state = begun(10)
    for margin in ({"rewards/margins": 0.5}, {}, {"rewards/margins": -0.25}):
        shown.on_log(None, state, None, {**LOGS, "rewards/accuracies": 0.75, **margin})
    header, *lines = capsys.readouterr().out.splitlines()
    assert "accuracy    margin" in header and len({len(line) for line in (header, *lines)}) == 1
    assert [line.split()[4] for line in lines] == ["0.500", "-", "-0.250"]


def test_the_largest_numbers_fit_100_columns(capsys) -> None:
    status = Status(10**6, step=10**6 - 3, epoch=999.99)
    status.time_left = TimeLeft(iter([0.0, 30.0, 30.0]).__next__)
    status.time_left.step_done(1)
    status.time_left.step_done(2)
    large = {**LOGS, "loss": 123456.789, "grad_norm": 1e9, "mfu": 0.461, "tokens_per_second": 1.2e6}
    line = joined(training_cells(status, large))
    assert len(line) <= 100 and "46.1%" in line and "347d 5h" in line


def test_an_evaluation_has_a_line(capsys) -> None:
    shown, state = begun(1000, 50, 2.5)
    shown.on_log(None, state, None, {"eval_loss": 0.5517, "eval_runtime": 3.25})
    assert capsys.readouterr().out == "  50/1000    2.50  evaluation: loss 0.5517, 3.2 s\n"


def test_a_run_in_a_pipe_prints_lines_and_no_dictionaries(job, place) -> None:
    options = "--max_steps 6 --logging_steps 2 --eval_fraction 0.2 --eval_steps 3"
    text = job(options, "lines", ranks=2).output
    number = r"[0-9.,e+-]+"
    steps = re.findall(rf"^ *(\d)/6 +{number} +({number}) +{number} +{number} +{number} +{number} [KMG]iB", text, re.M)
    history = json.loads((place / "outputs/lines/trainer_state.json").read_text())["log_history"]
    trained = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    assert [(int(step), float(loss)) for step, loss in steps] == [
        (step, pytest.approx(loss, abs=1e-4)) for step, loss in trained
    ]
    assert re.findall(r"^ *(\d)/6 +\S+  evaluation: loss \d", text, re.M) == ["3", "6"]
    assert text.count("learning rate   tokens/s") == 1
    assert "{'" not in text and "it/s" not in text and "[transformers]" not in text
    log = (place / "outputs/lines/logs/rank_0.log").read_text()
    assert log.count("{'loss': ") == len(trained) and log.count("{'eval_loss': ") == 2
    assert all(entry["peak_memory_bytes"] > 2**20 for entry in history if "loss" in entry)


def test_time_left_leaves_the_first_step_out() -> None:
    now = [0.0]
    time_left = TimeLeft(lambda: now[0])
    assert time_left.seconds(10) is None
    for step, at in ((1, 100.0), (2, 102.0), (3, 104.0)):
        now[0] = at
        time_left.step_done(step)
        assert (time_left.seconds(10) is None) == (step == 1)
    assert time_left.seconds(10) == 14.0
    now[0] = 105.0
    assert time_left.seconds(10) == 13.0
    now[0] = 1000.0
    assert time_left.seconds(10) == 0.0


def test_the_time_left_is_that_of_the_gpu_where_the_host_launches_steps_ahead_of_it(capsys) -> None:
    shown, state = begun(100)
    assert shown.status is not None
    # The host ends each step one second after its begin, and waits nine more for the GPU when the step is logged.
    times = iter(10.0 * step + waited for step in range(3) for waited in (1.0, 10.0))
    now = [0.0]
    shown.status.time_left = TimeLeft(lambda: now[0])
    for _ in range(3):
        state.global_step += 1
        now[0] = next(times)
        shown.on_step_end(None, state, None)
        now[0] = next(times)
        shown.on_log(None, state, None, LOGS)
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == ["-", "16:20", "16:10"]


def test_numbers_and_durations_keep_their_width() -> None:
    assert [shown_number(value) for value in (None, 0.0, 1.23456, 1e-7, 12345.6, math.nan, -0.5)] == [
        "-", "0.0000", "1.2346", "1.00e-07", "1.23e+04", "nan", "-0.5000",
    ]  # fmt: skip
    assert [shown_clock(seconds) for seconds in (None, 5, 65.4, 3723, 2 * 86_400 + 11_045)] == [
        "-", "0:05", "1:05", "1:02:03", "2d 3h",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("steps", "interval"), [(1, 1), (8, 1), (20, 2), (49, 2), (50, 5), (99, 5), (100, 10), (10_000, 10)]
)
def test_short_runs_are_logged_more_often(steps: int, interval: int) -> None:
    assert log_interval(steps) == interval


def test_the_last_step_is_logged(job, place):
    job("--max_steps 5 --logging_steps 3 --save_strategy no", "last", ranks=2)
    state = json.loads((place / "outputs/last/trainer_state.json").read_text())
    assert [entry["step"] for entry in state["log_history"] if "loss" in entry] == [1, 3, 5]
