"""Repeat a step that runs out of memory with the next kind of gradient checkpointing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from unsloth_ddp.model.forward.gradient_checkpointing import GradientCheckpointing
from unsloth_ddp.sizing.trial import release
from unsloth_ddp.training.shown.meter import Meter
from unsloth_ddp.training.step.gradient_exchange import GradientExchange
from unsloth_ddp.utils.known_errors import is_out_of_memory

logger = logging.getLogger("unsloth_ddp")

# (model, batch, divisor) -> loss, after a forward and a backward pass.
Pass = Callable[[Any, dict[str, Tensor], Tensor], Tensor]


@dataclass
class StepStart:
    """The state at the beginning of an optimizer step.

    Args:
        batches: the step's micro-batches on this rank.
        divisor: of their losses.
        measured: the meter's snapshot.
        random: states of the generators of the CPU and, where there is one, of the GPU.
        done: number of micro-batches computed so far.
    """

    batches: list[dict[str, Tensor]]
    divisor: Tensor
    measured: Any
    random: tuple[Tensor, Tensor | None]
    done: int = 0


@dataclass
class StepRetry:
    """Switch to the next kind of gradient checkpointing when memory runs out, and repeat the step.

    A rank repeats its step alone and gets the same result: until gradients are exchanged no rank waits for another, and
    GradientExchange waits for the rank that repeats. The other ranks switch at the next log line. Where
    DistributedDataParallel exchanges the gradients (--ddp_find_unused_parameters), a rank cannot repeat the last backward
    pass of a step. The micro-batches of a step are ordered from the longest rows to the shortest, so memory runs out in
    the last pass only if the step has one micro-batch.

    Args:
        exchange: averages gradients in place of DistributedDataParallel, if any.
        world_size: number of ranks.
        changed: called with a kind when this rank begins to use it.
    """

    checkpointing: GradientCheckpointing
    meter: Meter
    device: torch.device
    exchange: GradientExchange | None
    world_size: int
    changed: Callable[[str], None]
    _start: StepStart | None = field(default=None, init=False)
    _in_backward: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._reported = self.checkpointing.level

    def start_with(self, kind: str) -> None:
        """Set the kind that the run begins with; only later switches are reported."""
        if len(self.checkpointing.kinds) > 1:
            self.checkpointing.use(kind)
        self._reported = self.checkpointing.level

    def begin_step(self, batches: list[dict[str, Tensor]], divisor: Tensor) -> None:
        """Save the state that is needed to repeat the step that begins now."""
        if self.checkpointing.next is None:
            self._start = None
            return
        gpu = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self._start = StepStart(batches, divisor, self.meter.snapshot(), (torch.get_rng_state(), gpu))

    def forward_done(self) -> None:
        """Note that the model's forward pass is over."""
        self._in_backward = True

    def run(self, compute: Pass, model: Any, batch: dict[str, Tensor], divisor: Tensor) -> Tensor:
        """Compute one micro-batch; if memory runs out, repeat the step up to and including it."""
        self._in_backward = False
        if self.exchange is not None:
            self.exchange.begin_pass()
        try:
            with self._averaging(model):
                loss = compute(model, batch, divisor)
        except RuntimeError as error:
            if not self._can_repeat(model, error):
                raise
            logger.warning("the step is repeated: %s", error)
        else:
            self.pass_done()
            return loss
        # Outside the except block, because the exception keeps the activations alive.
        return self._repeat(compute, model)

    def pass_done(self) -> None:
        """Count a micro-batch of the step as computed."""
        if self._start is not None:
            self._start.done += 1

    def _averaging(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Return the context that decides who averages gradients in this pass.

        With one process nothing is averaged, even if accelerate has wrapped the model. Otherwise the exchange, or DDP,
        averages in the last pass of a step.
        """
        if self.world_size == 1 and _is_ddp(model):
            return model.no_sync()
        if self.exchange is not None and model.require_backward_grad_sync:
            return self.exchange.last_pass(model)
        return contextlib.nullcontext()

    def _can_repeat(self, model: Any, error: RuntimeError) -> bool:
        possible = is_out_of_memory(error) and self._start is not None and self.checkpointing.next is not None
        if not possible or self.world_size == 1 or self.exchange is not None:
            return possible
        return not (self._in_backward and model.require_backward_grad_sync)

    def _repeat(self, compute: Pass, model: Any) -> Tensor:
        start, kind = self._start, self.checkpointing.next
        assert start is not None and kind is not None
        earlier, start.done = start.done, 0
        model.zero_grad()
        # Switch before memory is freed, because the graphs captured with the previous kind hold some.
        self._use(kind)
        release()
        cpu, gpu = start.random
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, self.device)
        self.meter.restore(start.measured, len(start.batches))
        for batch in start.batches[:earlier]:
            with model.no_sync() if _is_ddp(model) else contextlib.nullcontext():
                self.run(compute, model, batch, start.divisor)
        return self.run(compute, model, start.batches[earlier], start.divisor)

    def _use(self, kind: str) -> None:
        self.checkpointing.use(kind)
        self.changed(kind)

    def follow(self, levels: list[int]) -> list[int]:
        """Switch to the kind of the rank that is furthest; return the ranks that use it if it was not reported yet.

        Args:
            levels: of every rank, in rank order.
        """
        furthest = max(levels)
        if furthest > self.checkpointing.level:
            self._use(self.checkpointing.kinds[furthest])
        if furthest <= self._reported:
            return []
        self._reported = furthest
        return [rank for rank, level in enumerate(levels) if level == furthest]


def _is_ddp(model: Any) -> bool:
    """Return whether a model is wrapped in DistributedDataParallel, around which torch_compile adds another wrapper."""
    return isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel)


def describe_repeat(locations: Sequence[object], step: int, kind: str) -> str:
    """Return the sentence that the main process prints after a step was repeated.

    Args:
        locations: of the ranks that ran out of memory; empty with one GPU.
        kind: of gradient checkpointing that the step was repeated with.
    """
    return (
        f"Out of memory on {', '.join(map(str, locations)) or 'the GPU'} by step {step}; the step was repeated with gradient checkpointing "
        f"{kind}, which all ranks use from here on."
    )
