"""Print one aligned line a log step, for log files, pipes and terminals that cannot be drawn on."""

from __future__ import annotations

from unsloth_ddp.training.status import Status, shown_clock, shown_number
from unsloth_ddp.utils.units import shown_bytes, shown_seconds

LINES_A_HEADER = 20
GAP = "  "


class LogLines:
    """Print the lines of one run, with a header above every LINES_A_HEADER of them."""

    def __init__(self) -> None:
        self._lines = 0
        self._header = ""

    def begin(self, status: Status) -> None:
        """Print nothing: the header comes with the first line."""

    def logged(self, status: Status) -> None:
        """Print the line of a log step."""
        cells = training_cells(status)
        header = GAP.join(f"{name:>{width}}" for name, (width, _) in cells.items())
        if self._lines % LINES_A_HEADER == 0 or header != self._header:
            self._header, self._lines = header, 0
            print(header)
        self._lines += 1
        print(GAP.join(f"{text:>{width}}" for width, text in cells.values()), flush=True)

    def evaluated(self, status: Status) -> None:
        """Print the line of an evaluation."""
        assert status.evaluation is not None
        _, loss, seconds = status.evaluation
        took = "" if seconds is None else f", {shown_seconds(seconds)}"
        place = GAP.join(f"{text:>{width}}" for width, text in place_cells(status).values())
        print(f"{place}{GAP}evaluation: loss {shown_number(loss)}{took}", flush=True)

    def end(self) -> None:
        """Print nothing more."""


def place_cells(status: Status) -> dict[str, tuple[int, str]]:
    """Return width and text of the columns for step and epoch."""
    return {
        "step": (max(4, 2 * len(str(status.steps)) + 1), f"{status.step}/{status.steps}"),
        "epoch": (6, f"{status.epoch:.2f}"),
    }


def training_cells(status: Status) -> dict[str, tuple[int, str]]:
    """Return width and text of every column of a log step's line; MFU only where it is known."""
    rate = status.tokens_per_second
    memory = status.memory_bytes
    return {
        **place_cells(status),
        "loss": (8, shown_number(status.losses[-1])),
        "grad norm": (9, shown_number(status.grad_norm, 3)),
        "learning rate": (13, "-" if status.learning_rate is None else f"{status.learning_rate:.2e}"),
        "tokens/s": (9, "-" if rate is None else f"{rate:,.0f}"),
        **({} if status.mfu is None else {"MFU": (5, f"{status.mfu:.1%}")}),
        "memory": (10, "-" if memory is None else shown_bytes(memory)),
        "time left": (9, shown_clock(status.seconds_left)),
    }
