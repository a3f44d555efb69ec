"""The processes of launches that go on, and their end: all that one has started ends with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

# A killed process needs a moment, longer where it gives a GPU's memory back.
PATIENCE = 20
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """A signal asked the check to end; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise Stopped where a signal would end this process; further signals do not disturb the cleaning up."""
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for one in SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise Stopped(number)

    for number, handler in before.items():
        # Under nohup a closed terminal is not to end anything.
        if handler != signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Running:
    """Launches that go on side by side, each begun and awaited by a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._over = False

    def run(self, words: list[str], environ: Mapping[str, str], log: Path, timeout: float) -> int | None:
        """The exit code of a command that writes to `log`; None if it was ended after `timeout` seconds.

        Raises:
            OSError: it cannot be started.
            RuntimeError: end_all came first.
        """
        with log.open("w") as file, self._lock:
            if self._over:
                raise RuntimeError("the check has ended")
            process = subprocess.Popen(
                words,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._processes.add(process)
        try:
            return process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_family(process)
            with self._lock:
                self._processes.discard(process)

    def end_all(self) -> None:
        """End every launch now, and let none begin."""
        with self._lock:
            self._over = True
            processes = list(self._processes)
        for process in processes:
            end_family(process)


def end_family(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started, also in sessions of their own, as torch's launcher starts its workers."""
    family: list[psutil.Process] = []
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            family = _halted(psutil.Process(process.pid))
    for one in reversed(family):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    process.kill()
    process.wait()
    # What a launch that ended by itself left in its session.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    while any(_lives(one) for one in family) and time.monotonic() < deadline:
        time.sleep(0.05)


def _halted(first: psutil.Process) -> list[psutil.Process]:
    """A process and its descendants, stopped, so that none can start another meanwhile."""
    family: list[psutil.Process] = []
    while True:
        new = [one for one in (first, *first.children(recursive=True)) if one not in family]
        if not new:
            return family
        for one in new:
            family.append(one)
            with contextlib.suppress(psutil.NoSuchProcess):
                one.suspend()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
