"""Collect the metrics of a log line over all ranks, and name the ranks that ran out of memory or slow the others down."""

from __future__ import annotations

import logging
from typing import Any

from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.training.meter import Meter
from unsloth_ddp.training.mfu import Utilization
from unsloth_ddp.training.oom_retry import StepRetry, describe_repeat
from unsloth_ddp.training.stragglers import Stragglers, describe_straggler

logger = logging.getLogger("unsloth_ddp")


class LogMetrics:
    """Return what the kit adds to upstream's log lines; every rank calls its methods at the same steps.

    Upstream logs the mean of step means. The losses here are means over the tokens of all ranks.
    """

    def __init__(self, model: Any, runtime: Runtime, meter: Meter, retry: StepRetry) -> None:
        self.runtime = runtime
        self.meter = meter
        self.retry = retry
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
        return {"train_loss": self.meter.totals.train_loss or 0.0}

    def _collect(self, step: int) -> dict[str, float]:
        checkpointing = self.retry.checkpointing
        metrics = self.meter.collect(checkpointing.level)
        short = self.retry.follow(self.meter.levels)
        if short and self.runtime.ranks.is_main:
            named = [self.runtime.locations[rank] for rank in short]
            print(describe_repeat(named, step, checkpointing.kind), flush=True)
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
