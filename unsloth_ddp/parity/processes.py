"""Run the processes of launches, and end each with every process that it started."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

# Seconds for killed processes to end; releasing a GPU's memory takes longest.
KILL_SECONDS = 20
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedBySignal(BaseException):
    """A signal asked the check to end; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise StoppedBySignal on the first signal that would end this process, and ignore the next ones."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise StoppedBySignal(number)

    for number, handler in handlers.items():
        # Under nohup a closed terminal must not end the check.
        if handler != signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run_launcher(words: list[str], environ: Mapping[str, str], log: Path, timeout: float) -> int | None:
    """Run a command that writes to `log`; return its exit code, None if it was killed after `timeout` seconds.

    However this ends, nothing that the command started is left.

    Raises:
        OSError: it cannot be started.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            words, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        return process.wait(timeout=timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_tree(process)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants, also in other sessions, where torch's launcher starts its workers."""
    tree: list[psutil.Process] = []
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = _suspend_tree(psutil.Process(process.pid))
    for member in reversed(tree):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.kill()
    process.wait()
    # Processes that a launch left in its session when it ended by itself.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    while any(_is_alive(member) for member in tree) and time.monotonic() < deadline:
        time.sleep(0.05)


def _suspend_tree(first: psutil.Process) -> list[psutil.Process]:
    """Suspend a process and its descendants, so that none can start another, and return them."""
    tree: list[psutil.Process] = []
    while True:
        new = [member for member in (first, *first.children(recursive=True)) if member not in tree]
        if not new:
            return tree
        for member in new:
            tree.append(member)
            with contextlib.suppress(psutil.NoSuchProcess):
                member.suspend()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
