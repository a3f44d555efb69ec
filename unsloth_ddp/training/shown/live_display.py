"""Draw a run's progress at the bottom of a terminal, below what is printed.

The display changes no mode of the terminal and leaves the cursor at the start of the line below it, so that the
terminal stays usable however the process ends: by an exception, os._exit or kill -9.
"""

import contextlib
import os
import sys
from typing import IO, Any, cast

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from unsloth_ddp.training.shown.status import Status, shown_clock
from unsloth_ddp.utils.streams import ProtectedStream, diverted

WIDEST, NARROWEST = 100, 72
# Drawing takes a few milliseconds, during which the training thread cannot launch work.
DRAWN_A_SECOND = 2


def can_draw(stream: Any) -> bool:
    """Return whether a stream is a terminal that the display can be drawn on."""
    if not isinstance(stream, ProtectedStream) or not stream.isatty():
        return False
    console = _Terminal(file=_drawing(stream))
    return not console.is_dumb_terminal and console.encoding.startswith("utf") and console.width >= NARROWEST


class LiveDisplay:
    """Draw the progress of one run until `end`; text that is printed meanwhile goes above it."""

    def __init__(self, stream: ProtectedStream) -> None:
        self._stream = stream
        self._console = _Terminal(file=_drawing(stream), highlight=False)
        self._status: Status | None = None
        self._live: Live | None = None
        self._open = contextlib.ExitStack()
        # Text printed after the last newline.
        self._unfinished = ""
        self._ended = False

    def begin(self, status: Status) -> None:
        """Draw the display; from now on it follows `status`."""
        self._status = status
        if self._live is not None:
            return
        self._live = Live(
            console=self._console,
            get_renderable=self._frame,
            refresh_per_second=DRAWN_A_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._open.enter_context(diverted(self._print_above))
        self._live.start(refresh=True)

    def end(self) -> None:
        """Draw the last state, which stays on the terminal, and let text be printed below it."""
        live, self._live = self._live, None
        if live is None:
            return
        self._open.close()
        # The last frame has no empty line, because Live ends the last line itself.
        self._ended = True
        live.stop()
        if self._unfinished:
            sys.stdout.write(self._unfinished)

    def _frame(self) -> RenderableType:
        if self._status is None:
            return ""
        # The cursor stays on the empty line.
        width = min(WIDEST, self._console.width)
        return Group(describe(self._status, width), *([] if self._ended else [Text("")]))

    def _print_above(self, text: str) -> None:
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            # A progress bar rewrites its line after each carriage return; its last state is enough.
            line = line.rstrip("\r").rpartition("\r")[2]
            if not self._stream.is_lost:
                self._console.print(Text.from_ansi(line))
            if self._stream.is_lost:
                self._stream.log(f"{line}\n")


class _Drawing:
    """Write rich's frames to the terminal directly, past the redirection of printed text."""

    def __init__(self, stream: ProtectedStream) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.draw(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: `draw` has flushed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _drawing(stream: ProtectedStream) -> IO[str]:
    return cast(IO[str], _Drawing(stream))


class _Terminal(Console):
    """A console that takes its size from its file and never hides the cursor, which a killed process could not show."""

    @property  # type: ignore[misc]
    def size(self) -> ConsoleDimensions:
        with contextlib.suppress(OSError, ValueError):
            terminal = os.get_terminal_size(self.file.fileno())
            if terminal.columns and terminal.lines:
                return ConsoleDimensions(terminal.columns, terminal.lines)
        return super().size

    def show_cursor(self, show: bool = True) -> bool:
        return False


def describe(status: Status, width: int) -> Table:
    """Return the progress of a run as one line, `width` columns wide."""
    line = Table.grid(padding=(0, 2))
    line.width = width
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True, justify="right")
    share = f"{status.step / max(1, status.steps):.0%}"
    line.add_row(
        Text(f"step {status.step:,} of {status.steps:,}, epoch {status.epoch:.2f}", style="bold"),
        ProgressBar(total=max(1, status.steps), completed=status.step, complete_style="cyan", finished_style="green"),
        f"{_activity(status)}{share}{_time_left(status)}",
    )
    return line


def _time_left(status: Status) -> str:
    seconds = status.seconds_left
    return "" if seconds is None or status.step >= status.steps else f", {shown_clock(seconds)} left"


def _activity(status: Status) -> str:
    phase = status.phase()
    if phase == "evaluating" and status.evaluated is not None:
        evaluated, batches = status.evaluated
        return f"evaluating {evaluated}{f' of {batches}' if batches else ''}, "
    return f"{phase}, " if phase in ("evaluating", "saving") else ""
