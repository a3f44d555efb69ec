"""Protect standard output and standard error: hide secrets in what is printed, and continue without a reader.

What nobody can read any more (`| head`, a `tee` that was killed, a closed terminal) goes to the log file of this rank.
"""

import collections
import contextlib
import errno
import logging
import os
import select
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, cast

from unsloth_ddp.utils.redaction import hide

LOGGER = "unsloth_ddp"
# Lines kept for the log file while there is none.
LINES_KEPT = 1000
# Seconds that a reader may take to make room in a full pipe, and characters of which each write fits into a pipe with room.
PATIENCE = 60.0
AT_ONCE = 1000
# Characters kept of what was written but not flushed, since a lost reader shows only when Python flushes.
UNFLUSHED_KEPT = 20_000


class ProtectedStream:
    """A text stream that hides secrets and does not raise an error when it cannot be written any more."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._unflushed = ""
        self.is_lost = False
        self._pipe = _pipe_of(stream)
        self._line = ""
        self._lines: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)

    def write(self, text: str) -> int:
        """Write `text` without secrets; to the log file of this rank if the stream is lost."""
        hidden = hide(text)
        if _diverted_to is not None:
            _diverted_to(hidden)
            return len(text)
        if self.is_lost:
            self.log(hidden)
            return len(text)
        kept = self._unflushed + hidden
        self._unflushed = kept if self._pipe is not None else kept[-UNFLUSHED_KEPT:]
        try:
            if self._pipe is not None:
                # By lines, so that a line is not cut in two when the reader is lost.
                if "\n" in hidden or len(self._unflushed) >= UNFLUSHED_KEPT:
                    self._write_to_pipe()
            else:
                self._stream.write(hidden)
                if getattr(self._stream, "line_buffering", False) and "\n" in hidden:
                    self._unflushed = ""
        except OSError as error:
            self.lose(error)
        return len(text)

    def _write_to_pipe(self) -> None:
        """Write what waits, in parts that do not block: a reader that stopped reading would hold up the training.

        Raises:
            OSError: there was no reader, or no room for PATIENCE.
        """
        assert self._pipe is not None
        while part := self._unflushed[:AT_ONCE]:
            room = select.poll()
            room.register(self._pipe, select.POLLOUT)
            if not room.poll(PATIENCE * 1000):
                raise OSError(errno.ETIMEDOUT, f"nobody reads the pipe for {PATIENCE:.0f} s")
            self._stream.write(part)
            self._stream.flush()
            self._unflushed = self._unflushed[len(part) :]

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def draw(self, text: str) -> None:
        """Write at once and past a diversion; nothing that is drawn goes to the log file.

        Nothing is drawn after end_drawing.
        """
        hidden = hide(text)
        # Asked last, because another thread may end the drawing at any moment and write below it.
        if self.is_lost or _drawing_is_over.is_set():
            return
        try:
            self._stream.write(hidden)
            self._stream.flush()
        except OSError as error:
            self.lose(error)

    def flush(self) -> None:
        """Flush the stream if it is not lost."""
        if self.is_lost:
            return
        try:
            if self._pipe is not None:
                self._write_to_pipe()
            self._stream.flush()
            self._unflushed = ""
        except OSError as error:
            self.lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def lose(self, error: OSError) -> None:
        """Write to the log file of this rank from now on, and nothing more to the stream."""
        reason = error.strerror or str(error)
        self._collect(
            f"{self._name} cannot be written any more ({reason}); the run continues and writes to this log.\n"
        )
        self._collect(self._unflushed)
        # Only now: another thread that finds the stream lost logs its lines after these.
        self.is_lost = True
        with contextlib.suppress(OSError, ValueError):
            # Python flushes the descriptor at exit, and native code writes to it.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        self.log("")

    def _collect(self, text: str) -> None:
        """Keep the whole lines of `text` until they are logged."""
        *lines, self._line = (self._line + text).split("\n")
        # A progress bar rewrites its line after each carriage return; only its last state is of use.
        self._line = self._line.rpartition("\r")[2]
        self._lines.extend(line.rstrip("\r").rpartition("\r")[2] for line in lines)

    def log(self, text: str) -> None:
        """Write the whole lines of `text` to the log file of this rank."""
        self._collect(text)
        # Straight to the file: another handler may print to a lost stream, and so come back here.
        files = [h for h in logging.getLogger(LOGGER).handlers if isinstance(h, logging.FileHandler)]
        while files and self._lines:
            record = logging.LogRecord(self._name, logging.INFO, "", 0, self._lines.popleft(), None, None)
            for handler in files:
                handler.handle(record)


def open_closed_streams() -> list[str]:
    """Open /dev/null where standard input, output or error was closed (`>&-`); return the names of those streams.

    Otherwise the next file that is opened would get its number, and be written to by whatever prints.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number.
            os.open(os.devnull, os.O_RDWR)
    names = ("stdin", "stdout", "stderr")
    closed = [name for name in names if getattr(sys, name) is None]
    for name in closed:
        setattr(sys, name, open(names.index(name), "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115
    return closed


def protect_streams() -> None:
    """Replace sys.stdout and sys.stderr by protected streams, in the log handlers that exist as well."""
    closed = open_closed_streams()
    for name, title in (("stdout", "standard output"), ("stderr", "standard error")):
        stream = getattr(sys, name)
        if isinstance(stream, ProtectedStream):
            continue
        protected = cast(TextIO, own := ProtectedStream(stream, title))
        setattr(sys, name, protected)
        if name in closed:
            own.lose(OSError(errno.EBADF, "it is closed"))
        for handler in stream_handlers():
            if handler.stream is stream or _descriptor(handler.stream) == _descriptor(stream) is not None:
                handler.setStream(protected)


# What takes the text of the protected standard streams instead of them.
_diverted_to: Callable[[str], None] | None = None
_drawing_is_over = threading.Event()


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


def _pipe_of(stream: TextIO) -> int | None:
    """Return the descriptor of a stream that is a pipe or socket; None of any other."""
    descriptor = _descriptor(stream)
    try:
        mode = 0 if descriptor is None else os.fstat(descriptor).st_mode
    except OSError:
        return None
    return descriptor if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None


def _descriptor(stream: Any) -> int | None:
    """Return the file descriptor that a stream writes to, None if it has none."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    """Yield the handlers of all loggers that write to a stream and not to a file."""
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        for handler in getattr(logger, "handlers", ()):
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                yield handler
