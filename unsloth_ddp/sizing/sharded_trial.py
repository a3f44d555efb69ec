"""Choose gradient checkpointing and micro-batch with ZeRO and FSDP2, by an estimate that each rank measures alone.

The trials of trial.py do not work with sharding: sharded weights cannot be used before training begins, and a rank
that runs out of memory would leave the others waiting. Instead, each rank runs the longest micro-batch through a small
copy of its model (stand-in) with one layer and with two, or with one and two periods where kinds of layers alternate.
The difference is the memory that a layer keeps for the backward pass; the first pass shows what the head and a
recomputed layer need. Weights, gradients and optimizer states are computed (sharded_bytes.py). The ranks gather the
results, so that all make the same choice.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from unsloth_ddp.data.order.worst_rows import worst_micro_batch
from unsloth_ddp.distributed.wire import sendable
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.loading.stand_in import (
    NoStandInError,
    first_layers,
    is_quantized,
    layers_of,
    make_stand_in,
    period_of,
    unused,
)
from unsloth_ddp.model.modules import DTYPES, base_model, embedding_ids, kept_random_numbers, training_mode
from unsloth_ddp.sizing.ladder import Rung
from unsloth_ddp.sizing.sharded_bytes import ShardedLayout, ShardedModel, Weight, _whole, held_bytes
from unsloth_ddp.sizing.trial import MemoryTrials, Trial, forget_free_memory, release, room_on, shown_gib
from unsloth_ddp.utils.errors import one_line
from unsloth_ddp.utils.known_errors import is_out_of_memory
from unsloth_ddp.utils.memory_limits import SHARDED_HEADROOM


def read_weights(model: Any, layers: Iterable[Module], precision: int, device: torch.device) -> ShardedModel:
    """Return the weights of a loaded model, sharded or not.

    Args:
        precision: bytes of an element in passes.
        device: of this rank; shards in host memory count as 0 bytes.
    """
    base = base_model(model)
    embeddings = embedding_ids(model)

    def weights_of(parameters: Iterable[Parameter]) -> list[Weight]:
        return [_weight(p, precision, device, embedding=id(p) in embeddings) for p in parameters]

    blocks = [list(layer.parameters()) for layer in layers]
    inside = {id(p) for block in blocks for p in block}
    head = base.get_output_embeddings()
    return ShardedModel(
        weights=weights_of(model.parameters()),
        block=max((weights_of(block) for block in blocks), key=_whole),
        head=weights_of(head.parameters()) if head is not None else [],
        outside=weights_of(p for p in model.parameters() if id(p) not in inside),
        split=any(isinstance(p, DTensor) for p in model.parameters()),
    )


def _weight(parameter: Any, precision: int, device: torch.device, *, embedding: bool) -> Weight:
    numbers = getattr(parameter, "ds_numel", parameter.numel())
    # ZeRO-3 replaces a weight by an empty tensor and keeps the shard in ds_tensor.
    part = parameter.to_local() if isinstance(parameter, DTensor) else getattr(parameter, "ds_tensor", parameter)
    stored = part.numel() * part.element_size() if part.device.type == device.type else 0
    number = parameter.element_size()
    whole = numbers * (number if is_quantized(parameter) else precision)
    return Weight(stored, whole, number, numbers if parameter.requires_grad else 0, embedding)


logger = logging.getLogger("unsloth_ddp")


@sendable
@dataclass(frozen=True)
class Estimate(Trial):
    """Estimate of one rank, in bytes; `needed` is None where the stand-in ran out of memory.

    Args:
        obstacle: why there is no estimate, in a few words; empty if there is one.
    """

    layers: int = 0
    obstacle: str = ""
    headroom: ClassVar[float] = SHARDED_HEADROOM


@dataclass(eq=False)
class DeviceMemory:
    """Report the memory of a CUDA device, as torch's allocator counts it."""

    device: torch.device

    def room(self) -> int:
        """Return the bytes that this process may use, including those in use."""
        return room_on(self.device)

    def allocated(self) -> int:
        """Return the bytes in use now."""
        return torch.cuda.memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        """Return the peak bytes in use since reset_peak, after waiting for the device."""
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)


def extrapolate(first: int, second: int, layers: int, period: int) -> int:
    """Return the bytes of activations of all layers.

    Args:
        first: bytes of `period` layers, with the head.
        second: bytes of twice as many layers.
        layers: number of layers of the model.
        period: layers after which their kinds repeat.
    """
    periods = -(-layers // period)
    return first + (periods - 1) * max(0, second - first)


class ShardedEstimates(MemoryTrials):
    """Choose as MemoryTrials does, by estimates in place of trials.

    An estimate never ends a run: if nothing fits by the estimates, the run begins with the last rung.
    """

    def __init__(self, *args: Any, memory: DeviceMemory | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.memory = memory or DeviceMemory(self.runner.device)

    def choose(self, rungs: Sequence[Rung]) -> tuple[Rung, str]:
        """Return the first rung that fits by the estimates, else the last one, and the reason in words."""
        try:
            return super().choose(rungs)
        except NoStandInError as obstacle:
            return rungs[-1], f"not estimated with sharding {self.runtime.sharding}: {obstacle}"
        finally:
            forget_free_memory()

    def try_rung(self, rung: Rung) -> Trial:
        """Return the estimate of a rung on this rank, without collectives."""
        return self.estimate(rung.rows)

    def fits(self, rung: Rung) -> bool:
        """Return whether a rung leaves the headroom free on every rank by the estimates.

        Raises:
            NoStandInError: there is no estimate.
        """
        fits = super().fits(rung)
        for estimate in self.trials[rung]:
            if isinstance(estimate, Estimate) and estimate.obstacle:
                raise NoStandInError(estimate.obstacle)
        return fits

    def _describe(self, rung: Rung, *, fits: bool) -> str:
        worst = max(self.trials[rung], key=lambda trial: trial.share)
        assert isinstance(worst, Estimate)
        tokens = f"{rung.rows} x {self._tokens(1):,} tokens"
        if worst.needed is None:
            return f"estimated from its first layers, {tokens} may not fit into {shown_gib(worst.room)} GiB"
        used = f"{tokens} need about {shown_gib(worst.needed)} of {shown_gib(worst.room)} GiB"
        return f"estimated from {worst.layers} layers, {used}{'' if fits else ', with little room to spare'}"

    def estimate(self, size: int) -> Estimate:
        """Estimate the memory of a step with micro-batches of `size` rows on this rank, without collectives."""
        release()
        forget_free_memory()
        room = self.memory.room()
        try:
            period = period_of(layers_of(self.runner.model))
            weights_and_states = self._held_bytes()
            needed = weights_and_states + self._activations(size, period)
            return Estimate(needed, room, layers=2 * period)
        except NoStandInError as obstacle:
            return Estimate(None, room, obstacle=str(obstacle))
        except Exception as error:
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                return Estimate(None, room)
            # A model can raise any exception in a stand-in that it was not written for.
            logger.warning("no stand-in of the model: %s", one_line(error), exc_info=True)
            return Estimate(None, room, obstacle=f"its layers cannot be tried alone ({type(error).__name__})")
        finally:
            release()

    def _held_bytes(self) -> int:
        model, runtime, settings = self.runner.model, self.runtime, self.settings
        dtype = DTYPES[runtime.precision]
        fsdp = runtime.sharding == "fsdp2"
        bf16_weights = settings.method == "full" and settings.full_weights == "bf16"
        layout = ShardedLayout(
            sharding=runtime.sharding,
            offload=runtime.offload,
            parts=runtime.parts if fsdp else runtime.ranks.world_size,
            precision=dtype.itemsize,
            # accelerate keeps trained weights in fp32, unless the trainer computes without autocast.
            master=dtype.itemsize if bf16_weights else 4,
            optimizer=settings.optim,
            whole_in_use=settings.method != "full" and not self.checkpointing.recomputes_reentrantly,
        )
        weights = read_weights(model, layers_of(model), dtype.itemsize, self.runner.device)
        return held_bytes(weights, layout, self.memory.allocated())

    def _activations(self, size: int, period: int) -> int:
        """Return the bytes that a pass over the longest `size` rows takes in addition to weights and gradients."""
        model, device = self.runner.model, self.runner.device
        batch = self.runner.batch_of(worst_micro_batch(self.data.train, size, self.settings.max_length))
        with kept_random_numbers(device):
            stand_in = make_stand_in(model, 2 * period, DTYPES[self.runtime.precision], device)
            runner = dataclasses.replace(self.runner, model=stand_in)
            with unused(model), training_mode(stand_in):
                with first_layers(stand_in, period):
                    # The first pass compiles kernels and allocates the workspaces of libraries.
                    self._pass(runner, batch)
                    first = self._pass(runner, batch)
                second = self._pass(runner, batch)
        return extrapolate(first, second, len(layers_of(model)), period)

    def _pass(self, runner: MicroBatchRunner, batch: dict[str, Any]) -> int:
        """Return the bytes that a forward and backward pass adds to those in use."""
        trained = [p for p in runner.model.parameters() if p.requires_grad]
        allocated = self.memory.allocated()
        self.memory.reset_peak()
        with contextlib.ExitStack() as hooks:
            for parameter in trained:
                # A sharded run reduces each gradient as soon as it is computed, and keeps only a shard.
                hooks.enter_context(parameter.register_post_accumulate_grad_hook(_drop_gradient))
            runner.loss_sum(batch).backward()
            return max(0, self.memory.peak() - allocated)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
