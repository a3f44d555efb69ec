"""The live display under a pseudo terminal: what a person sees, however the run goes and ends."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator

import pytest
from rich.console import Console

from tests.terminal import Seen, Terminal, train_on_terminal
from tests.waiting import wait_until
from unsloth_ddp.distributed.signals import StopRequest
from unsloth_ddp.training.shown import live_display
from unsloth_ddp.training.shown.live_display import LiveDisplay, can_draw, describe
from unsloth_ddp.training.shown.status import Status
from unsloth_ddp.utils.streams import LOGGER, ProtectedStream, print_to_stderr

RUNNING = Status(144, step=50, epoch=1.04)


class OnTerminal:
    """A terminal that standard output and standard error write to, and a display of RUNNING there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.terminal = Terminal()
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, ProtectedStream(self.terminal.stream, name))
        self.stdout: ProtectedStream = sys.stdout  # type: ignore[assignment]
        self.display = LiveDisplay(self.stdout)
        self.display.begin(RUNNING)

    def end(self) -> Seen:
        """End the display; return what a person sees."""
        self.display.end()
        return Seen(self.terminal.close())


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], OnTerminal]]:
    """Make an OnTerminal that is drawn when text is printed; the test calls it, as pytest sets sys.stdout before."""
    monkeypatch.setenv("TERM", "xterm-256color")
    # A frame at the wrong moment draws over what a test writes past the display.
    monkeypatch.setattr(live_display, "DRAWN_A_SECOND", 0.001)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    terminals: list[OnTerminal] = []

    def begin() -> OnTerminal:
        terminals.append(OnTerminal(monkeypatch))
        return terminals[0]

    yield begin
    for terminal in terminals:
        terminal.display.end()


def frames(rows: list[str]) -> list[int]:
    """The rows of the display."""
    return [number for number, row in enumerate(rows) if row.startswith("step 50 of 144, epoch 1.04 ")]


def test_what_is_printed_stands_above_one_display(show) -> None:
    shown = show()
    library = logging.StreamHandler(sys.stderr)
    warning = "host2 is slower than the others: " + "its own work takes longer than theirs, " * 6 + "and all wait."
    print("first line")
    print(warning, flush=True)
    library.handle(logging.LogRecord("lib", logging.WARNING, "", 0, "a library warns", None, None))
    print("two", "halves", end=" ")
    print("of a line")
    shown.display.end()
    print("below", flush=True)
    screen = shown.end()
    (top,) = frames(screen.rows)
    printed = screen.rows[:top]
    assert printed[0] == "first line" and printed[-2:] == ["a library warns", "two halves of a line"]
    assert " ".join(printed[1:-2]) == warning and all(len(row) <= 100 for row in printed)
    assert screen.rows[top].endswith("35%") and screen.rows[top + 1 :] == ["below"]
    assert not screen.cursor_hidden


def test_a_process_that_is_killed_leaves_the_terminal_in_order(show) -> None:
    shown = show()
    print("a line", flush=True)
    raw = b""

    def whole_frame() -> bool:
        # As kill -9 would leave it: nothing is written after the last frame. The kernel passes a frame on in pieces.
        nonlocal raw
        raw = shown.terminal.output
        screen = Seen(raw)
        return (
            b"a line" in raw and (screen.column, screen.row) == (0, len(screen.rows)) and bool(frames(screen.rows[-1:]))
        )

    wait_until(whole_frame, 60, "a frame with the cursor below it")
    # No mode of the terminal was changed.
    assert not re.search(rb"\x1b\[\?|\x1b[=>78c]", raw)


def test_a_diagnosis_is_not_drawn_over(show, monkeypatch) -> None:
    shown = show()
    # Standard error of this process is pytest's.
    write = os.write
    monkeypatch.setattr(os, "write", lambda number, data: write(shown.terminal.slave, data))
    print_to_stderr("train_ddp.py: error: rank 1 died\n  rank 0: step 8\n")
    monkeypatch.setattr(os, "write", write)
    shown.display._live.refresh()  # type: ignore[union-attr]
    print("printed later")
    screen = shown.end()
    assert frames(screen.rows) == [len(screen.rows) - 4]
    assert screen.rows[-3:] == ["train_ddp.py: error: rank 1 died", "  rank 0: step 8", "printed later"]


def test_after_a_signal_the_display_stays_and_text_follows(show) -> None:
    shown = show()
    shown.terminal.stream.write("the launcher writes too\n")
    stop = StopRequest(is_main=True)
    stop._training = True
    stop._handle("SIGINT")
    shown.terminal.stream.write("and again\n")
    screen = shown.end()
    assert len(frames(screen.rows)) == 1
    assert screen.rows[-3] == "the launcher writes too" and screen.rows[-1] == "and again"
    assert screen.rows[-2].startswith("SIGINT: saving a checkpoint")


def test_a_closed_terminal_leaves_lines_and_no_frames_in_the_log(show, tmp_path) -> None:
    shown = show()
    handler = logging.FileHandler(tmp_path / "rank_0.log")
    logging.getLogger(LOGGER).addHandler(handler)
    try:
        # Until the other end is gone, what is written still arrives.
        shown.terminal.hang_up()
        print("after the hangup", flush=True)
        print("one more", flush=True)
        shown.display.end()
        lost, *lines = (tmp_path / "rank_0.log").read_text().splitlines()
    finally:
        logging.getLogger(LOGGER).removeHandler(handler)
        handler.close()
    assert "cannot be written any more" in lost and lines == ["after the hangup", "one more"]


def test_a_forked_process_writes_without_the_display(show) -> None:
    shown = show()
    child = os.fork()
    if child == 0:
        print("from a worker", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    shown.display.end()
    assert b"from a worker\r\n" in shown.terminal.close()


@pytest.mark.parametrize(
    ("status", "width"), [(Status(10), 100), (RUNNING, 100), (Status(10**7, step=10**6, evaluated=(3, 10)), 72)]
)
def test_it_is_one_line_for_every_state(status: Status, width: int) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    lines = console.render_lines(describe(status, width), pad=False)
    assert len(lines) == 1
    assert all(sum(segment.cell_length for segment in line) <= width for line in lines)


def test_only_a_terminal_that_can_be_drawn_on_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "TTY_COMPATIBLE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)

    def drawn(kind: str = "xterm", **size: int) -> bool:
        monkeypatch.setenv("TERM", kind)
        terminal = Terminal(**size)
        drawable = can_draw(ProtectedStream(terminal.stream, "standard output"))
        terminal.close()
        return drawable

    assert drawn()
    assert not drawn(kind="dumb") and not drawn(columns=60)
    assert not can_draw(ProtectedStream(io.StringIO(), "standard output"))


def test_a_run_on_a_terminal_shows_one_display_and_its_end(job, place) -> None:
    recording = place / "terminal.bytes"
    job(
        "--max_steps 6 --logging_steps 1 --eval_fraction 0.2 --eval_steps 3 --save_steps 3",
        "terminal",
        target=train_on_terminal,
        args=(str(recording),),
    )
    screen = Seen(recording.read_bytes())
    (row,) = [number for number, row in enumerate(screen.rows) if row.startswith("step 6 of 6, epoch ")]
    assert "100%" in screen.rows[row] and screen.rows[row + 1].startswith("Done: 6 steps")
    # The lines of the run are above, without the columns of the display.
    assert re.findall(r"^ *(\d)/6 +\d", "\n".join(screen.rows[:row]), re.M) == list("123456")
    assert screen.text.count("evaluation: loss") == 2 and "time left" not in screen.text
    assert "{'" not in screen.text and "it/s" not in screen.text and "[transformers]" not in screen.text


def test_an_error_stands_below_the_last_state(job, place) -> None:
    recording = place / "failed.bytes"
    job("--max_steps 6 --logging_steps 1", "failed", code=1, target=train_on_terminal, args=(str(recording), 4))
    screen = Seen(recording.read_bytes())
    (row,) = [number for number, row in enumerate(screen.rows) if row.startswith("step 3 of 6")]
    below = "\n".join(screen.rows[row + 1 :])
    assert below.startswith("Traceback") and "RuntimeError: the test ends this run" in below
    assert not screen.cursor_hidden
