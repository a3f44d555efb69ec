"""Hold how far a run is, and format numbers of its lines."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class TimeLeft:
    """Estimate the seconds until the last step from the steps that this process has taken.

    The first step is left out, because it compiles and fills caches. Evaluations and checkpoints between steps count.
    """

    clock: Callable[[], float] = time.perf_counter
    began: tuple[int, float] | None = None
    latest: tuple[int, float] | None = None

    def step_done(self, step: int) -> None:
        """Record the end of a step; of two calls for a step the later one counts."""
        self.latest = step, self.clock()
        if self.began is None or self.began[0] == step:
            self.began = self.latest

    def seconds(self, steps: int) -> float | None:
        """Return the seconds from now to the end of step number `steps`; None before the second step."""
        if self.began is None or self.latest is None or self.latest[0] == self.began[0]:
            return None
        (first, began), (last, ended) = self.began, self.latest
        return max(0.0, (ended - began) / (last - first) * (steps - last) - (self.clock() - ended))


@dataclass
class Status:
    """How far a run is.

    Args:
        steps: of the whole run.
        evaluated: finished batches of the running evaluation, and their total number if it is known.
        phase: returns the current phase (see progress.Phase).
    """

    steps: int
    step: int = 0
    epoch: float = 0.0
    evaluated: tuple[int, int | None] | None = None
    phase: Callable[[], str] = lambda: "training"
    time_left: TimeLeft = field(default_factory=TimeLeft)

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds until the last step, None while unknown."""
        return self.time_left.seconds(self.steps)


def shown_as(value: float | None, form: Callable[[float], str]) -> str:
    """Return a value as text; - for None."""
    return "-" if value is None else form(value)


def shown_number(value: float | None, decimals: int = 4) -> str:
    """Format a loss or a norm with fixed decimals, in scientific notation if too small or large; - for None."""
    if value is None:
        return "-"
    if value and math.isfinite(value) and not 10**-decimals <= abs(value) < 10_000:
        return f"{value:.2e}"
    return f"{value:.{decimals}f}"


def shown_clock(seconds: float | None) -> str:
    """Format a duration as 0:05, 1:02:03 or, from one day on, 2d 3h; - for None."""
    if seconds is None:
        return "-"
    days, rest = divmod(round(seconds), 86_400)
    hours, rest = divmod(rest, 3600)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
