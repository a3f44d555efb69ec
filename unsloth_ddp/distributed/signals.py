"""Stopping on request: a signal or a time limit, acted on by all ranks at the same step.

A signal to any rank, or to the launcher, raises a flag; the flags of all ranks are compared once a step, so that all
of them save and leave together. A second request ends the process at once.

Signals are taken from a pipe by a thread of its own: Python runs signal handlers in the main thread only, and that
may be waiting inside a collective or a kernel.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

import psutil

from unsloth_ddp.distributed.exit_codes import EXIT_FAILURE, EXIT_STOPPED, note_exit_code
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import UserError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
IGNORABLE = (signal.SIGINT, signal.SIGHUP)
# Seconds in which further signals are the same request: a terminal signals the launcher and every rank, and the
# launcher signals the ranks again.
ONE_REQUEST = 3.0
PR_SET_PDEATHSIG = 1

Answer = Literal["stop", "same", "at once"]


def parse_duration(text: str) -> float:
    """Seconds of 3600, 90s, 90m, 2h, 1d, 1h30m, or Slurm's MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.

    Raises:
        UserError: it is none of them, or no time at all.
    """
    seconds = _units(text.strip().lower())
    if seconds is None:
        seconds = _slurm(text.strip())
    if not seconds:
        raise UserError(
            f"max_time is {text[:50]!r}, but it takes a time such as 3600 (seconds), 90m, 2h or 1-12:00:00."
        )
    return seconds


def _units(text: str) -> float | None:
    if re.fullmatch(r"\d{1,10}(\.\d{1,6})?", text, re.ASCII):
        return float(text)
    number = r"(\d{1,9}(?:\.\d{1,6})?)"
    match = re.fullmatch(rf"(?:{number}d)?(?:{number}h)?(?:{number}m)?(?:{number}s)?", text, re.ASCII)
    if not text or not match:
        return None
    return sum(float(n) * unit for n, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True) if n)


def _slurm(text: str) -> float | None:
    match = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", text, re.ASCII)
    if not match or (match[1] is None and match[3] is None):
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:
        return first * 60 + second
    return ((days * 24 + first) * 60 + second) * 60 + third


class Requests:
    """What the signals so far ask for. Pure: time and parent are given.

    Args:
        parent: process id of the launcher when the run began; its death is told as a signal as well.
    """

    def __init__(self, parent: int) -> None:
        self.parent = parent
        self.first: float | None = None

    def take(self, now: float, parent: int) -> Answer:
        """The answer to a signal that came at `now` (seconds), while `parent` is the parent's process id."""
        orphaned, self.parent = parent != self.parent, parent
        if self.first is None:
            self.first = now
            return "stop"
        return "same" if orphaned or now - self.first < ONE_REQUEST else "at once"


def under_launcher(environ: Mapping[str, str]) -> bool:
    """Whether accelerate or torchrun is this process's parent."""
    return "TORCHELASTIC_RUN_ID" in environ or "ACCELERATE_MIXED_PRECISION" in environ


def launched_ago(environ: Mapping[str, str]) -> float:
    """Seconds since this job's elastic launcher began, restarts included; 0 without one."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return 0.0
    return max(0.0, time.time() - psutil.Process(os.getppid()).create_time())


class Stop:
    """The requests to stop of one run. Until `arm`, there is nothing to save, and a signal ends the process at once.

    Args:
        ended: ends the process with a code; another one in tests.
    """

    def __init__(self, is_main: bool, ended: Callable[[int], Any] = os._exit) -> None:
        self.is_main = is_main
        self.ended = ended
        self.requests = Requests(os.getppid())
        self.cause: str | None = None
        self.armed = False
        self.finishing = False
        self.deadline: float | None = None
        self.agreed: str | None = None
        # Whether there is a whole checkpoint to come back to.
        self.kept: Callable[[], bool] = lambda: False
        self._group: Any = None
        self._runtime: Runtime | None = None
        self._round: tuple[Any, Any] | None = None

    def listen(self, max_time: str | None, environ: Mapping[str, str] = os.environ) -> None:
        """Take the signals from now on, and the launcher's death; the time limit counts from the launcher's start."""
        if max_time is not None:
            self.deadline = time.monotonic() + parse_duration(max_time) - launched_ago(environ)
            self.max_time = max_time
            if time.monotonic() > self.deadline and environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
                # The launcher takes a stop for a failure and starts the ranks again (--max_restarts).
                if self.is_main:
                    self._say(f"max_time {max_time} is over; not started again.")
                note_exit_code(EXIT_STOPPED)
                self.ended(EXIT_STOPPED)
        self._told, told = socket.socketpair()
        told.setblocking(False)
        self._telling = told
        signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            # nohup, and shells for what they start in the background, have these ignored on purpose; the others are
            # requests wherever they were inherited as ignored (some job runners do that).
            if number not in IGNORABLE or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _do_nothing)
        os.register_at_fork(
            before=_hold_signals, after_in_parent=_release_signals, after_in_child=self._forget_in_child
        )
        threading.Thread(target=self._read, name="signals", daemon=True).start()
        if under_launcher(environ) and sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def _forget_in_child(self) -> None:
        """Workers end with their parent: a terminal's Ctrl-C or a scheduler's signal to all must not end them before."""
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            if signal.getsignal(number) is _do_nothing:
                signal.signal(number, signal.SIG_IGN if self.armed or number == signal.SIGINT else signal.SIG_DFL)
        _release_signals()

    def _read(self) -> None:
        while True:
            for number in self._told.recv(64):
                if number in SIGNALS:
                    self._take(signal.Signals(number).name)

    def _take(self, name: str) -> None:
        answer = self.requests.take(time.monotonic(), os.getppid())
        if answer == "same":
            return
        if answer == "stop" and self.armed:
            self.cause = name
            if self.is_main:
                doing = "the run is finishing" if self.finishing else "saving a checkpoint at the end of this step"
                self._say(f"{name}: {doing}; a second signal ends it at once.")
            return
        if self.is_main:
            self._say(
                f"{name}: stopped before the first step; nothing is lost."
                if not self.armed
                else f"{name} again: stopped at once; the last whole checkpoint stays."
            )
        # Before the first step it may as well be the launcher, which ends all ranks when one has failed.
        code = EXIT_STOPPED if self.armed and self.kept() else EXIT_FAILURE
        note_exit_code(code)
        self.ended(code)

    def _say(self, text: str) -> None:
        print(text, flush=True)

    def arm(self, runtime: Runtime, timeout: timedelta) -> None:
        """From here on a signal means: save at the next step boundary. Every rank calls this."""
        self._runtime = runtime
        if runtime.ranks.world_size > 1:
            import torch.distributed as dist

            # A group of its own: its one small message a step may be under way while others are sent.
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self.armed = True

    def ask(self) -> None:
        """Begin to compare the flags of all ranks; a step calls this shortly before its end."""
        import torch

        if self.cause is None and self.deadline is not None and time.monotonic() > self.deadline:
            self.cause = f"max_time {self.max_time}"
        flag = torch.tensor([int(self.cause is not None)])
        work = None
        if self._group is not None:
            import torch.distributed as dist

            work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._round = (flag, work)

    def answer(self) -> bool:
        """Whether all ranks stop now; the same on every rank."""
        if self._round is None:
            return False
        flag, work = self._round
        self._round = None
        if work is not None:
            work.wait()
        if flag.item() and self.agreed is None:
            assert self._runtime is not None
            causes = [cause for cause in self._runtime.gather(self.cause) if cause]
            self.agreed = causes[0]
        return bool(flag.item())


# A child shares the pipe until it has forgotten it, so none may be told a signal in between.
_held = threading.local()


def _hold_signals() -> None:
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _do_nothing(number: int, frame: Any) -> None:
    """Python drops a signal without a handler before it reaches the pipe."""
