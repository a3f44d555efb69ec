"""Ranks that die, freeze, fail or hang: named once, and everybody ends in seconds."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.ranks import Result, run_ranks, train

STEPS = "--max_steps 400 --max_length 64 --save_strategy no --run_name r --gradient_checkpointing none --report_to none"


def train_and(event: str, rank: int, kind: str, argv: list[str], cwd: str) -> None:
    """train_ddp.py, in which one rank does `kind` to itself when it gets to `event`."""
    if int(os.environ["RANK"]) == rank:
        _arm(event, lambda: _suffer(kind, Path(cwd)))
    train(argv, cwd)


def _suffer(kind: str, folder: Path) -> None:
    (folder / "struck").write_text(str(time.time()))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "loop":
        threading.Event().wait()
    else:
        raise RuntimeError("a bad row came up")


def _arm(event: str, act) -> None:
    """Have `act` called at the `event` of a run."""
    from unsloth_ddp import data
    from unsloth_ddp.trainer import DDPTrainer

    if event == "data":
        read = data._examples

        def examples(*args):
            act()
            return read(*args)

        data._examples = examples
    elif event == "step":
        loss, calls = DDPTrainer.compute_loss, []

        def compute_loss(self, model, *args, **kwargs):
            calls.append(1)
            if len(calls) == 12 and model.training:
                act()
            return loss(self, model, *args, **kwargs)

        DDPTrainer.compute_loss = compute_loss
    elif event == "evaluation":
        loop = DDPTrainer.evaluation_loop

        def evaluation_loop(self, *args, **kwargs):
            act()
            return loop(self, *args, **kwargs)

        DDPTrainer.evaluation_loop = evaluation_loop
    else:
        raise ValueError(event)


@pytest.fixture
def strike(tmp_path, tiny_model, uneven_rows):
    """Run a job in which `rank` suffers `kind` at `event`; returns the result and the seconds until all had ended."""

    def run(event: str, rank: int, kind: str, ranks: int = 2, options: str = "", timeout: float = 100):
        argv = f"--model {tiny_model} --dataset {uneven_rows} {STEPS} {options}".split()
        result = run_ranks(
            ranks,
            train_and,
            event,
            rank,
            kind,
            argv,
            str(tmp_path),
            folder=tmp_path / "out",
            timeout=timeout,
            end=False,
        )
        return result, time.time() - float((tmp_path / "struck").read_text())

    return run


def sentences(result: Result) -> list[str]:
    return [line for line in result.output.splitlines() if line.startswith("train_ddp.py: error: ")]


@pytest.mark.parametrize(("rank", "ranks"), [(1, 2), (0, 2), (2, 3)])
def test_a_killed_rank_is_named_and_ends_the_others(strike, rank, ranks):
    result, seconds = strike("step", rank, "kill", ranks)
    assert [code for r, code in enumerate(result.codes) if r != rank] == [1] * (ranks - 1), result.output
    (sentence,) = sentences(result)
    assert f"rank {rank} (node 0, host " in sentence and "died without a word at step" in sentence
    assert "Traceback" not in result.output
    assert seconds < 10


@pytest.mark.parametrize("event", ["data", "evaluation"])
def test_a_rank_killed_outside_the_steps_is_named(strike, event):
    result, seconds = strike(
        event, 1 if event == "evaluation" else 0, "kill", options="--eval_fraction 0.2 --max_steps 4"
    )
    (sentence,) = sentences(result)
    assert "died without a word" in sentence
    assert seconds < 10


def test_a_stopped_rank_is_named_and_killed(strike):
    result, seconds = strike("step", 1, "stop", options="--watch_timeout 5")
    (sentence,) = sentences(result)
    assert "rank 1 (node 0, host " in sentence and "stopped (SIGSTOP" in sentence, result.output
    assert result.codes == [1, -9]
    assert seconds < 15


def test_a_stopped_main_process_is_named_by_the_others(strike):
    result, seconds = strike("step", 0, "stop", options="--watch_timeout 5")
    (sentence,) = sentences(result)
    assert "rank 0 (node 0, host " in sentence and "stopped (SIGSTOP" in sentence, result.output
    assert result.codes == [-9, 1]
    assert seconds < 15


@pytest.mark.parametrize("rank", [0, 1])
def test_an_exception_in_one_rank_is_told_once(strike, rank, tmp_path):
    result, seconds = strike("step", rank, "raise", ranks=2)
    (sentence,) = sentences(result)
    assert f"rank {rank} (node 0" in sentence and "RuntimeError: a bad row came up" in sentence
    assert result.output.count("Traceback (most recent call last)") == 1, result.output
    assert result.codes == [1, 1]
    assert seconds < 10
    assert "Thread 0x" in (tmp_path / "outputs/r/logs" / f"rank_{1 - rank}.log").read_text()


def test_a_loop_without_end_is_found(strike, tmp_path):
    result, seconds = strike("step", 1, "loop", options="--ddp_timeout 10")
    (sentence,) = sentences(result)
    assert "no rank has moved for 8 s" in sentence, result.output
    assert "test_watch.py" in result.output, "where each rank was"
    assert seconds < 25
    assert "_suffer" in (tmp_path / "outputs/r/logs/rank_1.log").read_text()
