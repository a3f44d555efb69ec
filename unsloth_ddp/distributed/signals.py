"""Stop a run on request: a signal or a time limit on any rank makes all ranks save and leave at the same step.

A signal to any rank, or to the launcher, sets a flag. The ranks exchange their flags once a step, so that all of them
save a checkpoint and leave together. A second signal ends the process at once.

A thread of its own reads the signals from a pipe, because Python runs signal handlers in the main thread only, which
may be blocked inside a collective or a kernel.
"""

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

from unsloth_ddp.distributed.exit_codes import EXIT_FAILURE, EXIT_STOPPED, note_exit_code, under_launcher
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.streams import end_drawing

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
IGNORABLE = (signal.SIGINT, signal.SIGHUP)
# Seconds in which further signals belong to the same request: a terminal signals the launcher and every rank, and the
# launcher signals the ranks again.
ONE_REQUEST_SECONDS = 3.0
PR_SET_PDEATHSIG = 1
DEATH_SECONDS = 0.3
# The cause of a stop that nobody asked for: a launcher that was killed.
LAUNCHER_ENDED = "the end of its launcher"


class SignalCounter:
    """Distinguish the first request to stop from its repetitions. Time and parent are arguments.

    Args:
        parent: process id of the launcher when the run began; the kernel signals its death as well.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._first: float | None = None
        # Whether the last signal told of the launcher's death.
        self.orphaned = False

    def classify(self, now: float, parent: int) -> Literal["first", "repeated", "second"]:
        """Return what a signal at `now` (seconds) is, while `parent` is the parent's process id."""
        self.orphaned, self._parent = parent != self._parent, parent
        if self._first is None:
            self._first = now
            return "first"
        return "repeated" if self.orphaned or now - self._first < ONE_REQUEST_SECONDS else "second"


def seconds_since_launch(environ: Mapping[str, str]) -> float:
    """Return the seconds since this job's elastic launcher began, restarts included; 0 without one."""
    if "TORCHELASTIC_RUN_ID" not in environ:
        return 0.0
    return max(0.0, time.time() - psutil.Process(os.getppid()).create_time())


class EvaluationInterrupted(Exception):
    """Raised on every rank at the same batch of an evaluation when the ranks have agreed to stop."""


class StopRequest:
    """The request to stop one run, on all of its ranks.

    Before `begin_training` there is nothing to save, and a signal ends the process at once.

    Args:
        is_main: this process prints.
        end_process: ends the process with an exit code; another function in tests.
    """

    def __init__(self, is_main: bool, end_process: Callable[[int], Any] = os._exit) -> None:
        self._is_main = is_main
        # May tell the other ranks.
        self.end_process = end_process
        self._signals = SignalCounter(os.getppid())
        self._received: list[signal.Signals] = []
        self._max_time: str | None = None
        self._deadline: float | None = None
        self._training = False
        # After the last step a signal changes only what is printed.
        self.finishing = False
        self._has_checkpoint: Callable[[], bool] = lambda: False
        self._runtime: Runtime | None = None
        self._group: Any = None
        self._poll: tuple[Any, Any] | None = None
        # The launcher's process id, if this process is told of its death.
        self._launcher: int | None = None
        # Whether this rank asks for a checkpoint, and whether the last exchange asked for one.
        self.save_is_due: Callable[[], bool] = lambda: False
        self.save_agreed = False
        # Why this rank was asked to stop, and why all ranks have agreed to stop.
        self.local_cause: str | None = None
        self.agreed_cause: str | None = None

    def listen(self, max_time: str | None, environ: Mapping[str, str] = os.environ) -> None:
        """Begin to receive signals, the launcher's death included. The time limit counts from the launcher's start."""
        if max_time is not None:
            self._max_time = max_time
            self._deadline = time.monotonic() + parse_duration(max_time) - seconds_since_launch(environ)
            if time.monotonic() > self._deadline and environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
                # The launcher takes a stop for a failure and starts the ranks again (--max_restarts).
                self._print_and_end(f"max_time {max_time} is over; not started again.", EXIT_STOPPED)
        self._reader, writer = socket.socketpair()
        writer.setblocking(False)
        self._writer = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            # nohup, and shells for background jobs, ignore these on purpose. The other signals are requests even if
            # they were inherited as ignored, as under some job runners.
            if number not in IGNORABLE or signal.getsignal(number) is not signal.SIG_IGN:
                self._received.append(number)
        self._receive()
        os.register_at_fork(
            before=_block_signals, after_in_parent=_unblock_signals, after_in_child=self._stop_listening_in_child
        )
        threading.Thread(target=self._read_signals, name="signals", daemon=True).start()
        if under_launcher(environ) and sys.platform == "linux":
            self._launcher = os.getppid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def _receive(self) -> None:
        """Install the handlers, again in the main thread before each exchange.

        LLVM, which compiles Triton's kernels in this process, installs handlers of its own, and its handler of SIGUSR1
        does nothing.
        """
        for number in self._received:
            signal.signal(number, _do_nothing)

    def begin_training(self, runtime: Runtime, timeout: timedelta, has_checkpoint: Callable[[], bool]) -> None:
        """Treat signals from now on as requests to save at the next step boundary. Every rank calls this.

        Args:
            timeout: of the exchange of flags.
            has_checkpoint: returns whether a later start can resume from a complete checkpoint.
        """
        self._runtime, self._has_checkpoint = runtime, has_checkpoint
        self._receive()
        if runtime.ranks.world_size > 1:
            import torch.distributed as dist

            # A group of its own, because its message may be under way while others are sent.
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._training = True

    def request_stop(self, cause: str) -> None:
        """Ask all ranks to stop for `cause`, at the next exchange of flags; the first cause stays."""
        self.local_cause = self.local_cause or cause

    def start_poll(self) -> None:
        """Start to exchange the flags of all ranks; a step calls this shortly before its end.

        Before the first step and after the last one nothing is exchanged.
        """
        if not self._training or self.finishing:
            return
        import torch

        self._receive()
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.request_stop(f"max_time {self._max_time}")
        flag = torch.tensor([int(self.local_cause is not None), int(self.save_is_due())])
        work = None
        if self._group is not None:
            import torch.distributed as dist

            work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._poll = (flag, work)

    def finish_poll(self) -> bool:
        """Return whether any rank was asked to stop before the poll started; the same on every rank."""
        if self._poll is None:
            return False
        flag, work = self._poll
        self._poll = None
        if work is not None:
            work.wait()
        stop, self.save_agreed = map(bool, flag.tolist())
        if stop and self.agreed_cause is None:
            assert self._runtime is not None
            causes = [cause for cause in self._runtime.gather(self.local_cause) if cause]
            self.agreed_cause = causes[0]
        return stop

    def interrupt_evaluation(self) -> None:
        """Exchange the flags during an evaluation; every rank calls this after each batch.

        The flags sent at one batch are read at the next, so that no rank waits for the exchange.

        Raises:
            EvaluationInterrupted: any rank was asked to stop.
        """
        if self.finish_poll():
            raise EvaluationInterrupted
        self.start_poll()

    # ---- the thread that reads signals ----

    def _read_signals(self) -> None:
        while True:
            for number in self._reader.recv(64):
                if number in SIGNALS:
                    self._handle(signal.Signals(number).name)

    def _handle(self, name: str) -> None:
        kind = self._signals.classify(time.monotonic(), os.getppid())
        if kind == "repeated":
            return
        if kind == "first" and self._training:
            self.request_stop(LAUNCHER_ENDED if name == "SIGTERM" and self._has_lost_launcher() else name)
            action = "the run is finishing" if self.finishing else "saving a checkpoint after this step"
            self._print(f"{name}: {action}; a second signal ends it at once.")
            return
        if self._training:
            code = EXIT_STOPPED if self._has_checkpoint() else EXIT_FAILURE
            self._print_and_end(f"{name} again: stopped at once; the last complete checkpoint stays.", code)
        else:
            # The sender may be the launcher, which ends all ranks when one has failed.
            self._print_and_end(f"{name}: stopped before the first step; nothing is lost.", EXIT_FAILURE)

    def _has_lost_launcher(self) -> bool:
        """Return whether the signal told of the launcher's death; it comes before the last thread has ended."""
        deadline = time.monotonic() + DEATH_SECONDS
        while not self._signals.orphaned and self._launcher is not None and time.monotonic() < deadline:
            time.sleep(0.02)
            self._signals.orphaned = os.getppid() != self._launcher
        return self._signals.orphaned

    def _print_and_end(self, text: str, code: int) -> None:
        self._print(text)
        note_exit_code(code, sentence=text)
        self.end_process(code)

    def _print(self, text: str) -> None:
        if self._is_main:
            end_drawing()
            print(text, flush=True)

    def _stop_listening_in_child(self) -> None:
        """Reset the signals in a forked worker.

        Workers end with their parent. A terminal's Ctrl-C or a scheduler's signal to all must not end them earlier.
        """
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            if signal.getsignal(number) is _do_nothing:
                ignored = self._training or number == signal.SIGINT
                signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
        _unblock_signals()


# A child shares the pipe until it has reset its signals, so none may be delivered in between.
_blocked = threading.local()


def _block_signals() -> None:
    _blocked.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _blocked.mask)


def _do_nothing(number: int, frame: Any) -> None:
    """Keep the signal: Python drops one without a handler before it reaches the pipe."""


def parse_duration(text: str) -> float:
    """Return the seconds of 3600, 90s, 90m, 2h, 1d, 1h30m, or Slurm's MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.

    Raises:
        UserError: `text` is none of them, or zero.
    """
    duration = text.strip().lower()
    number = r"(\d{1,9}(?:\.\d{1,6})?)"
    units = re.fullmatch(rf"(?:{number}d)?(?:{number}h)?(?:{number}m)?(?:{number}s)?", duration, re.ASCII)
    slurm = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", duration, re.ASCII)
    seconds = 0.0
    if re.fullmatch(number, duration, re.ASCII):
        seconds = float(duration)
    elif units:
        seconds = sum(float(n) * unit for n, unit in zip(units.groups(), (86400, 3600, 60, 1), strict=True) if n)
    elif slurm:
        days, first, second, third = (int(part or 0) for part in slurm.groups())
        # Without days and a third number the first one is of minutes.
        minutes = slurm[1] is None and slurm[4] is None
        seconds = first * 60 + second if minutes else ((days * 24 + first) * 60 + second) * 60 + third
    if not seconds:
        raise UserError(
            f"max_time is {text[:50]!r}, but it takes a time such as 3600 (seconds), 90m, 2h or 1-12:00:00."
        )
    return seconds
