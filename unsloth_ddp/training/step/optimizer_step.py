"""Compute an optimizer step up to its gradients.

1. `begin`: the micro-batches of the step are there; the ranks add up what the losses are divided by.
2. `micro_batch`, for each: one forward and backward pass, replayed as a CUDA graph or computed by the backend. If memory
   runs out, this rank repeats the step with the next kind of gradient checkpointing.
3. The last pass of the step averages gradients over the ranks (gradient_exchange.py, DDP, or the sharding library).

Transformers' loop then clips the gradients, and calls the optimizer and the schedule.
"""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.gradient_checkpointing import GradientCheckpointing
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.sizing.micro_batch import MicroBatchDecision
from unsloth_ddp.sizing.sharded_trial import ShardedMemorySearch
from unsloth_ddp.sizing.trial import MemorySearch, bytes_added_by_steps, release, trained_bytes
from unsloth_ddp.training.shown.meter import Meter
from unsloth_ddp.training.step.cuda_graphs import CudaGraphs
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
        divisor: of their losses.
        measured: the meter's snapshot.
        random: states of the generators of the CPU and, where there is one, of the GPU.
        done: number of micro-batches computed so far.
    """

    batches: list[dict[str, Any]]
    divisor: Tensor
    measured: Any
    random: tuple[Tensor, Tensor | None]
    done: int = 0


@dataclass
class OptimizerStep:
    """Compute the micro-batches of optimizer steps, and average their gradients.

    A rank that repeats its step alone gets the same result: until gradients are exchanged no rank waits for another, and
    GradientExchange waits for the rank that repeats. The other ranks switch at the next log line. Where
    DistributedDataParallel exchanges the gradients (--ddp_find_unused_parameters), a rank cannot repeat the last pass of
    a step. The micro-batches of a step are ordered from the longest rows to the shortest, so memory runs out in the last
    pass only if the step has one micro-batch.

    Args:
        exchange: averages gradients in place of DistributedDataParallel, if any.
        world_size: number of ranks.
    """

    task: Task
    checkpointing: GradientCheckpointing
    graphs: CudaGraphs
    exchange: GradientExchange | None
    meter: Meter
    device: torch.device
    world_size: int
    _start: StepStart | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._reported = self.checkpointing.level

    def search(
        self, settings: Settings, runtime: Runtime, data: TrainingData, runner: MicroBatchRunner
    ) -> MemorySearch:
        """Return the search for the kind of gradient checkpointing and the micro-batch of these steps.

        Args:
            runner: computes a micro-batch as the backend does.
        """
        uses_graphs = self.graphs.choice.uses_graphs
        buffers = self.exchange.buffers if self.exchange is not None else None
        ddp_sends = self.world_size > 1 and self.exchange is None
        kind = MemorySearch if runtime.sharding == "none" else ShardedMemorySearch
        return kind(
            settings,
            runtime,
            data,
            self.checkpointing,
            runner,
            bytes_added_by_steps(runner.model, settings.optim, ddp_sends=ddp_sends),
            bytes_kept=trained_bytes(runner.model) if self.exchange is not None or uses_graphs else 0,
            uses_graphs=uses_graphs,
            captured_pass=partial(self.graphs.trial_pass, runner, buffers) if self.graphs.tries_passes() else None,
        )

    def prepare(self, decision: MicroBatchDecision, plan: BatchPlan, runner: MicroBatchRunner) -> None:
        """Use what was chosen for the run, and capture the step if micro-batches are replayed; every rank calls this.

        Args:
            plan: the batch plan with the chosen micro-batch.
            runner: computes a micro-batch as the backend does.
        """
        if len(self.checkpointing.kinds) > 1:
            self.checkpointing.use(decision.kind)
        # Only later switches are reported.
        self._reported = self.checkpointing.level
        self.graphs.prepare(runner, decision, plan, self.exchange.buffers if self.exchange is not None else None)

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
            reading: seconds that it took to read the micro-batches.
            runner: computes micro-batches with the model as it is trained.
            sum_over_ranks: all-reduce.
        """
        divisor = step_divisor([self.task.units(batch, runner) for batch in batches], self.world_size, sum_over_ranks)
        self.meter.own_work.start(reading, len(batches))
        self._start = None
        if self.checkpointing.next is not None:
            gpu = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
            self._start = StepStart(batches, divisor, self.meter.snapshot(), (torch.get_rng_state(), gpu))
        return divisor

    def micro_batch(self, compute: Pass, model: Any, batch: dict[str, Any], divisor: Tensor, *, last: bool) -> Tensor:
        """Compute the loss and the gradients of one micro-batch, and average gradients after the last one of a step."""
        replayed = self.graphs.run(batch, divisor)
        if replayed is None:
            return self._compute(compute, model, batch, divisor, last)
        loss, parts = replayed
        self.meter.own_work.forward_done()
        self.meter.add(torch.stack([(loss.detach() * divisor).double(), parts.supervised.double()]), parts.tokens)
        self.meter.replayed_bytes = self.graphs.peak_bytes
        self._count()
        if last and self.exchange is not None:
            self.exchange.average()
        return loss

    def _compute(self, compute: Pass, model: Any, batch: dict[str, Any], divisor: Tensor, last: bool) -> Tensor:
        try:
            if self.exchange is not None:
                self.exchange.begin_pass()
            with self._averaging(model, last):
                loss = compute(model, batch, divisor)
        except RuntimeError as error:
            if not self._can_repeat(error, last):
                raise
            logger.warning("the step is repeated: %s", error)
        else:
            self._count()
            return loss
        # Outside the except block, because the exception keeps the activations alive.
        return self._repeat(compute, model, last)

    def _averaging(self, model: Any, last: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context in which gradients are averaged by the exchange, by DDP, or not at all.

        With one process nothing is averaged, even if accelerate has wrapped the model. With sharding the library averages.
        """
        if not _is_ddp(model):
            return contextlib.nullcontext()
        if not last or self.world_size == 1:
            return model.no_sync()
        return contextlib.nullcontext() if self.exchange is None else self.exchange.last_pass(model)

    def _count(self) -> None:
        if self._start is not None:
            self._start.done += 1

    # ---- out of memory ----

    def _can_repeat(self, error: RuntimeError, last: bool) -> bool:
        ddp_averages = last and self.world_size > 1 and self.exchange is None
        return (
            is_out_of_memory(error)
            and self._start is not None
            and self.checkpointing.next is not None
            and not ddp_averages
        )

    def _repeat(self, compute: Pass, model: Any, last: bool) -> Tensor:
        """Repeat the step up to and including the micro-batch that ran out of memory; return the loss of that one."""
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
            self._compute(compute, model, batch, start.divisor, last=False)
        return self._compute(compute, model, start.batches[earlier], start.divisor, last)

    # ---- gradient checkpointing ----

    @property
    def identity(self) -> dict[str, str]:
        """Return what a manifest keeps of the way in which steps are computed."""
        return {"gradient_checkpointing": self.checkpointing.kind}

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

    def _use(self, kind: str) -> None:
        self.checkpointing.use(kind)
        self.graphs.use(kind)


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
