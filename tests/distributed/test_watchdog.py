"""Ranks that die, freeze, fail or hang: named once, and everybody ends in seconds."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.ranks import Result, run_ranks, train
from unsloth_ddp.distributed.ranks import RankLocation, Ranks, this_location
from unsloth_ddp.distributed.watch.diagnosis import ExitNotice, Limits, RankStatus, exit_notice_for, judge, limits_from
from unsloth_ddp.distributed.watch.watchdog import Watchdog, _process_state
from unsloth_ddp.utils.errors import UserError

LIMITS = Limits(silence=30, no_progress=1794, interval=3)
NOW = 10_000.0


def rank(number: int, **changes) -> RankStatus:
    """A rank that trains and was heard of a second ago."""
    node = number // 2
    status = RankStatus(
        RankLocation(number, node, f"host{node}", 100 + number, 0.0), NOW - 1, NOW - 1, step=7, phase="training"
    )
    for name, value in changes.items():
        setattr(status, name, value)
    return status


def found(*ranks: RankStatus, now: float = NOW):
    return judge({s.location.rank: s for s in ranks}, now, LIMITS)


def exited(kind: str, ago: float, text: str = "why", code: int = 0) -> ExitNotice:
    return ExitNotice(kind, text, NOW - ago, code)


def test_ranks_that_work_are_left_alone():
    assert found(rank(0), rank(1), rank(2)) is None
    assert found(rank(0, phase="saving", last_progress=0.0), rank(1, last_progress=0.0)) is None
    assert (
        found(
            rank(0, exit_notice=exited("finished", 5)), rank(1, exit_notice=exited("finished", 1), connection_lost="")
        )
        is None
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"connection_lost": ""},
            "rank 3 (node 1, host host1, pid 103) died without an error message at step 7 (training)",
        ),
        ({"connection_lost": "No route to host"}, "rank 3 (node 1, host host1, pid 103) cannot be reached any more"),
        (
            {"last_heard": NOW - 31},
            "has not answered for 31 s, since step 7 (training): the process is frozen, or its host",
        ),
        ({"last_heard": NOW - 31, "suspended": True, "phase": "saving"}, "stopped (SIGSTOP"),
        ({"last_heard": NOW - 301, "phase": "saving"}, "has not answered for 301 s"),
        ({"exit_notice": exited("failed", 0.1, "KeyError: 1")}, "failed while training, at step 7: KeyError: 1"),
        ({"exit_notice": exited("secondary", 4, "gloo")}, "failed while training, at step 7: gloo"),
        ({"exit_notice": exited("signalled", 4, "SIGTERM")}, "was told to end (SIGTERM) at step 7"),
        ({"exit_notice": exited("finished", 31, code=75)}, "left with code 75 at step 7"),
        ({"exit_notice": exited("user_error", 4, "no such file", code=2)}, "no such file"),
    ],
)
def test_what_is_surely_wrong_is_named(changes, sentence):
    finding = found(rank(0), rank(1), rank(2), rank(3, **changes))
    assert finding is not None and sentence in finding.sentence and finding.ranks == (3,), finding


@pytest.mark.parametrize(
    "changes",
    [
        {"last_heard": NOW - 29},
        {"last_heard": NOW - 200, "phase": "saving"},
        {"last_heard": NOW - 200, "phase": "preparing"},
        {"exit_notice": exited("secondary", 1)},
        {"exit_notice": exited("signalled", 1)},
        {"exit_notice": exited("user_error", 1)},
        {"exit_notice": exited("finished", 300)},
    ],
)
def test_what_may_be_well_is_left_alone(changes):
    assert found(rank(0), rank(1, **changes)) is None


def test_the_cause_comes_before_its_consequences():
    torn, dead = rank(0, exit_notice=exited("secondary", 10)), rank(1, connection_lost="")
    assert found(torn, dead).ranks == (1,)
    failed = rank(2, exit_notice=exited("failed", 1))
    assert found(torn, dead, failed).ranks == (2,)
    silent = rank(1, last_heard=NOW - 20, phase="saving")
    assert found(torn, silent) is None, "waits for the silent one"
    assert found(torn, silent, now=NOW + 11).ranks == (1,)


def test_a_rank_torn_away_by_one_that_left_is_not_accused():
    torn = rank(0, exit_notice=exited("secondary", 4))
    assert "was told to end" in found(torn, rank(1, exit_notice=exited("signalled", 5))).sentence
    assert found(torn, rank(1, exit_notice=exited("user_error", 5, "no such file", code=2))).code == 2
    assert found(torn, rank(1, exit_notice=exited("finished", 5))).ranks == (0,)


def test_when_all_leave_for_one_reason_nobody_is_accused():
    assert found(rank(0, exit_notice=exited("user_error", 9)), rank(1, exit_notice=exited("user_error", 8))) is None
    assert found(rank(0, exit_notice=exited("signalled", 9)), rank(1, exit_notice=exited("signalled", 8))) is None


@pytest.mark.parametrize(
    ("main", "own", "prints"), [(None, None, True), (None, "user_error", False), ("user_error", None, False)]
)
def test_a_mistake_of_all_ranks_is_left_to_the_main_process(main, own, prints):
    # Its connection may close before its exit notice is read.
    notices = [rank(number, exit_notice=kind and exited(kind, 1)) for number, kind in enumerate((main, own))]
    watchdog = SimpleNamespace(status=notices[1], neighbours=[], ranks=SimpleNamespace(rank=1))
    assert Watchdog._prints_for_node(watchdog, notices[0]) is prints


def after_gaps(number: int, phase: str, *gaps: float) -> RankStatus:
    """A rank that made progress in this phase after so many seconds each, the last time at NOW."""
    status = rank(number, phase=phase, last_progress=NOW - sum(gaps))
    for count, ahead in enumerate(reversed(range(len(gaps))), 1):
        beat = {"count": count, "step": 7, "phase": phase, "stack": ""}
        status.update(beat, NOW - sum(gaps[len(gaps) - ahead :]))
    return status


@pytest.mark.parametrize(
    ("phase", "gaps", "limit"),
    [
        ("training", (3, 2, 3), 900), ("training", (60, 3), 1200), ("evaluating", (3,), 900), ("saving", (60,), 1200),
        # Never longer than a collective may take, where ranks wait in one.
        ("training", (300, 3), 1794), ("saving", (300,), 6000),
        ("training", (), 1794), ("saving", (), None), ("preparing", (60,), None), ("finishing", (60,), None),
    ],
)  # fmt: skip
def test_a_hang_is_measured_by_what_the_phase_took_so_far(phase, gaps, limit):
    ranks = [after_gaps(number, phase, *gaps) for number in (0, 1)]

    def at(seconds: float):
        for status in ranks:
            status.last_heard = NOW + seconds
        return found(*ranks, now=NOW + seconds)

    if limit is None:
        assert at(1e6) is None
        return
    assert at(limit) is None and at(limit + 1).ranks == (0, 1)
    why = "--ddp_timeout sets the limit" if limit == 1794 else f"the longest time so far was {max(gaps)} s"
    assert f"no rank has made progress for {limit} s ({why}); logs/rank_N.log shows" in at(limit + 1).sentence


def test_a_hang_names_the_rank_that_is_behind():
    finding = found(
        rank(0, progress_count=9, last_progress=NOW - 1800), rank(1, progress_count=8, last_progress=NOW - 1801)
    )
    assert finding.ranks == (1,) and "hangs behind the others" in finding.sentence
    finding = found(
        rank(0, progress_count=9, last_progress=NOW - 1800), rank(1, progress_count=9, last_progress=NOW - 1800)
    )
    assert finding.ranks == (0, 1) and finding.sentence.startswith("every rank hangs at step 7")
    assert found(rank(0, last_progress=NOW - 1800), rank(1, last_progress=NOW - 5)) is None
    assert found(rank(0, last_progress=NOW - 1800), rank(1, last_progress=NOW - 1800, phase="saving")) is None


def test_limits_follow_from_the_options():
    assert limits_from(30, 1800) == LIMITS
    assert limits_from(5, 1800).interval == 1 and limits_from(30, 10).no_progress == 8


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (None, "finished"),
        (SystemExit(75), "finished"),
        (UserError("x"), "user_error"),
        (KeyboardInterrupt(), "signalled"),
        (ValueError("bad row"), "failed"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2761"), "secondary"),
        (RuntimeError("rank 2 failed: 'messages'"), "secondary"),
    ],
)
def test_the_exit_notice_of_a_rank(error, kind):
    assert exit_notice_for(error, 0.0).kind == kind


STEPS = "--max_steps 400 --max_length 64 --save_strategy no --run_name r --gradient_checkpointing none --report_to none"


def train_and(event: str, rank: int, kind: str, argv: list[str], cwd: str) -> None:
    """train_ddp.py, in which one rank does `kind` to itself when it gets to `event`."""
    if int(os.environ["RANK"]) == rank or event.startswith("every "):
        _arm(event.removeprefix("every "), lambda: _suffer(kind, Path(cwd)))
    train(argv, cwd)


def _suffer(kind: str, folder: Path) -> None:
    (folder / "struck").write_text(str(time.time()))
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()
    elif kind == "mistake":
        raise UserError("there is no such thing on this rank; make it.")
    elif kind == "loop":
        threading.Event().wait()
    else:
        raise RuntimeError("a bad row came up")


def _arm(event: str, act) -> None:
    """Have `act` called at the `event` of a run."""
    from unsloth_ddp.data.sources import examples as data
    from unsloth_ddp.model.loading import load as model
    from unsloth_ddp.training.trainer import DDPTrainer

    if event == "data":
        read = data._examples

        def read_and_act(*args, **kwargs):
            act()
            return read(*args, **kwargs)

        data._examples = read_and_act
    elif event == "model":
        load = model.load_model

        def load_model(*args):
            act()
            return load(*args)

        model.load_model = load_model
    elif event == "step":
        loss, calls = DDPTrainer.compute_loss, []

        def compute_loss(self, given, *args, **kwargs):
            calls.append(1)
            if len(calls) == 12 and given.training:
                act()
            return loss(self, given, *args, **kwargs)

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

    def run(event: str, rank: int, kind: str, ranks: int = 2, options: str = "", timeout: float = 180):
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


@pytest.mark.parametrize(
    ("rank", "ranks"), [(0, 2), pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(2, 3, marks=pytest.mark.slow)]
)
def test_a_killed_rank_is_named_and_ends_the_others(strike, rank, ranks):
    result, seconds = strike("step", rank, "kill", ranks)
    assert [code for r, code in enumerate(result.codes) if r != rank] == [1] * (ranks - 1), result.output
    (sentence,) = sentences(result)
    assert f"rank {rank} (node 0, host " in sentence and "died without an error message at step" in sentence
    assert "Traceback" not in result.output
    assert seconds < 25


@pytest.mark.parametrize("event", ["data", pytest.param("evaluation", marks=pytest.mark.torture)])
def test_a_rank_killed_outside_the_steps_is_named(strike, event):
    result, seconds = strike(
        event, 1 if event == "evaluation" else 0, "kill", options="--eval_fraction 0.2 --max_steps 4"
    )
    (sentence,) = sentences(result)
    assert "died without an error message" in sentence
    assert seconds < 25


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.torture)])
def test_a_stopped_rank_is_named_and_killed(strike, rank):
    result, seconds = strike("step", rank, "stop", options="--watch_timeout 5")
    (sentence,) = sentences(result)
    assert f"rank {rank} (node 0, host " in sentence and "stopped (SIGSTOP" in sentence, result.output
    assert result.codes == ([1, -9] if rank else [-9, 1])
    assert seconds < 60


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_exception_in_one_rank_is_told_once(strike, rank, tmp_path):
    result, seconds = strike("step", rank, "raise", ranks=2)
    (sentence,) = sentences(result)
    assert f"rank {rank} (node 0" in sentence and "RuntimeError: a bad row came up" in sentence
    assert result.output.count("Traceback (most recent call last)") == 1, result.output
    assert result.codes == [1, 1]
    assert seconds < 25
    assert "Thread 0x" in (tmp_path / "outputs/r/logs" / f"rank_{1 - rank}.log").read_text()


@pytest.mark.slow
def test_a_loop_without_end_is_found(strike, tmp_path):
    result, seconds = strike("step", 1, "loop", options="--ddp_timeout 10")
    (sentence,) = sentences(result)
    assert "no rank has made progress for 8 s" in sentence, result.output
    assert "test_watchdog.py" in result.output, "where each rank was"
    assert seconds < 60
    assert "_suffer" in (tmp_path / "outputs/r/logs/rank_1.log").read_text()


@pytest.mark.slow
def test_one_rank_told_to_end_before_the_steps_is_named(strike):
    result, seconds = strike("model", 1, "term")
    (sentence,) = sentences(result)
    assert "rank 1 (node 0" in sentence and "was told to end (by a signal)" in sentence
    assert result.codes == [1, 1] and seconds < 25


def test_ranks_that_are_all_told_to_end_accuse_nobody(strike):
    result, seconds = strike("every model", -1, "term")
    assert sentences(result) == [] and result.codes == [1, 1]
    assert seconds < 25


@pytest.mark.slow
def test_a_mistake_found_by_one_rank_alone_ends_all_with_its_sentence(strike):
    result, _ = strike("step", 1, "mistake")
    assert sentences(result) == ["train_ddp.py: error: there is no such thing on this rank; make it."]
    assert result.codes[0] == 2 and "Traceback" not in result.output


def forked(tmp: str) -> None:
    """A rank that leaves a forked child behind and dies; the child is to keep no connection open."""
    from unsloth_ddp.config.options import Settings
    from unsloth_ddp.distributed.ranks import ranks_from_environment
    from unsloth_ddp.distributed.runtime import started
    from unsloth_ddp.distributed.watch.watchdog import watched

    settings = Settings()
    with started(settings, ranks_from_environment()) as runtime, watched(settings, runtime):
        if runtime.ranks.rank == 1:
            child = os.fork()
            if child == 0:
                time.sleep(100)
                os._exit(0)
            (Path(tmp) / "struck").write_text(f"{time.time()} {child}")
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


def test_a_forked_child_does_not_hide_the_death_of_its_rank(tmp_path):
    result = run_ranks(2, forked, str(tmp_path), folder=tmp_path / "out", end=False)
    began, child = (tmp_path / "struck").read_text().split()
    os.kill(int(child), signal.SIGTERM)
    assert "rank 1 (node 0" in sentences(result)[0] and "died without an error message" in sentences(result)[0]
    assert time.time() - float(began) < 25


def test_an_unwatched_run_still_runs(tmp_path, tiny_model, uneven_rows):
    argv = f"--model {tiny_model} --dataset {uneven_rows} {STEPS} --max_steps 1 --watch_timeout 0".split()
    run_ranks(2, train, argv, str(tmp_path), folder=tmp_path / "out").check()


def test_a_process_is_known_again_after_the_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    location, boot_time = this_location(Ranks()), psutil.boot_time()
    monkeypatch.setattr("psutil._psplatform.boot_time", lambda: boot_time + 3600)
    assert psutil.Process().create_time() > time.time() + 3000
    assert _process_state(location) == psutil.STATUS_RUNNING
    assert _process_state(dataclasses.replace(location, started=location.started - 10)) is None
