"""A pseudo terminal, and what a person sees on it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import termios
import threading
from pathlib import Path
from typing import TextIO

import pyte

COLUMNS, LINES = 100, 40


class Terminal:
    """A pseudo terminal whose output is kept; `stream` writes to it."""

    def __init__(self, columns: int = COLUMNS, lines: int = LINES) -> None:
        self.columns, self.lines = columns, lines
        self.master, self.slave = os.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.stream: TextIO = os.fdopen(os.dup(self.slave), "w", buffering=1, encoding="utf-8")
        self.output = b""
        self._hung_up = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while not self._hung_up.is_set():
                ready, _, _ = select.select([self.master], [], [], 0.02)
                if ready:
                    self.output += os.read(self.master, 65536)

    def close(self) -> bytes:
        """Close every writing end of this process; return all that was written."""
        self.stream.close()
        os.close(self.slave)
        # The end of the output is an error on Linux.
        self._reader.join(timeout=60)
        os.close(self.master)
        return self.output

    def hang_up(self) -> None:
        """Close the terminal, as a lost connection does: what is written from now on fails."""
        self._hung_up.set()
        self._reader.join(timeout=60)
        os.close(self.master)


class Seen:
    """Return the lines on a terminal after this output, scrolled ones included."""

    def __init__(self, output: bytes, columns: int = COLUMNS, lines: int = LINES) -> None:
        self.screen = pyte.HistoryScreen(columns, lines, history=10_000)
        pyte.ByteStream(self.screen).feed(output)
        above = ["".join(line[x].data for x in range(columns)) for line in self.screen.history.top]
        rows = [line.rstrip() for line in [*above, *self.screen.display]]
        self.row, self.column = len(above) + self.screen.cursor.y, self.screen.cursor.x
        self.cursor_hidden = self.screen.cursor.hidden
        while rows and not rows[-1]:
            rows.pop()
        self.rows = rows

    @property
    def text(self) -> str:
        """All rows."""
        return "\n".join(self.rows)


def train_on_terminal(argv: list[str], cwd: str, kept: str, fails_at: int = 0) -> None:
    """train_ddp.py in this process on a terminal; what is written there goes to the file `kept`.

    Args:
        fails_at: the step at which the training raises an error; 0: at none.
    """
    from tests.ranks import train
    from unsloth_ddp.training.callbacks import ReportProgress

    begin = ReportProgress.on_step_begin

    def fail(self: ReportProgress, args: object, state: object, control: object, **kwargs: object) -> None:
        if state.global_step + 1 == fails_at:  # type: ignore[attr-defined]
            raise RuntimeError("the test ends this run")
        begin(self, args, state, control, **kwargs)

    ReportProgress.on_step_begin = fail  # type: ignore[method-assign]
    os.environ["TERM"] = "xterm-256color"
    terminal = Terminal()
    for number in (1, 2):
        os.dup2(terminal.slave, number)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, encoding="utf-8", closefd=False) for n in (1, 2))
    try:
        train(argv, cwd)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nowhere, number)
        Path(kept).write_bytes(terminal.close())
