"""Choose how a GPU computes a step from estimates, with the rules of a run: pure arithmetic."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, cast

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.packing import PackingDecision, decide_packing, describe_backend, describe_older_gpu
from unsloth_ddp.distributed.precision import AMPERE
from unsloth_ddp.distributed.runtime import choose_backend
from unsloth_ddp.distributed.sharding import Offload, Sharding, reason_for_transformers
from unsloth_ddp.model.files.check import is_padded_by_unsloth
from unsloth_ddp.sizing.estimate import CHECKPOINTING_KINDS, Checkpointing, MemoryEstimate, Workload, estimate_memory
from unsloth_ddp.sizing.graphs import (
    StepChoice,
    launching,
    obstacle_on_gpus,
    reason_after,
    reason_before,
    shape_for,
    shape_of_run,
)
from unsloth_ddp.sizing.micro_batch import (
    ENOUGH_TOKENS,
    ENOUGH_WITH_GRAPHS,
    largest_tokens,
    search,
    sizes_of,
    sizes_to_replay,
    with_micro_batch,
)
from unsloth_ddp.sizing.rows import RowLengths, largest_micro_batch
from unsloth_ddp.sizing.shape import ModelShape
from unsloth_ddp.utils.memory_limits import FILLED, NUMBER_BYTES, SHARDED_HEADROOM


@dataclass(frozen=True)
class PlannedStep:
    """Describe how a GPU computes a step, as a run chooses it.

    Args:
        graphs: whether micro-batches are replayed as CUDA graphs; the trial of a run is taken to succeed.
        tokens: of the largest micro-batch, with padding.
    """

    batch: BatchPlan
    checkpointing: Checkpointing
    graphs: StepChoice
    tokens: int


def precision_of(settings: Settings) -> str:
    """Return the precision of a run on a GPU."""
    return "bf16" if settings.precision == "auto" else settings.precision


def with_backend_of(settings: Settings, *, images: bool = False) -> Settings:
    """Return the settings with the backend that `auto` takes on GPUs for this model, and for rows with images or without."""
    if settings.backend != "auto":
        return settings
    padded = is_padded_by_unsloth(settings)
    reason = reason_for_transformers(settings, "none", "none", images=images, padded=padded)
    return dataclasses.replace(settings, backend="transformers") if reason else settings


def backend_of(settings: Settings) -> Literal["unsloth", "transformers"]:
    """Return the backend of a run on a GPU."""
    return choose_backend(settings.backend, True, reason_for_transformers(settings, "none", "none"))


def make_workload(settings: Settings, rows: RowLengths, tokens: int, batch: BatchPlan) -> Workload:
    """Return the load of a run on one GPU with these micro-batches, without gradient checkpointing."""
    return Workload(
        tokens=tokens,
        precision=NUMBER_BYTES[precision_of(settings)],
        master=NUMBER_BYTES[settings.full_weights],
        optimizer=settings.optim,
        checkpointing="none",
        processes=batch.processes,
        backend=backend_of(settings),
        packed=rows.packing is not None,
        accumulation=batch.accumulation,
        pixels=rows.most_pixels(batch.per_device),
        ddp_buckets=settings.ddp_find_unused_parameters,
        logits=rows.most_logits(batch.per_device, tokens) if settings.trains_preferences or rows.images else 0,
    )


def choose_step(
    settings: Settings,
    shape: ModelShape,
    rows: RowLengths,
    batch: BatchPlan,
    gpu_memory: float | None,
    sharding: Sharding = "none",
    offload: Offload = "none",
    copies: int = 1,
) -> PlannedStep:
    """Choose micro-batch, gradient checkpointing and CUDA graphs as a run does.

    Args:
        batch: with any micro-batch.
        gpu_memory: bytes; everything is taken to fit if it is None.
    """
    launched = launching(shape.layer_weights, shape.layers)
    against = obstacle_on_gpus(
        settings,
        packed=rows.packing is not None,
        precision=precision_of(settings),
        sharding=sharding,
        processes=batch.processes,
        images=rows.images,
    )
    kinds = checkpointing_kinds(settings, sharding)

    def tokens(size: int) -> int:
        return largest_tokens(rows, size, settings.longest_example)

    def fits_with(kind: str, size: int) -> bool:
        assert gpu_memory is not None
        work = make_workload(settings, rows, tokens(size), with_micro_batch(batch, size))
        work = dataclasses.replace(work, checkpointing=cast(Checkpointing, kind), offload=offload, copies=copies)
        work = as_loaded(settings, shape, sharding, work, gpu_memory)
        # Also where it is a lower bound, which has no verdict.
        return is_chosen(estimate_memory(shape, settings.method, sharding, work), sharding, gpu_memory)

    def find(*, graphs: bool) -> tuple[tuple[str, int] | None, list[int]]:
        sizes = sizes_to_replay(settings, rows, batch) if graphs else sizes_of(settings, batch)
        if gpu_memory is None or len(kinds) * len(sizes) == 1:
            return (kinds[0], sizes[-1]), sizes
        return search(kinds, sizes, tokens, fits_with, ENOUGH_WITH_GRAPHS if graphs else ENOUGH_TOKENS), sizes

    reason = reason_before(settings, against, rows, batch, launched)
    found, sizes = find(graphs=reason is None)
    after_all = False
    if reason is not None and found is not None and found[0] != kinds[0]:
        reason = reason_before(settings, against, rows, batch, launched, recomputes=True)
        after_all = reason is None
        if after_all:
            found, sizes = find(graphs=True)
    kind, size = found or (kinds[-1], sizes[0])
    batch = with_micro_batch(batch, size)
    if reason is None:
        shape_of_steps = shape_of_run(settings, rows, batch)
        reason = reason_after(settings, rows, batch, shape_of_steps, kind, launched, after_all=after_all)
    if found is None:
        # A run does not get beyond its trial.
        largest = tokens(size)
    elif reason is None:
        largest = shape_for(rows, size, settings.max_length).tokens
    else:
        largest = largest_micro_batch(rows, batch, settings)
    graphs = StepChoice(reason is None, reason or "if a trial before step 1 gives the same loss and gradients")
    return PlannedStep(batch, cast(Checkpointing, kind), graphs, largest)


def checkpointing_kinds(settings: Settings, sharding: Sharding = "none") -> tuple[Checkpointing, ...]:
    """Return the kinds of gradient checkpointing that a run may use, cheapest first (model/forward/gradient_checkpointing.py)."""
    if settings.gradient_checkpointing != "auto":
        return (settings.gradient_checkpointing,)
    all_kinds = backend_of(settings) == "unsloth" and sharding == "none"
    return CHECKPOINTING_KINDS if all_kinds else CHECKPOINTING_KINDS[:2]


def as_loaded(
    settings: Settings, shape: ModelShape, sharding: Sharding, work: Workload, gpu_memory: float | None
) -> Workload:
    """Return the load with the backend of the run.

    Where the whole model does not fit on one GPU, FSDP2 with --backend auto takes Transformers (model/loading/whole_model.py).
    """
    if reason_for_transformers(settings, sharding, work.offload):
        return dataclasses.replace(work, backend="transformers")
    if sharding != "fsdp2" or work.backend == "transformers" or gpu_memory is None:
        return work
    if estimate_memory(shape, settings.method, sharding, work).loading <= FILLED * gpu_memory:
        return work
    return dataclasses.replace(work, backend="transformers") if settings.backend == "auto" else work


def is_chosen(memory: MemoryEstimate, sharding: Sharding, gpu_memory: float) -> bool:
    """Return whether `auto` options choose what takes so much memory; with sharding a run leaves more of a GPU free."""
    share = FILLED if sharding == "none" else 1 - SHARDED_HEADROOM
    return memory.total <= FILLED * gpu_memory and memory.passing <= share * gpu_memory


def planned_packing(
    settings: Settings, shape: ModelShape, capability: tuple[int, int] = AMPERE, *, images: bool = False
) -> PackingDecision:
    """Decide packing as on a GPU of this compute capability without flash-attn and xformers (model/packing/attention.py)."""
    backend, precision = backend_of(settings), precision_of(settings)
    replaceable = backend == "unsloth" or settings.attn_implementation is None
    older = capability < AMPERE
    found = shape.packing
    none = found.no_kernel or (found.no_kernel_with_images if images else None)
    takes = replaceable and precision != "fp32" and not older and none is None
    place = describe_backend(backend, precision, settings)
    if older:
        place += describe_older_gpu("a GPU", capability)
    missing = none or f"{place} has no attention kernel for packed rows"
    kernel = "torch's varlen_attn" if takes else None
    return decide_packing(settings.packing, missing, kernel, found.wrong)
