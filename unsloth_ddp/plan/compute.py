"""Compute a plan from the shape of the model, the rows and the hardware: pure arithmetic."""

import dataclasses
from dataclasses import dataclass
from typing import get_args

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.distributed.precision import AMPERE
from unsloth_ddp.distributed.sharding import Offload, Sharding
from unsloth_ddp.sizing.choose import as_loaded, checkpointing_kinds, choose_step, is_chosen, make_workload
from unsloth_ddp.sizing.estimate import (
    Checkpointing,
    MemoryEstimate,
    Method,
    Workload,
    beside_reference,
    estimate_memory,
    is_supported,
    judge_fit,
)
from unsloth_ddp.sizing.ladder import Rung
from unsloth_ddp.sizing.micro_batch import RowLengths
from unsloth_ddp.sizing.shape import ModelShape
from unsloth_ddp.training.shown.mfu import PEAK_FLOPS, peak_flops

# The shardings with parts in host memory that accelerate_configs/ has.
OFFLOADS: tuple[tuple[Sharding, Offload], ...] = (
    ("zero2", "optimizer"), ("zero3", "parameters"), ("fsdp2", "parameters")
)  # fmt: skip

# Shares of the published peak that runs with packed chats and LoRA, QLoRA or all weights of 1.7B and 8B reached, in
# docs/speed.md.
MEASURED_SHARES = (0.31, 0.54)
MEASURED_GPU = "H100 or H200"


@dataclass(frozen=True)
class Hardware:
    """The machines to rent, with the memory (bytes), compute capability and name of a GPU; None where not known."""

    nodes: int
    gpus_per_node: int
    gpu_memory: float | None = None
    capability: tuple[int, int] = AMPERE
    gpu: str | None = None

    @property
    def processes(self) -> int:
        """One process per GPU."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class MemoryRow:
    """One way to train, and the memory of a GPU with it; verdict is "-" without the size of a GPU."""

    method: Method
    sharding: Sharding
    checkpointing: Checkpointing
    memory: MemoryEstimate
    verdict: str
    offload: Offload = "none"
    copies: int = 1

    @property
    def config(self) -> str:
        """The sharding with copies and what is kept in host memory, as accelerate_configs/ and node.sh name it."""
        return self.sharding + "_hybrid" * (self.copies > 1) + "_offload" * (self.offload != "none")


@dataclass(frozen=True)
class Plan:
    """A plan with everything that it was made from.

    Args:
        graphs: why micro-batches are captured, or why not.
    """

    settings: Settings
    shape: ModelShape
    rows: RowLengths
    hardware: Hardware
    batch: BatchPlan
    steps: int
    tokens_a_step: float
    tokens: float
    micro_batch: int
    rung: Rung
    graphs: str
    memory: list[MemoryRow]


def guess_hours(plan: Plan) -> tuple[float, float, str]:
    """Return the fewest and the most hours of a run that computes MEASURED_SHARES of the GPUs' peak, and which GPUs.

    A GPU that is not known is taken for one of those that were measured.
    """
    peak = peak_flops(plan.hardware.gpu or "", "bf16")
    name = plan.hardware.gpu if peak and plan.hardware.gpu else MEASURED_GPU
    work = plan.tokens * plan.shape.flops_a_token(plan.settings.method)
    hours = work / (peak or PEAK_FLOPS[("H200",)]) / plan.hardware.processes / 3600
    return hours / max(MEASURED_SHARES), hours / min(MEASURED_SHARES), name


def make_memory_row(
    settings: Settings,
    shape: ModelShape,
    method: Method,
    sharding: Sharding,
    work: Workload,
    gpu_memory: float | None,
    reference: ModelShape | None = None,
) -> MemoryRow:
    """Estimate one way to train; gradient_checkpointing auto is the first kind that fits, as in a run."""
    of_method = dataclasses.replace(settings, method=method)
    work = as_loaded(of_method, shape, sharding, work, gpu_memory)
    for kind in checkpointing_kinds(settings, sharding):
        estimate = estimate_memory(shape, method, sharding, dataclasses.replace(work, checkpointing=kind))
        if reference:
            estimate = beside_reference(estimate, reference, method, sharding, work, stays=settings.streaming)
        verdict = judge_fit(estimate, gpu_memory) if gpu_memory else "-"
        chosen = not gpu_memory or sharding == "none" or is_chosen(estimate, sharding, gpu_memory)
        if verdict in ("fits", "unknown", "-") and chosen:
            break
    return MemoryRow(method, sharding, kind, estimate, verdict, work.offload, work.copies)


def shardings_for(method: Method, processes: int) -> list[tuple[Sharding, Offload]]:
    """Return the shardings that the kit supports for a method on so many GPUs, those with host memory last."""
    plain: list[tuple[Sharding, Offload]] = [(sharding, "none") for sharding in get_args(Sharding)]
    several = [pair for pair in plain if pair[0] == "none" or processes > 1]
    # DeepSpeed works on one GPU too.
    offloading = [pair for pair in OFFLOADS if pair[0] != "fsdp2" or processes > 1]
    return [pair for pair in [*several, *offloading] if is_supported(method, *pair)]


def make_plan(
    settings: Settings,
    shape: ModelShape,
    rows: RowLengths,
    batch: BatchPlan,
    hardware: Hardware,
    reference: ModelShape | None = None,
) -> Plan:
    """Compute the plan of a run.

    Args:
        reference: shape of --reference_model.
    """
    step = choose_step(settings, shape, rows, batch, hardware.gpu_memory)
    steps = step.batch.steps(rows.units, settings.num_train_epochs, settings.max_steps)
    a_step = step.batch.global_batch if rows.streamed else rows.units / step.batch.steps_per_epoch(rows.units)
    tokens_a_step = rows.mean * a_step
    return Plan(
        settings=settings,
        shape=shape,
        rows=rows,
        hardware=hardware,
        batch=step.batch,
        steps=steps,
        tokens_a_step=tokens_a_step,
        tokens=tokens_a_step * steps,
        micro_batch=step.tokens,
        rung=step.rung,
        graphs=step.graphs,
        memory=_memory_rows(settings, shape, rows, batch, hardware, reference),
    )


def _memory_rows(
    settings: Settings,
    shape: ModelShape,
    rows: RowLengths,
    batch: BatchPlan,
    hardware: Hardware,
    reference: ModelShape | None,
) -> list[MemoryRow]:
    """Estimate every way to train these rows on this hardware."""
    gpu_memory = hardware.gpu_memory
    memory: list[MemoryRow] = []

    def add(method: Method, sharding: Sharding, offload: Offload, copies: int = 1) -> None:
        of_method = dataclasses.replace(settings, method=method)
        step = choose_step(of_method, shape, rows, batch, gpu_memory, sharding, offload, copies)
        work = make_workload(of_method, rows, step.tokens, step.batch)
        work = dataclasses.replace(work, offload=offload, copies=copies)
        as_chosen = dataclasses.replace(settings, gradient_checkpointing=step.checkpointing)
        memory.append(make_memory_row(as_chosen, shape, method, sharding, work, gpu_memory, reference))

    for method in get_args(Method):
        verdicts: set[str] = set()
        for sharding, offload in shardings_for(method, hardware.processes):
            # Host memory is slow: it is offered where the GPUs' does not do.
            if offload != "none" and (not gpu_memory or {"fits", "tight"} & verdicts):
                continue
            # A run refuses it (see check_sharding).
            if reference and sharding not in (("none",) if settings.streaming else ("none", "fsdp2")):
                continue
            add(method, sharding, offload)
            if offload == "none":
                verdicts.add(memory[-1].verdict)
            if (sharding, offload) == ("fsdp2", "none") and hardware.nodes > 1 and hardware.gpus_per_node > 1:
                add(method, sharding, offload, hardware.nodes)
    return memory
