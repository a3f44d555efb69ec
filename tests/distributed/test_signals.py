"""Signals and the time limit: what they ask for, and that they are heard whatever the main thread does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.ranks import free_port, run_ranks
from tests.runtimes import cpu_runtime
from tests.waiting import wait_until
from unsloth_ddp.distributed.exit_codes import note_exit_code, under_launcher
from unsloth_ddp.distributed.signals import (
    LAUNCHER_ENDED,
    ONE_REQUEST_SECONDS,
    SignalCounter,
    StopRequest,
    seconds_since_launch,
)
from unsloth_ddp.run.outcomes import stopped


def test_signals_that_come_together_are_one_request():
    signals = SignalCounter(parent=7)
    assert signals.classify(100.0, 7) == "first"
    assert signals.classify(100.0 + ONE_REQUEST_SECONDS / 2, 7) == "repeated"
    assert signals.classify(100.0 + ONE_REQUEST_SECONDS * 2, 7) == "second"


def test_the_launchers_death_is_no_second_request():
    signals = SignalCounter(parent=7)
    assert signals.classify(100.0, 7) == "first"
    assert signals.classify(200.0, 1) == "repeated"
    assert signals.classify(201.0, 1) == "second"


def test_a_launchers_death_alone_is_a_request():
    assert SignalCounter(parent=7).classify(1.0, 1) == "first"


def test_a_launchers_death_is_a_failure_and_a_request_is_a_stop(tmp_path):
    """node.sh starts again after a failure only."""
    codes = [stopped(cause, tmp_path / "checkpoint-4").exit_code for cause in ("SIGTERM", LAUNCHER_ENDED)]
    assert codes == [75, 1]
    assert "Stopped on the end of its launcher; the same command resumes from" in str(stopped(LAUNCHER_ENDED, tmp_path))


def test_launchers_are_known_by_their_variables():
    assert under_launcher({"TORCHELASTIC_RUN_ID": "none"})
    assert under_launcher({"ACCELERATE_DYNAMO_BACKEND": "no"})
    assert not under_launcher({"RANK": "0", "ACCELERATE_MIXED_PRECISION": "no"})


def test_the_exit_code_is_noted_by_the_first_process_of_a_node(tmp_path):
    path = tmp_path / "code"
    environ = {"UNSLOTH_DDP_EXIT_CODE_FILE": str(path)}
    note_exit_code(75, {**environ, "LOCAL_RANK": "1"})
    note_exit_code(0, {**environ, "LOCAL_RANK": "0"})
    note_exit_code(75, {})
    assert not path.exists()
    note_exit_code(75, {**environ, "LOCAL_RANK": "0"})
    assert path.read_text() == "75\n"
    note_exit_code(2, environ | {"UNSLOTH_DDP_EXIT_CODE_FILE": "/nowhere/code"})


def test_a_time_limit_counts_from_the_launchers_start():
    assert seconds_since_launch({}) == 0
    assert 0 < seconds_since_launch({"TORCHELASTIC_RUN_ID": "x"}) < 1e7


def test_a_job_whose_time_is_over_is_not_started_again(capsys):
    ended = []
    environ = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1"}

    def end(code: int) -> None:
        ended.append(code)
        raise SystemExit

    with pytest.raises(SystemExit):
        StopRequest(is_main=True, end_process=end).listen("0.000001", environ)
    assert ended == [75] and "max_time 0.000001 is over; not started again." in capsys.readouterr().out


def stop_while_loading() -> None:
    """A rank whose main thread is inside a call that runs no signal handler: gloo waits for a peer that never comes."""
    import torch.distributed as dist

    stop = StopRequest(is_main=True)
    stop.listen(None, {})
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    dist.TCPStore("127.0.0.1", free_port(), 2, is_master=True)


def test_before_the_first_step_a_signal_ends_the_process_at_once(tmp_path):
    result = run_ranks(1, stop_while_loading, folder=tmp_path)
    assert result.codes == [1]
    assert result.output.strip() == "SIGTERM: stopped before the first step; nothing is lost."


def begin_training(stop: StopRequest, has_checkpoint: bool = True) -> None:
    """Begin the steps of a run on one rank."""
    stop.begin_training(cpu_runtime(), timedelta(seconds=60), lambda: has_checkpoint)


def signal_while_ignored(number: int, told: str) -> None:
    """A training rank whose parent had a signal ignored; writes to the file `told` what it takes it for."""
    signal.signal(number, signal.SIG_IGN)
    stop = StopRequest(is_main=True)
    stop.listen(None, {})
    begin_training(stop)
    os.kill(os.getpid(), number)
    if number != signal.SIGHUP:
        wait_until(lambda: stop.local_cause is not None, 30, "the signal")
    Path(told).write_text(str(stop.local_cause))


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGUSR1, "SIGUSR1"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "None")]
)
def test_only_what_nohup_and_shells_have_ignored_stays_ignored(tmp_path, number, cause):
    run_ranks(1, signal_while_ignored, number, str(tmp_path / "told"), folder=tmp_path).check()
    assert (tmp_path / "told").read_text() == cause


def signal_after_compiling(told: str, cache: str) -> None:
    """Compile a Triton kernel between two steps of a rank; write to the file `told` what it takes SIGUSR1 for."""
    os.environ["TRITON_CACHE_DIR"] = cache
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def copy(source, target, size: tl.constexpr):
        place = tl.arange(0, size)
        tl.store(target + place, tl.load(source + place))

    stop = StopRequest(is_main=True)
    stop.listen(None, {})
    begin_training(stop)
    given = {"source": "*fp32", "target": "*fp32", "size": "constexpr"}
    triton.compile(ASTSource(triton.jit(copy), given, {"size": 128}), target=GPUTarget("cuda", 90, 32))
    stop.start_poll()
    stop.finish_poll()
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: stop.local_cause is not None, 30, "the signal")
    Path(told).write_text(str(stop.local_cause))


def test_a_compiler_with_signal_handlers_of_its_own_does_not_take_the_runs_signals(tmp_path):
    told = tmp_path / "told"
    run_ranks(1, signal_after_compiling, str(told), str(tmp_path / "cache"), folder=tmp_path).check()
    assert told.read_text() == "SIGUSR1"


def second_signal(first: int, second: int, kept: bool) -> None:
    """A training rank that is signalled twice."""
    stop = StopRequest(is_main=True)
    stop.listen(None, {})
    begin_training(stop, has_checkpoint=kept)
    os.kill(os.getpid(), first)
    wait_until(lambda: stop.local_cause is not None, 30, "the signal")
    stop._signals._first -= ONE_REQUEST_SECONDS + 1
    os.kill(os.getpid(), second)
    time.sleep(30)


@pytest.mark.parametrize(("kept", "code"), [(True, 75), (False, 1)])
def test_a_second_signal_ends_a_training_rank_at_once(tmp_path, kept, code):
    result = run_ranks(1, second_signal, signal.SIGINT, signal.SIGTERM, kept, folder=tmp_path)
    # By itself it would end with 0.
    assert result.codes == [code]
    lines = result.output.strip().splitlines()
    assert lines[0].startswith("SIGINT: saving a checkpoint after this step; a second signal")
    assert lines[1] == "SIGTERM again: stopped at once; the last complete checkpoint stays."


def worker_is_not_a_request() -> None:
    """A worker that is terminated must not look like a signal to the run; nor may Ctrl-C end the worker."""
    stop = StopRequest(is_main=True)
    stop.listen(None, {})
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    begin_training(stop)
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_until(lambda: stop.local_cause is not None, 30, "the signal")
    assert stop.local_cause == "SIGUSR1"


def test_workers_and_the_run_do_not_take_each_others_signals(tmp_path):
    run_ranks(1, worker_is_not_a_request, folder=tmp_path).check()


LAUNCHED = """
import os, sys, time
sys.path.insert(0, {repo!r})
from tests.distributed.test_signals import begin_training
from unsloth_ddp.distributed.signals import StopRequest
stop = StopRequest(is_main=True)
stop.listen(None, {{"TORCHELASTIC_RUN_ID": "x"}})
begin_training(stop)
print("ready", os.getpid(), flush=True)
deadline = time.monotonic() + 30
while stop.local_cause is None and time.monotonic() < deadline:
    time.sleep(0.01)
# In one write, because the thread that reads signals may be printing.
os.write(1, f"{{stop.local_cause}}\\n".encode())
"""
LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1]])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_a_killed_launcher_is_a_request_to_its_ranks():
    rank = LAUNCHED.format(repo=str(REPO))
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, rank], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline().startswith("ready")
        launcher.kill()
        # By two threads, in any order, and the second may end the process before the first has ended its line.
        said = launcher.stdout.read()
        notice = "SIGTERM: saving a checkpoint after this step; a second signal ends it at once."
        assert notice in said and said.replace(notice, "").strip() == LAUNCHER_ENDED
