"""Protect standard output and standard error: hide secrets in what is printed, and continue without a reader.

What nobody can read any more (`| head`, a `tee` that was killed, a closed terminal) goes to the log file of this rank.
"""

import collections
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast

from unsloth_ddp.utils.redaction import hide

LOGGER = "unsloth_ddp"
# Lines that wait while there is no log file.
LINES_KEPT = 1000
# What takes the text of the protected standard streams instead of them; see `diverted`.
_diverted_to: Callable[[str], None] | None = None
_drawing_is_over = threading.Event()


class ProtectedStream:
    """A text stream that hides secrets and does not raise an error when it cannot be written any more."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name
        self.is_lost = False
        self._unflushed = self._unfinished_line = ""
        self._unlogged: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write `text` without secrets; to the log file of this rank if the stream is lost."""
        hidden = hide(text)
        if _diverted_to is not None:
            _diverted_to(hidden)
        elif self.is_lost:
            self.log(hidden)
        else:
            self._unflushed += hidden
            self._attempt(lambda: self._stream.write(hidden))
            # A lost reader shows only here, and every line is to reach the log.
            if "\n" in hidden:
                self.flush()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream if it is not lost."""
        if not self.is_lost and self._attempt(self._stream.flush):
            self._unflushed = ""

    def draw(self, text: str) -> None:
        """Write at once and past a diversion, until end_drawing; nothing that is drawn goes to the log file."""
        hidden = hide(text)
        # Asked last, because another thread may end the drawing at any moment and write below it.
        if not (self.is_lost or _drawing_is_over.is_set()) and self._attempt(lambda: self._stream.write(hidden)):
            self._attempt(self._stream.flush)

    def log(self, text: str) -> None:
        """Write the whole lines of `text` to the log file of this rank."""
        *lines, self._unfinished_line = (self._unfinished_line + text).split("\n")
        # A progress bar rewrites its line after each carriage return; its last state is enough.
        self._unlogged.extend(line.rstrip("\r").rpartition("\r")[2] for line in lines)
        # Straight to the file: another handler may print to a lost stream, and so come back here.
        files = [h for h in logging.getLogger(LOGGER).handlers if isinstance(h, logging.FileHandler)]
        while files and self._unlogged:
            record = logging.LogRecord(self._name, logging.INFO, "", 0, self._unlogged.popleft(), None, None)
            for handler in files:
                handler.handle(record)

    def _attempt(self, use: Callable[[], Any]) -> bool:
        """Use the stream; if it cannot be written, log what it did not print and return False."""
        try:
            use()
        except OSError as error:
            problem = error.strerror or str(error)
            self.log(
                f"{self._name} cannot be written any more ({problem}); the run continues and writes to this log.\n"
            )
            self.log(self._unflushed)
            # Only now: another thread that finds the stream lost logs its lines after these.
            self.is_lost = True
            # Python flushes the descriptor at exit, and native code writes to it.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())
            return False
        return True


def protect_streams() -> None:
    """Replace sys.stdout and sys.stderr by protected streams, in the log handlers that exist as well."""
    _open_closed_streams()
    for name, title in (("stdout", "standard output"), ("stderr", "standard error")):
        stream = getattr(sys, name)
        if isinstance(stream, ProtectedStream):
            continue
        protected = cast(TextIO, ProtectedStream(stream, title))
        setattr(sys, name, protected)
        for handler in stream_handlers():
            if handler.stream is stream or _descriptor(handler.stream) == _descriptor(stream) is not None:
                handler.setStream(protected)


def _open_closed_streams() -> None:
    """Open /dev/null where standard input, output or error was closed (`>&-`).

    Otherwise the next file that is opened would get its number, and be written to by whatever prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number; standard output refuses to be written, so its lines go to the log.
            os.open(os.devnull, os.O_RDONLY)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


@contextlib.contextmanager
def diverted(to: Callable[[str], None]) -> Iterator[None]:
    """Hand what is written to the protected standard streams to this function within the block.

    A forked process writes to the streams again: the function may hold locks of threads that it does not have.
    """
    global _diverted_to
    _drawing_is_over.clear()
    _diverted_to = to
    try:
        yield
    finally:
        _end_diversion()


def _end_diversion() -> None:
    global _diverted_to
    _diverted_to = None


os.register_at_fork(after_in_child=_end_diversion)


def end_drawing() -> None:
    """Leave what is drawn on the terminal as it is, and let all text be written below it.

    For the end of a run, when other processes (the launcher) write to the terminal too. Takes no lock.
    """
    _drawing_is_over.set()
    _end_diversion()


def print_to_stderr(text: str) -> None:
    """Write to standard error at once, without the locks of streams, which a thread that hangs may hold.

    The process is about to end, and draws no more.
    """
    end_drawing()
    with contextlib.suppress(OSError):
        os.write(2, hide(text).encode(errors="backslashreplace"))


def _descriptor(stream: Any) -> int | None:
    """Return the file descriptor that a stream writes to, None if it has none."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Yield the handlers of all loggers that write to a stream and not to a file."""
    for logger in (logging.getLogger(), *logging.Logger.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                yield handler
