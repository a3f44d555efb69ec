"""Compute an optimizer step up to its gradients.

1. `begin`: the micro-batches of the step are there; the ranks add up what the losses are divided by.
2. `micro_batch`, for each: one forward and backward pass, replayed as a CUDA graph or computed by the backend. If
   memory runs out, this rank goes down the ladder (sizing/ladder.py) and repeats the step.
3. The last pass of the step averages gradients over the ranks (gradient_exchange.py, DDP, or the sharding library).

Transformers' loop then clips the gradients, and calls the optimizer and the schedule.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from unsloth_ddp.data.order.collate import Collate
from unsloth_ddp.data.order.split import ROWS, BatchRows
from unsloth_ddp.model.forward.gradient_checkpointing import GradientCheckpointing
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.sizing.ladder import LadderFacts, OutOfMemory, Rung, below
from unsloth_ddp.sizing.trial import release
from unsloth_ddp.training.shown.meter import Meter
from unsloth_ddp.training.step.captured_step import CapturedStep, CaptureFailed, use_default_stream
from unsloth_ddp.training.step.divisor import step_divisor
from unsloth_ddp.training.step.gradient_exchange import GradientExchange
from unsloth_ddp.training.tasks.task import Task
from unsloth_ddp.utils.known_errors import is_out_of_memory

logger = logging.getLogger("unsloth_ddp")

# (model, batch, divisor) -> loss, after a forward and a backward pass.
Pass = Callable[[Any, dict[str, Any], Tensor], Tensor]


@dataclass
class StepStart:
    """The state at the beginning of an optimizer step.

    Args:
        batches: the step's micro-batches on this rank.
        rows: of each micro-batch.
        divisor: of their losses.
        measured: the meter's snapshot.
        random: states of the generators of the CPU and, where there is one, of the GPU.
        batches_computed: how many of `batches` were computed so far.
    """

    batches: list[dict[str, Any]]
    rows: list[BatchRows]
    divisor: Tensor
    measured: Any
    random: tuple[Tensor, Tensor | None]
    batches_computed: int = 0


@dataclass
class OptimizerStep:
    """Compute the micro-batches of optimizer steps, and average their gradients.

    A rank that repeats its step alone gets the same result: until gradients are exchanged no rank waits for another,
    and GradientExchange waits for the rank that repeats. The other ranks follow at the next log line. Where
    DistributedDataParallel exchanges the gradients (--ddp_find_unused_parameters), a rank cannot repeat the last pass
    of a step, and with sharded weights it cannot repeat any, as the other ranks wait for its collectives. The
    micro-batches of a step are ordered from the longest rows to the shortest, so memory runs out in the last pass only
    if the step has one micro-batch.

    Args:
        exchange: averages gradients in place of DistributedDataParallel, if any.
        world_size: number of ranks.
        sharded: whether ranks wait for each other within a pass.
    """

    task: Task
    checkpointing: GradientCheckpointing
    collate: Collate
    exchange: GradientExchange | None
    meter: Meter
    device: torch.device
    world_size: int
    sharded: bool = False
    captured: CapturedStep | None = field(default=None, init=False)
    evaluation_passes: int = field(default=1, init=False)
    _start: StepStart | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.ladder = [Rung(False, self.checkpointing.kind, 1)]
        self.level = self._reported = 0
        # Whether another start of the job can begin below the rung of this one.
        self.restarts_lower = False

    # ---- how micro-batches are computed ----

    @property
    def rung(self) -> Rung:
        """The rung of the ladder that micro-batches are computed with."""
        return self.ladder[self.level]

    def begin_with(self, rung: Rung, captured: CapturedStep | None, facts: LadderFacts) -> None:
        """Compute micro-batches with a rung from now on, and go down if memory runs out; all ranks call this alike."""
        self.captured = captured
        # A row has a token at least.
        self.ladder = [rung, *below(rung, facts, most_rows=facts.tokens(rung.rows))]
        self.restarts_lower = rung.rows > facts.sizes[0] or rung.kind != facts.kinds[-1]
        self.level = self._reported = 0
        self.checkpointing.use(rung.kind)

    def use_task(self, task: Task) -> None:
        """Compute the losses with another form of the task."""
        self.task = self.meter.task = task
        self.collate.head_chooses = task.head_chooses

    def loss(self, model: Any, batch: dict[str, Any], divisor: Tensor) -> Tensor:
        """Return the loss of a micro-batch with the task in its present form, 0-dim."""
        return self.task.loss(model, batch, divisor)

    @property
    def identity(self) -> dict[str, Any]:
        """Return what a manifest keeps of the way in which steps are computed."""
        split = {"passes": self.rung.passes} if self.rung.passes > 1 else {}
        graphs = "on" if self.ladder[0].captured else "off"
        return {"gradient_checkpointing": self.rung.kind, "cuda_graphs": graphs, **split}

    # ---- the step, in order ----

    def begin(
        self,
        batches: list[dict[str, Any]],
        reading: float,
        runner: MicroBatchRunner,
        sum_over_ranks: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Begin a step with its micro-batches, and return the divisor of their losses (see divisor.py).

        Args:
            batches: with their rows (see KeepRows), which are taken out of them.
            reading: seconds that it took to read the micro-batches.
            runner: computes micro-batches with the model as it is trained.
            sum_over_ranks: all-reduce.
        """
        rows = [batch.pop(ROWS) for batch in batches]

        def sum_over_step(compute: Callable[[dict[str, Any]], Tensor]) -> Tensor:
            sums = [self.within_memory(*pair, compute) for pair in zip(batches, rows, strict=True)]
            return sum_over_ranks(torch.stack(sums).sum(dim=0))

        divisor = step_divisor([self.task.units(batch) for batch in batches], self.world_size, sum_over_ranks)
        self.task = self.task.for_step(runner, sum_over_step)
        self.meter.own_work.start(reading, len(batches))
        repeats = self.device.type == "cuda" and not self.sharded
        gpu = torch.cuda.get_rng_state(self.device) if repeats else None
        random = (torch.get_rng_state(), gpu)
        self._start = StepStart(batches, rows, divisor, self.meter.snapshot(), random)
        return divisor

    def micro_batch(self, compute: Pass, model: Any, batch: dict[str, Any], divisor: Tensor, *, last: bool) -> Tensor:
        """Compute the loss and the gradients of one micro-batch, and average gradients after the last one of a step."""
        try:
            loss = self._replay(batch, divisor, last=last)
            if loss is None:
                loss = self._compute(compute, model, batch, divisor, last=last)
        except (RuntimeError, CaptureFailed) as error:
            self._go_down(error, last=last)
        else:
            assert self._start is not None
            self._start.batches_computed += 1
            return loss
        # Outside the except block, because the exception keeps the activations alive.
        return self._repeat(compute, model, last=last)

    def _replay(self, batch: dict[str, Any], divisor: Tensor, *, last: bool) -> Tensor | None:
        """Return the loss of a micro-batch that was replayed as a CUDA graph; None if the backend has to compute it."""
        # A micro-batch larger than the shape was not padded to it.
        if self.captured is None or "padded_batch" not in batch:
            return None
        loss, parts = self.captured.run(batch, divisor)
        self.meter.own_work.forward_done()
        self.meter.add(torch.stack([(loss.detach() * divisor).double(), parts.supervised.double()]), parts.tokens)
        self.meter.replayed_bytes = self.captured.peak_bytes
        if last and self.exchange is not None:
            self.exchange.average()
        return loss

    def _compute(self, compute: Pass, model: Any, batch: dict[str, Any], divisor: Tensor, *, last: bool) -> Tensor:
        """Return the loss of a micro-batch that the backend computed, in as many passes as the rung says."""
        passes = [batch]
        if self.rung.passes > 1:
            assert self._start is not None
            passes = self._start.rows[self._start.batches_computed].batches(self.rung.passes)
        loss = torch.zeros((), device=self.device)
        self.meter.own_work.micro_batches += len(passes) - 1
        for number, part in enumerate(passes, 1):
            if self.exchange is not None:
                self.exchange.begin_pass()
            with self._averaging(model, last and number == len(passes)):
                loss = loss + compute(model, part, divisor)
        return loss

    def _averaging(self, model: Any, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context in which gradients are averaged by the exchange, by DDP, or not at all.

        With one process nothing is averaged, even if accelerate has wrapped the model. With sharding the library does.
        """
        if not _is_ddp(model):
            return contextlib.nullcontext()
        if not last or self.world_size == 1:
            return model.no_sync()
        return contextlib.nullcontext() if self.exchange is None else self.exchange.last_pass(model)

    # ---- out of memory ----

    def _go_down(self, error: Exception, *, last: bool) -> None:
        """Take the next rung after a pass has failed.

        Raises:
            OutOfMemory: the step cannot be repeated with less memory.
            RuntimeError: the error, if memory did not run out.
        """
        if not is_out_of_memory(error.__cause__ if isinstance(error, CaptureFailed) and error.__cause__ else error):
            if not isinstance(error, CaptureFailed):
                raise error
            # Each rank decides alone, and only the main process has standard output.
            print(f"Micro-batches are no longer replayed: {error}", file=sys.stderr, flush=True)
            self._stop_replaying()
            return
        ddp_averages = last and self.world_size > 1 and self.exchange is None
        if self.sharded or ddp_averages:
            raise OutOfMemory(self.rung, lowest=not self.restarts_lower) from error
        assert self._start is not None
        split_whole = self.rung.passes >= self._start.rows[self._start.batches_computed].most_passes > 1
        if split_whole or self.level + 1 == len(self.ladder):
            raise OutOfMemory(self.rung, lowest=True) from error
        logger.warning("the step is repeated: %s", error)
        # Before memory is freed, because the graphs captured with the rung before hold some.
        self._use(self.level + 1)

    def _repeat(self, compute: Pass, model: Any, *, last: bool) -> Tensor:
        """Repeat the step up to and including the micro-batch that ran out of memory; return the loss of that one."""
        start = self._start
        assert start is not None
        failed, start.batches_computed = start.batches_computed, 0
        model.zero_grad()
        self.checkpointing.forget_failed_pass()
        release()
        self.restore_random_numbers()
        self.meter.restore(start.measured, len(start.batches))
        for batch in start.batches[:failed]:
            self.micro_batch(compute, model, batch, start.divisor, last=False)
        return self.micro_batch(compute, model, start.batches[failed], start.divisor, last=last)

    def restore_random_numbers(self) -> None:
        """Set the generators to their states at the beginning of the step, if one began."""
        if self._start is None:
            return
        cpu, gpu = self._start.random
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, self.device)

    def _use(self, level: int) -> None:
        """Compute micro-batches with another rung: capture again with it, or stop replaying."""
        self.level = level
        self.checkpointing.use(self.rung.kind)
        if not self.rung.captured:
            self._stop_replaying()
        elif self.captured is not None:
            self.captured.recompute_layers(self.rung.kind == "torch")

    def _stop_replaying(self) -> None:
        self.captured = None
        use_default_stream(self.device)
        self.collate.pad_to_shape(None)

    def follow(self, levels: list[int]) -> list[int]:
        """Take the rung of the rank that is furthest down; return the ranks that are there if it was not reported yet.

        Args:
            levels: of every rank, in rank order.
        """
        furthest = max(levels)
        if furthest > self.level:
            self._use(furthest)
        if furthest <= self._reported:
            return []
        self._reported = furthest
        return [rank for rank, level in enumerate(levels) if level == furthest]

    def within_memory(
        self, batch: dict[str, Any], rows: BatchRows, compute: Callable[[dict[str, Any]], Tensor]
    ) -> Tensor:
        """Return the sum of what a pass without gradients computes of a batch, in more passes if memory runs out.

        Later batches begin with as many passes. With sharded weights the ranks compute as many passes, so it is one.

        Raises:
            OutOfMemory: the pass over a single row ran out of memory, or the weights are sharded.
        """
        while True:
            try:
                if self.evaluation_passes == 1:
                    return compute(batch)
                sums = [compute(part) for part in rows.batches(self.evaluation_passes)]
                return torch.stack(sums).sum(dim=0)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if self.sharded or self.evaluation_passes >= rows.most_passes:
                    raise OutOfMemory(self.rung, lowest=not self.sharded) from error
                logger.warning("a pass without gradients is split: %s", error)
            # Captured graphs hold the memory of a step, which captures them again.
            if self.captured is not None and self.captured.graphs:
                self.captured.forget()
            else:
                self.evaluation_passes *= 2
            release()


def _is_ddp(model: Any) -> bool:
    """Return whether a model is wrapped in DistributedDataParallel, around which torch_compile adds another wrapper."""
    return isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel)


def describe_repeat(locations: Sequence[object], step: int, rung: Rung) -> str:
    """Return the sentence that the main process prints after a step was repeated.

    Args:
        locations: of the ranks that ran out of memory; empty with one GPU.
        rung: that the step was repeated with.
    """
    where = ", ".join(map(str, locations)) or "the GPU"
    return (
        f"Out of memory on {where} by step {step}; the step was repeated with {rung}, which all ranks use from here on."
    )
