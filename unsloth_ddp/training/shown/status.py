"""Hold the state of a run that the display shows, and format its numbers."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

BARS = "▁▂▃▄▅▆▇█"


@dataclass
class TimeLeft:
    """Estimate the seconds until the last step from the steps that this process has taken.

    The first step is left out, because it compiles and fills caches. Evaluations and checkpoints between the steps count.
    """

    clock: Callable[[], float] = time.perf_counter
    began: tuple[int, float] | None = None
    latest: tuple[int, float] | None = None

    def step_done(self, step: int) -> None:
        """Record the end of a step."""
        self.latest = step, self.clock()
        self.began = self.began or self.latest

    def seconds(self, steps: int) -> float | None:
        """Return the seconds from now to the end of step number `steps`; None before the second step."""
        if self.began is None or self.latest is None or self.latest[0] == self.began[0]:
            return None
        (first, began), (last, ended) = self.began, self.latest
        return max(0.0, (ended - began) / (last - first) * (steps - last) - (self.clock() - ended))


@dataclass
class Status:
    """The known state of a run; None stands for values that are not known yet.

    Args:
        name: of the run.
        steps: of the whole run.
        epochs: of the whole run; None if steps limit it.
        losses: training losses of all log lines so far.
        memory_bytes: peak memory of the rank that uses most.
        capacity_bytes: memory of the GPU.
        mfu: model FLOPs utilization (see mfu.py).
        accuracy: fraction of pairs whose chosen answer has the higher reward; None in runs on other rows.
        margin: mean difference of the rewards of a pair, likewise.
        evaluation: step, loss and seconds of the last evaluation.
        eval_accuracy: as accuracy, of the last evaluation.
        checkpoint: name of the last complete checkpoint, and time.monotonic() when it was written.
        evaluated: finished batches of the running evaluation, and their total number.
        phase: returns the current phase (see progress.Phase).
    """

    name: str
    steps: int
    epochs: float | None = None
    step: int = 0
    epoch: float = 0.0
    losses: list[float] = field(default_factory=list)
    grad_norm: float | None = None
    learning_rate: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    accuracy: float | None = None
    margin: float | None = None
    eval_accuracy: float | None = None
    memory_bytes: float | None = None
    capacity_bytes: float | None = None
    evaluation: tuple[int, float, float | None] | None = None
    checkpoint: tuple[str, float] | None = None
    evaluated: tuple[int, int | None] | None = None
    phase: Callable[[], str] = lambda: "training"
    time_left: TimeLeft = field(default_factory=TimeLeft)

    def update(self, logs: dict[str, float]) -> None:
        """Take over the metrics of a training log line."""
        self.losses.append(logs["loss"])
        self.grad_norm, self.learning_rate = logs.get("grad_norm"), logs.get("learning_rate")
        self.tokens_per_second, self.mfu = logs.get("tokens_per_second"), logs.get("mfu")
        self.accuracy, self.margin = logs.get("rewards/accuracies"), logs.get("rewards/margins")
        self.memory_bytes = logs.get("peak_memory_bytes")

    @property
    def seconds_left(self) -> float | None:
        """Return the seconds until the last step, None while unknown."""
        return self.time_left.seconds(self.steps)


class View:
    """Display a run; only the main process has a view. `status` is updated in place."""

    def begin(self, status: Status) -> None:
        """Show the state before the first step."""

    def logged(self, status: Status) -> None:
        """Show the metrics of a log step."""

    def evaluated(self, status: Status) -> None:
        """Show an evaluation."""

    def end(self) -> None:
        """Stop drawing; may be called twice."""


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as a curve of at most `width` bars, scaled from their lowest to their highest.

    Longer series are averaged in equal parts. A value that is not finite leaves a gap.
    """
    count = min(width, len(values))
    borders = [round(part * len(values) / count) for part in range(count + 1)] if count else []
    parts = [values[begin:end] for begin, end in itertools.pairwise(borders)]
    means = [sum(part) / len(part) for part in parts]
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(BARS) - 1
    return "".join(
        " " if not math.isfinite(mean) else BARS[round((mean - low) / span * top) if span else 0] for mean in means
    )


def shown_as(value: float | None, form: Callable[[float], str]) -> str:
    """Return a value as text; - for None."""
    return "-" if value is None else form(value)


def shown_number(value: float | None, decimals: int = 4) -> str:
    """Format a loss or a norm with fixed decimals, or in scientific notation if it is too small or large; - for None."""
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
