"""Choose how a GPU computes a step from estimates, with the rules of a run: pure arithmetic."""

import dataclasses
from dataclasses import dataclass
from typing import cast

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.packing import PackingDecision, decide_packing, describe_backend, describe_older_gpu
from unsloth_ddp.distributed.precision import AMPERE
from unsloth_ddp.distributed.runtime import Backend
from unsloth_ddp.distributed.sharding import Offload, Sharding
from unsloth_ddp.model.backend import BackendFacts, choose_backend
from unsloth_ddp.sizing.estimate import CHECKPOINTING_KINDS, Checkpointing, MemoryEstimate, Workload, estimate_memory
from unsloth_ddp.sizing.graphs import obstacle_on_gpus, shape_for, why_not_captured
from unsloth_ddp.sizing.ladder import Rung, choose, facts_of, ladder
from unsloth_ddp.sizing.micro_batch import RowLengths, largest_micro_batch, with_micro_batch
from unsloth_ddp.sizing.shape import ModelShape
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.memory_limits import FILLED, NUMBER_BYTES, SHARDED_HEADROOM


@dataclass(frozen=True)
class PlannedStep:
    """Describe how a GPU computes a step, as a run chooses it.

    Args:
        rung: the trial of a run is taken to succeed.
        graphs: why micro-batches are captured, or why not, in a few words.
        tokens: of the largest micro-batch, with padding.
    """

    batch: BatchPlan
    rung: Rung
    graphs: str
    tokens: int

    @property
    def checkpointing(self) -> Checkpointing:
        """Return the kind of gradient checkpointing."""
        return cast(Checkpointing, self.rung.kind)


def precision_of(settings: Settings) -> str:
    """Return the precision of a run on a GPU."""
    return "bf16" if settings.precision == "auto" else settings.precision


def backend_of(settings: Settings) -> Backend:
    """Return the backend of a run on a GPU, whose settings are those of with_backend (model/backend.py)."""
    return choose_backend(BackendFacts(settings))[0]


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
    against = obstacle_on_gpus(
        settings,
        packed=rows.packing is not None,
        precision=precision_of(settings),
        sharding=sharding,
        processes=batch.processes,
        images=rows.images,
    )
    kinds = checkpointing_kinds(settings, sharding)
    why_not = why_not_captured(settings, against, rows, batch)
    facts = facts_of(settings, rows, batch, kinds, captured=why_not is None)

    def fits(rung: Rung) -> bool:
        assert gpu_memory is not None
        work = make_workload(settings, rows, facts.tokens(rung.rows), with_micro_batch(batch, rung.rows))
        work = dataclasses.replace(work, checkpointing=cast(Checkpointing, rung.kind), offload=offload, copies=copies)
        work = as_loaded(settings, shape, sharding, work, gpu_memory)
        # Also where it is a lower bound, which has no verdict.
        return is_chosen(estimate_memory(shape, settings.method, sharding, work), sharding, gpu_memory)

    rungs = ladder(facts)
    fitting = rungs[0] if gpu_memory is None or len(rungs) == 1 else choose(rungs, fits, facts.tokens)
    rung = fitting or Rung(False, kinds[-1], facts.sizes[0])
    batch = with_micro_batch(batch, rung.rows)
    if fitting is None:
        # A run does not get beyond its trial.
        largest = facts.tokens(rung.rows)
    elif rung.captured:
        largest = shape_for(rows, rung.rows, settings.max_length).tokens
    else:
        largest = largest_micro_batch(rows, batch, settings)
    graphs = "if a trial before step 1 gives the same loss and gradients, and is faster"
    if not rung.captured:
        graphs = why_not or "no captured micro-batch is estimated to fit"
    return PlannedStep(batch, rung, graphs, largest)


def checkpointing_kinds(settings: Settings, sharding: Sharding = "none") -> tuple[Checkpointing, ...]:
    """Return the kinds of gradient checkpointing that a run may use, cheapest first (gradient_checkpointing.py)."""
    if settings.gradient_checkpointing != "auto":
        return (settings.gradient_checkpointing,)
    all_kinds = backend_of(settings) == "unsloth" and sharding == "none"
    return CHECKPOINTING_KINDS if all_kinds else CHECKPOINTING_KINDS[:2]


def as_loaded(
    settings: Settings, shape: ModelShape, sharding: Sharding, work: Workload, gpu_memory: float | None
) -> Workload:
    """Return the load with the backend of the run, which may depend on the size of the model (model/backend.py)."""
    facts = BackendFacts(settings, sharding=sharding, offload=work.offload)
    if sharding == "fsdp2" and settings.backend == "auto" and gpu_memory is not None:
        whole = estimate_memory(shape, settings.method, sharding, dataclasses.replace(work, backend="unsloth"))
        facts = dataclasses.replace(facts, loading=whole.loading, room=gpu_memory)
    try:
        backend, _ = choose_backend(facts)
    except UserError:
        # A run refuses Unsloth there, and says that Transformers trains it.
        backend = "transformers"
    return dataclasses.replace(work, backend=backend)


def is_chosen(memory: MemoryEstimate, sharding: Sharding, gpu_memory: float) -> bool:
    """Return whether `auto` options choose what takes so much memory; with sharding a run leaves more of a GPU free."""
    share = FILLED if sharding == "none" else 1 - SHARDED_HEADROOM
    return memory.total <= FILLED * gpu_memory and memory.passing <= share * gpu_memory


def planned_packing(
    settings: Settings, shape: ModelShape, capability: tuple[int, int] = AMPERE, *, images: bool = False
) -> PackingDecision:
    """Decide packing as on a GPU of this capability without flash-attn and xformers (model/packing/attention.py)."""
    backend, precision = backend_of(settings), precision_of(settings)
    replaceable = backend == "unsloth" or settings.attn_implementation is None
    older = capability < AMPERE
    obstacles = shape.packing
    none = obstacles.no_kernel or (obstacles.no_kernel_with_images if images else None)
    takes = replaceable and precision != "fp32" and not older and none is None
    place = describe_backend(backend, precision, settings)
    if older:
        place += describe_older_gpu("a GPU", capability)
    missing = none or f"{place} has no attention kernel for packed rows"
    kernel = "torch's varlen_attn" if takes else None
    return decide_packing(settings.packing, missing, kernel, obstacles.wrong)
