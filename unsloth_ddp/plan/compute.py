"""Compute a plan from the shape of the model, the rows and the hardware: pure arithmetic."""

import dataclasses
from dataclasses import dataclass
from typing import get_args

import numpy as np

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.distributed.precision import AMPERE
from unsloth_ddp.distributed.sharding import Offload, Sharding
from unsloth_ddp.plan.network import Links, StepWork, all_reduce_seconds, balance_efficiency, scaling_efficiency
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
from unsloth_ddp.sizing.micro_batch import RowLengths, in_order
from unsloth_ddp.sizing.shape import ModelShape
from unsloth_ddp.training.shown.mfu import PEAK_FLOPS, peak_flops
from unsloth_ddp.utils.memory_limits import NUMBER_BYTES

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
    """The machines to rent; `gpu_memory` (bytes) and `inside` (bytes per second) are None where not given.

    `capability` is the compute capability of the GPUs, `speed` the measured tokens per second of one alone, and `gpu`
    its name.
    """

    nodes: int
    gpus_per_node: int
    networks: list[float]
    inside: float | None = None
    gpu_memory: float | None = None
    capability: tuple[int, int] = AMPERE
    speed: float | None = None
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
class Duration:
    """The time of the run with DDP over one network.

    Args:
        network: bytes per second.
        all_reduce: seconds to average the gradients of a step.
        efficiency: a GPU's speed relative to one alone.
    """

    network: float
    all_reduce: float
    efficiency: float
    hours: float


@dataclass(frozen=True)
class Plan:
    """A plan with everything that it was made from.

    Args:
        even: efficiency that uneven rows allow (None: less than a full step of rows).
        durations: for each network; none without a measured speed.
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
    even: float | None
    durations: list[Duration]


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
        found = estimate_memory(shape, method, sharding, dataclasses.replace(work, checkpointing=kind))
        if reference:
            found = beside_reference(found, reference, method, sharding, work, stays=settings.streaming)
        verdict = judge_fit(found, gpu_memory) if gpu_memory else "-"
        chosen = not gpu_memory or sharding == "none" or is_chosen(found, sharding, gpu_memory)
        if verdict in ("fits", "unknown", "-") and chosen:
            break
    return MemoryRow(method, sharding, kind, found, verdict, work.offload, work.copies)


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
    asked, gpu_memory = batch, hardware.gpu_memory
    step = choose_step(settings, shape, rows, asked, gpu_memory)
    batch = step.batch
    count = rows.units
    steps = batch.steps(count, settings.num_train_epochs, settings.max_steps)
    tokens_a_step = rows.mean * batch.global_batch if rows.streamed else rows.tokens / batch.steps_per_epoch(count)
    memory: list[MemoryRow] = []

    def add(method: Method, sharding: Sharding, offload: Offload, copies: int = 1) -> None:
        of_method = dataclasses.replace(settings, method=method)
        chosen = choose_step(of_method, shape, rows, asked, gpu_memory, sharding, offload, copies)
        work = make_workload(of_method, rows, chosen.tokens, chosen.batch)
        work = dataclasses.replace(work, offload=offload, copies=copies)
        as_chosen = dataclasses.replace(settings, gradient_checkpointing=chosen.checkpointing)
        memory.append(make_memory_row(as_chosen, shape, method, sharding, work, gpu_memory, reference))

    for method in get_args(Method):
        without: set[str] = set()
        for sharding, offload in shardings_for(method, hardware.processes):
            # Host memory is slow: it is offered where the GPUs' does not do.
            if offload != "none" and (not gpu_memory or {"fits", "tight"} & without):
                continue
            # A run refuses it (see check_sharding).
            if reference and sharding not in (("none",) if settings.streaming else ("none", "fsdp2")):
                continue
            add(method, sharding, offload)
            if offload == "none":
                without.add(memory[-1].verdict)
            if (sharding, offload) == ("fsdp2", "none") and hardware.nodes > 1 and hardware.gpus_per_node > 1:
                add(method, sharding, offload, hardware.nodes)
    beside = np.zeros(count) if rows.pixels is None else np.rint(rows.pixels * shape.tokens_a_pixel)
    even = balance_efficiency(
        in_order(rows.each, settings.seed), batch, in_order(beside.astype(np.int64), settings.seed)
    )
    durations, speed = [], hardware.speed or 0.0
    # Adapters are trained in fp32.
    master_bytes = NUMBER_BYTES[settings.full_weights] if settings.method == "full" else 4
    for rate in hardware.networks if speed else []:
        work = StepWork(
            compute=tokens_a_step / hardware.processes / speed,
            accumulation=batch.accumulation,
            backward_share=shape.backward_share(settings.method, step.checkpointing != "none"),
            gradients=shape.trained(settings.method) * master_bytes,
        )
        link = Links(rate, hardware.inside)
        all_reduce = all_reduce_seconds(work.gradients, hardware.nodes, hardware.gpus_per_node, link)
        efficiency = scaling_efficiency(work, hardware.nodes, hardware.gpus_per_node, link, even or 1.0)
        hours = tokens_a_step * steps / (speed * hardware.processes * efficiency) / 3600
        durations.append(Duration(rate, all_reduce, efficiency, hours))
    return Plan(
        settings, shape, rows, hardware, batch, steps, tokens_a_step, tokens_a_step * steps, step.tokens, step.rung, step.graphs, memory, even, durations
    )  # fmt: skip
