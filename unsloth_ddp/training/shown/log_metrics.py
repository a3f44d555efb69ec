"""Collect the metrics of a log line over all ranks, and name ranks that ran out of memory or slow the others down."""

import logging
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.training.shown.meter import Meter
from unsloth_ddp.training.shown.mfu import Utilization
from unsloth_ddp.training.step.optimizer_step import OptimizerStep, describe_repeat

logger = logging.getLogger("unsloth_ddp")


class LogMetrics:
    """Return what the kit adds to upstream's log lines; every rank calls its methods at the same steps.

    Upstream logs the mean of step means. The losses here are means over the units of all ranks.
    """

    def __init__(self, model: Any, runtime: Runtime, meter: Meter, step: OptimizerStep) -> None:
        self.runtime = runtime
        self.meter = meter
        self.step = step
        self.stragglers = Stragglers()
        self.utilization = Utilization(model, runtime)

    def of_interval(self, step: int) -> dict[str, float]:
        """Return the metrics since the last log line."""
        metrics = self._collect(step)
        self._name_stragglers()
        return {**metrics, **self.utilization.metrics(metrics["tokens_per_second"])}

    def of_run(self, step: int) -> dict[str, float]:
        """Return the training loss of the whole run, including the interval since the last log line."""
        self._collect(step)
        return {"train_loss": self.meter.train_loss or 0.0}

    def _collect(self, step: int) -> dict[str, float]:
        metrics = self.meter.collect(self.step.level)
        short = self.step.follow(self.meter.levels)
        if short and self.runtime.ranks.is_main:
            named = [self.runtime.locations[rank] for rank in short]
            print(describe_repeat(named, step, self.step.rung), flush=True)
        return metrics

    def _name_stragglers(self) -> None:
        pace = self.meter.pace
        if pace is None:
            return
        logger.info("own seconds a step of each rank: %s", " ".join(f"{seconds:.4f}" for seconds in pace[0]))
        for rank in self.stragglers.observe(*pace):
            if self.runtime.ranks.is_main:
                location = self.runtime.locations[rank]
                print(describe_straggler(location, rank, pace, self.stragglers.intervals), flush=True)


@dataclass
class Stragglers:
    """Find ranks that slow all others down; report each once.

    A rank is a straggler if, for `intervals` log lines in a row, its own time is more than `ratio` times the median of
    the others', both per step and per token (a rank is not slow because its rows are longer), and the difference per
    step is more than `share` of the step's time.
    """

    ratio: float = 1.5
    intervals: int = 3
    share: float = 0.1
    warmup: int = 1
    streaks: dict[int, int] = field(default_factory=dict)
    named: set[int] = field(default_factory=set)

    def observe(self, seconds: list[float], tokens: list[float], passed: float) -> list[int]:
        """Return the ranks that became stragglers in this interval.

        Args:
            seconds: own seconds per step of each rank.
            tokens: tokens per step of each rank.
            passed: seconds per step of the run.
        """
        if self.warmup:
            self.warmup -= 1
            return []
        new_stragglers = []
        for rank in range(len(seconds)):
            self.streaks[rank] = self.streaks.get(rank, 0) + 1 if self._slow(rank, seconds, tokens, passed) else 0
            if self.streaks[rank] >= self.intervals and rank not in self.named:
                self.named.add(rank)
                new_stragglers.append(rank)
        return new_stragglers

    def _slow(self, rank: int, seconds: list[float], tokens: list[float], passed: float) -> bool:
        others = [r for r in range(len(seconds)) if r != rank]
        if not others:
            return False
        usual = median(seconds[r] for r in others)
        a_token = [s / max(t, 1.0) for s, t in zip(seconds, tokens, strict=True)]
        return (
            seconds[rank] > self.ratio * usual
            and a_token[rank] > self.ratio * median(a_token[r] for r in others)
            and seconds[rank] - usual > self.share * passed
        )


def describe_straggler(
    location: object, rank: int, pace: tuple[list[float], list[float], float], intervals: int
) -> str:
    """Return the line that names a straggler and says what to check."""
    seconds = pace[0]
    usual = median(s for r, s in enumerate(seconds) if r != rank)
    return (
        f"{location} is slower than the others: its own work takes {seconds[rank]:.3f} s a step where theirs takes "
        f"{usual:.3f} s, for {intervals} log lines in a row, and all wait for it. Check that host for other processes, "
        "low GPU clocks (nvidia-smi -q -d PERFORMANCE,CLOCK), a narrow PCIe link, a busy CPU and a slow disk."
    )
