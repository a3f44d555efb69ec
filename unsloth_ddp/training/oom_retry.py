"""An SFTTrainer that repeats a step with less memory where one does not fit, instead of dying."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from unsloth_ddp.config.parse import Settings
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.gradient_checkpointing import GradientCheckpointing
from unsloth_ddp.training.gradient_exchange import GradientExchange
from unsloth_ddp.training.saving import ResumableTrainer
from unsloth_ddp.utils.known_errors import is_out_of_memory

logger = logging.getLogger("unsloth_ddp")


def exchanges_itself(settings: Settings, runtime: Runtime, recompute: GradientCheckpointing) -> bool:
    """Whether the trainer averages gradients over ranks, and not DistributedDataParallel.

    So where there is another kind to go to, but not where every parameter is trained, since buckets would be there twice.
    """
    several = runtime.ranks.world_size > 1 and runtime.sharding == "none" and len(recompute.kinds) > 1
    return several and settings.method != "full" and not settings.ddp_find_unused_parameters


@dataclass
class StepStart:
    """What it takes to begin an optimizer step once more.

    Args:
        batches: the step's micro-batches on this rank.
        sums: the meter's, before the step.
        timed: own seconds and steps that were measured before it, and marks that were not read yet.
        random: states of the generators of the CPU and, where there is one, of the GPU.
    """

    batches: list[dict[str, Tensor]]
    divisor: Tensor
    sums: Tensor
    random: tuple[Tensor, Tensor | None]
    timed: tuple[float, int, list[Any]]
    done: int = 0


class RetryingTrainer(ResumableTrainer):
    """Steps down to the next kind of gradient checkpointing when memory runs out, and repeats the step.

    A rank does so by itself, which changes none of its numbers: until gradients are exchanged no rank waits for another,
    and `exchange` waits for one that has to go back. At the next log line the others follow. Where
    DistributedDataParallel exchanges them (see exchanges_itself) a rank cannot go back from the last backward pass of a
    step; since rows are arranged from the longest to the shortest, memory runs out there if a step has one micro-batch.
    """

    recompute: GradientCheckpointing
    exchange: GradientExchange | None = None
    step_start: StepStart | None = None
    in_backward: bool = False
    told_level: int = 0

    def remember(self, batches: list[dict[str, Tensor]], divisor: Tensor) -> None:
        """A step begins."""
        if self.recompute.next is None:
            self.step_start = None
            return
        device = self.args.device
        random = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        own = self.meter.own_work
        timed = own.seconds, own.steps, list(own.marks)
        self.step_start = StepStart(batches, divisor, self.meter.sums.clone(), random, timed)

    def training_step(self, model: Any, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward pass of one micro-batch, or of all of the step up to it where memory runs out."""
        self.in_backward = False
        try:
            with self._exchanging(model):
                loss = super().training_step(model, inputs, num_items_in_batch)
        except RuntimeError as error:
            if not self._can_repeat(model, error):
                raise
            logger.warning("step %s: %s", self.state.global_step + 1, error)
        else:
            if self.step_start is not None:
                self.step_start.done += 1
            return loss
        # Not in the except block, where the exception holds on to what was computed.
        return self._repeat(model)

    def _exchanging(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Who averages gradients in this pass: nobody where there is one process, though launchers wrap its model too;
        `exchange`, in the last pass of a step; or DDP.
        """
        if self.args.world_size == 1 and isinstance(model, DistributedDataParallel):
            return model.no_sync()
        if self.exchange is not None and model.require_backward_grad_sync:
            return self.exchange.last_pass(model)
        return contextlib.nullcontext()

    def _can_repeat(self, model: Any, error: RuntimeError) -> bool:
        possible = is_out_of_memory(error) and self.step_start is not None and self.recompute.next is not None
        if not possible or self.args.world_size == 1 or self.exchange is not None:
            return possible
        return not (self.in_backward and model.require_backward_grad_sync)

    def _repeat(self, model: Any) -> Tensor:
        start, kind = self.step_start, self.recompute.next
        assert start is not None and kind is not None
        earlier, start.done = start.done, 0
        model.zero_grad()
        gc.collect()
        if self.args.device.type == "cuda":
            torch.cuda.empty_cache()
        self._restore(start)
        self._use(kind)
        for batch in start.batches[:earlier]:
            with self.accelerator.no_sync(model):
                self.training_step(model, batch, start.divisor)
        return self.training_step(model, start.batches[earlier], start.divisor)

    def _use(self, kind: str) -> None:
        self.recompute.use(kind)
        self.checkpoints.facts["gradient_checkpointing"] = kind

    def _restore(self, start: StepStart) -> None:
        cpu, gpu = start.random
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, self.args.device)
        self.meter.sums.copy_(start.sums)
        own = self.meter.own_work
        own.seconds, own.steps, own.marks = start.timed[0], start.timed[1], deque(start.timed[2])
        own.start(0.0, len(start.batches))

    def follow(self, levels: list[int]) -> None:
        """Do as the rank that has stepped down furthest; the main process says so, once."""
        furthest = max(levels)
        if furthest > self.recompute.level:
            self._use(self.recompute.kinds[furthest])
        if furthest > self.told_level and self.runtime.ranks.is_main:
            short = [str(self.runtime.locations[rank]) for rank, level in enumerate(levels) if level == furthest]
            print(
                f"Out of memory on {', '.join(short) or 'the GPU'} by step {self.state.global_step}; the step was repeated "
                f"with gradient checkpointing {self.recompute.kind}, which all ranks use from here on.",
                flush=True,
            )
        self.told_level = max(furthest, self.told_level)
