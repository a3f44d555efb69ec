"""Per-rank step times: what is measured, who is a straggler, and that a slow rank is named in a run."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest
import torch

from tests.ranks import run_ranks, train
from unsloth_ddp.training.shown import meter
from unsloth_ddp.training.shown.log_metrics import Stragglers, describe_straggler
from unsloth_ddp.training.shown.meter import OwnWorkTimer


def named(*intervals: tuple[list[float], list[float]], passed: float = 1.0) -> list[int]:
    stragglers = Stragglers()
    return [rank for seconds, tokens in intervals for rank in stragglers.observe(seconds, tokens, passed)]


EVEN = [100.0, 100.0, 100.0]


def test_a_slow_rank_is_named_once_after_three_intervals():
    slow = ([0.5, 0.9, 0.5], EVEN)
    assert named(slow, slow, slow) == []
    assert named(slow, slow, slow, slow, slow, slow) == [1]


def test_two_ranks_are_compared_with_each_other():
    assert named(*[([0.9, 0.5], [100.0, 100.0])] * 4) == [0]


@pytest.mark.parametrize(
    ("seconds", "tokens", "passed"),
    [
        ([0.5, 0.7, 0.5], EVEN, 1.0),
        ([0.5, 0.9, 0.5], [100.0, 200.0, 100.0], 1.0),
        ([0.01, 0.03, 0.01], EVEN, 1.0),
    ],
    ids=["a little slower", "longer rows", "no matter to the step"],
)
def test_who_is_no_straggler(seconds, tokens, passed):
    assert named(*[(seconds, tokens)] * 6, passed=passed) == []


def test_one_quick_interval_starts_anew():
    slow, quick = ([0.5, 0.9, 0.5], EVEN), ([0.5, 0.5, 0.5], EVEN)
    assert named(quick, slow, slow, quick, slow, slow) == []


def test_own_time_leaves_out_the_last_backward_pass(monkeypatch):
    now = [7.0]
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    timer = OwnWorkTimer(torch.device("cpu"))
    timer.start(reading=0.25, micro_batches=2)
    timer.forward_done()
    now[0] += 0.5
    timer.forward_done()
    now[0] += 8
    assert timer.take() == (0.75, 1)
    assert timer.take() == (0.0, 0)


def test_the_line_names_host_and_figures():
    line = describe_straggler("rank 1 (node 0, host b, pid 7)", 1, ([0.2, 0.5, 0.3], EVEN, 1.0), 3)
    assert (
        line.startswith("rank 1 (node 0, host b, pid 7) is slower")
        and "0.500 s a step where theirs takes 0.250 s" in line
    )


def train_slowly(rank: int, argv: list[str], cwd: str) -> None:
    """train_ddp.py, in which the forward passes of one rank take longer."""
    from unsloth_ddp.training.tasks.text import TextTask

    forward = TextTask.loss

    def slow(self, *args):
        if int(os.environ["RANK"]) == rank:
            time.sleep(0.6)
        return forward(self, *args)

    TextTask.loss = slow
    train(argv, cwd)


@pytest.mark.slow
def test_a_slow_rank_is_named_in_a_run(tmp_path, tiny_model, uneven_rows):
    argv = f"--model {tiny_model} --dataset {uneven_rows} --max_length 64 --max_steps 12 --logging_steps 2".split()
    argv += ["--global_batch_size", "4", "--save_strategy", "no", "--run_name", "r", "--gradient_checkpointing", "none"]
    result = run_ranks(2, train_slowly, 1, argv, str(tmp_path), folder=tmp_path / "out").check()
    assert result.outputs[0].count("is slower than the others") == 1
    assert "rank 1 (node 0, host " in result.outputs[0]
    assert "is slower" not in result.outputs[1]
    log = (tmp_path / "outputs/r/logs/rank_0.log").read_text()
    assert "rank_step_seconds_max" in log
    first, second = (float(s) for s in log.split("own seconds a step of each rank: ")[-1].split()[:2])
    assert second > 0.6 > first
