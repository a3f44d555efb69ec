"""Signals and the time limit: what they ask for, and that they are heard whatever the main thread does."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import REPO
from tests.ranks import free_port, run_ranks
from unsloth_ddp.distributed.exit_codes import note_exit_code
from unsloth_ddp.distributed.signals import ONE_REQUEST, Requests, Stop, launched_ago, parse_duration, under_launcher
from unsloth_ddp.utils.errors import UserError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3600", 3600), ("1.5", 1.5), ("90s", 90), ("90m", 5400), ("2h", 7200), ("1d", 86400), ("1h30m", 5400),
        (" 2H ", 7200), ("0.5h", 1800), ("05:30", 330), ("01:00:00", 3600), ("1-12", 129600), ("1-12:30", 131400),
        ("2-00:00:01", 172801), ("90:00", 5400),
    ],
)  # fmt: skip
def test_a_duration_in_every_notation(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "0m", "-5", "1h 30", "5x", "1:2:3:4", "nan", "inf", "1e3", "h", "-"])
def test_what_is_no_duration_is_refused_with_the_value(text):
    with pytest.raises(UserError, match="it takes a time such as"):
        parse_duration(text)


@given(st.text() | st.from_regex(r"[0-9dhms:.\- ]{0,12}", fullmatch=True))
def test_any_text_is_a_positive_time_or_refused(text):
    try:
        seconds = parse_duration(text)
    except UserError:
        return
    assert seconds > 0 and math.isfinite(seconds)


def test_signals_that_come_together_are_one_request():
    requests = Requests(parent=7)
    assert requests.take(100.0, 7) == "stop"
    assert requests.take(100.0 + ONE_REQUEST / 2, 7) == "same"
    assert requests.take(100.0 + ONE_REQUEST * 2, 7) == "at once"


def test_the_launchers_death_is_no_second_request():
    requests = Requests(parent=7)
    assert requests.take(100.0, 7) == "stop"
    assert requests.take(200.0, 1) == "same"
    assert requests.take(201.0, 1) == "at once"


def test_a_launchers_death_alone_is_a_request():
    assert Requests(parent=7).take(1.0, 1) == "stop"


def test_launchers_are_known_by_their_variables():
    assert under_launcher({"TORCHELASTIC_RUN_ID": "none"})
    assert under_launcher({"ACCELERATE_MIXED_PRECISION": "no"})
    assert not under_launcher({"RANK": "0"})


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
    assert launched_ago({}) == 0
    assert 0 < launched_ago({"TORCHELASTIC_RUN_ID": "x"}) < 1e7


def test_a_job_whose_time_is_over_is_not_started_again(capsys):
    ended = []
    environ = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1"}

    def end(code: int) -> None:
        ended.append(code)
        raise SystemExit

    with pytest.raises(SystemExit):
        Stop(is_main=True, ended=end).listen("0.000001", environ)
    assert ended == [75] and "max_time 0.000001 is over; not started again." in capsys.readouterr().out


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited for nothing"
        time.sleep(0.005)


def stop_while_loading() -> None:
    """A rank whose main thread is inside a call that runs no signal handler: gloo waits for a peer that never comes."""
    import torch.distributed as dist

    stop = Stop(is_main=True)
    stop.listen(None, {})
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    dist.TCPStore("127.0.0.1", free_port(), 2, is_master=True)


def test_before_the_first_step_a_signal_ends_the_process_at_once(tmp_path):
    result = run_ranks(1, stop_while_loading, folder=tmp_path, timeout=60)
    assert result.codes == [1]
    assert result.output.strip() == "SIGTERM: stopped before the first step; nothing is lost."


def signal_while_ignored(number: int) -> None:
    """An armed rank whose parent had a signal ignored."""
    signal.signal(number, signal.SIG_IGN)
    stop = Stop(is_main=True)
    stop.listen(None, {})
    stop.armed = True
    os.kill(os.getpid(), number)
    if number != signal.SIGHUP:
        wait_for(lambda: stop.cause)
    print(stop.cause)


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGUSR1, "SIGUSR1"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "None")]
)
def test_only_what_nohup_and_shells_have_ignored_stays_ignored(tmp_path, number, cause):
    result = run_ranks(1, signal_while_ignored, number, folder=tmp_path, timeout=60).check()
    assert result.output.strip().splitlines()[-1] == cause


def second_signal(first: int, second: int, kept: bool) -> None:
    """An armed rank that is signalled twice."""
    stop = Stop(is_main=True)
    stop.listen(None, {})
    stop.armed, stop.kept = True, lambda: kept
    os.kill(os.getpid(), first)
    wait_for(lambda: stop.cause)
    stop.requests.first -= ONE_REQUEST + 1
    os.kill(os.getpid(), second)
    time.sleep(30)


@pytest.mark.parametrize(("kept", "code"), [(True, 75), (False, 1)])
def test_a_second_signal_ends_an_armed_rank_at_once(tmp_path, kept, code):
    result = run_ranks(1, second_signal, signal.SIGINT, signal.SIGTERM, kept, folder=tmp_path, timeout=60)
    assert result.codes == [code] and result.seconds < 20
    lines = result.output.strip().splitlines()
    assert lines[0].startswith("SIGINT: saving a checkpoint at the end of this step; a second signal")
    assert lines[1] == "SIGTERM again: stopped at once; the last whole checkpoint stays."


def worker_is_not_a_request() -> None:
    """A worker that is terminated must not look like a signal to the run; nor may Ctrl-C end the worker."""
    stop = Stop(is_main=True)
    stop.listen(None, {})
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
        os._exit(0)
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    stop.armed = True
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_for(lambda: stop.cause)
    assert stop.cause == "SIGUSR1"


def test_workers_and_the_run_do_not_take_each_others_signals(tmp_path):
    run_ranks(1, worker_is_not_a_request, folder=tmp_path, timeout=60).check()


LAUNCHED = """
import os, sys, time
sys.path.insert(0, {repo!r})
from unsloth_ddp.distributed.signals import Stop
stop = Stop(is_main=True)
stop.listen(None, {{"TORCHELASTIC_RUN_ID": "x"}})
stop.armed = True
print("ready", os.getpid(), flush=True)
deadline = time.monotonic() + 30
while stop.cause is None and time.monotonic() < deadline:
    time.sleep(0.01)
print(stop.cause, flush=True)
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
        assert (
            launcher.stdout.readline()
            == "SIGTERM: saving a checkpoint at the end of this step; a second signal ends it at once.\n"
        )
        assert launcher.stdout.readline() == "SIGTERM\n"
