"""Compute a plan from the shape of the model, the rows and the hardware: pure arithmetic."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import get_args

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.batch_plan import BatchPlan
from unsloth_ddp.distributed.precision import AMPERE
from unsloth_ddp.distributed.sharding import Offload, Sharding, unsupported_by_unsloth
from unsloth_ddp.plan.calibration import Calibration, SpeedEstimate, SpeedQuery, estimate_speed, kind_of_rows
from unsloth_ddp.plan.memory import (
    Checkpointing,
    MemoryEstimate,
    Method,
    Workload,
    estimate_memory,
    is_supported,
    judge_fit,
    sharded_bytes,
)
from unsloth_ddp.plan.network import (
    Links,
    StepWork,
    all_reduce_seconds,
    balance_efficiency,
    gpu_counts,
    scaling_efficiency,
    sharded_seconds,
)
from unsloth_ddp.plan.rows import RowLengths, in_order
from unsloth_ddp.plan.shape import ModelShape
from unsloth_ddp.plan.step import (
    NUMBER_BYTES,
    as_loaded,
    backend_of,
    checkpointing_kinds,
    choose_step,
    is_chosen,
    make_workload,
    precision_of,
    unsloth_in_shards,
)
from unsloth_ddp.training.memory_search import divisors, sizes_of
from unsloth_ddp.training.step_choice import StepChoice

# The shardings with parts in host memory that accelerate_configs/ has.
OFFLOADS: tuple[tuple[Sharding, Offload], ...] = (
    ("zero2", "optimizer"), ("zero3", "parameters"), ("fsdp2", "parameters")
)  # fmt: skip


@dataclass(frozen=True)
class Hardware:
    """The machines to rent; `gpu_memory` (bytes) and `inside` (bytes per second) are None where not given.

    `capability` is the compute capability of the GPUs.
    """

    nodes: int
    gpus_per_node: int
    networks: list[float]
    inside: float | None = None
    gpu_memory: float | None = None
    capability: tuple[int, int] = AMPERE

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
class NetworkRow:
    """The communication of a step with sharded weights: bytes of gathered weights and gradients, seconds a network."""

    method: Method
    config: str
    weights: float
    gradients: float
    seconds: list[float]


@dataclass(frozen=True)
class ScaleRow:
    """The efficiency of a number of GPUs.

    Args:
        even: efficiency that uneven rows allow (None: less than a full step of rows).
        all_reduce: seconds per step, for each network.
        same_work: efficiency if each GPU keeps its accumulation, for each network; None without a speed.
        same_batch: efficiency if the global batch stays the same; None also where it does not divide.
        hours: duration of the run with the same global batch, for each network.
    """

    gpus: int
    nodes: int
    even: float | None
    all_reduce: list[float]
    same_work: list[float] | None
    same_batch: list[float] | None
    hours: list[float] | None


@dataclass(frozen=True)
class Plan:
    """The result of planning: everything that the command prints."""

    batch: BatchPlan
    steps: int
    tokens_a_step: float
    tokens: float
    micro_batch: int
    graphs: StepChoice
    memory: list[MemoryRow]
    sharded: list[NetworkRow]
    gradients: dict[Method, float]
    speed: SpeedEstimate | None
    scale: list[ScaleRow]


def make_memory_row(
    settings: Settings, shape: ModelShape, method: Method, sharding: Sharding, work: Workload, gpu_memory: float | None
) -> MemoryRow:
    """Estimate one way to train; gradient_checkpointing auto is the first kind that fits, as in a run."""
    of_method = dataclasses.replace(settings, method=method)
    work = as_loaded(of_method, shape, sharding, work, gpu_memory)
    for kind in checkpointing_kinds(settings, sharding):
        found = estimate_memory(shape, method, sharding, dataclasses.replace(work, checkpointing=kind))
        verdict = judge_fit(found, gpu_memory) if gpu_memory else "-"
        chosen = not gpu_memory or sharding == "none" or is_chosen(found, sharding, gpu_memory)
        if verdict in ("fits", "unknown", "-") and chosen:
            break
    return MemoryRow(method, sharding, kind, found, verdict, work.offload, work.copies)


def make_network_row(shape: ModelShape, row: MemoryRow, work: Workload, hardware: Hardware) -> NetworkRow:
    """Estimate what a step with FSDP2 sends, whose weights are gathered for the forward and the backward pass."""
    weights, gradients = sharded_bytes(shape, row.method, work)
    count, hybrid = work.accumulation, row.copies > 1
    links = [Links(network, hardware.inside) for network in hardware.networks]
    seconds = [
        sharded_seconds(weights, gradients, count, hardware.nodes, hardware.gpus_per_node, link, hybrid=hybrid)
        for link in links
    ]
    return NetworkRow(row.method, row.config, weights * 2 * count, gradients * count, seconds)


def shardings_for(method: Method, processes: int) -> list[tuple[Sharding, Offload]]:
    """Return the shardings that the kit supports for a method on so many GPUs, those with host memory last."""
    plain: list[tuple[Sharding, Offload]] = [(sharding, "none") for sharding in get_args(Sharding)]
    several = [pair for pair in plain if pair[0] == "none" or processes > 1]
    # DeepSpeed works on one GPU too.
    offloading = [pair for pair in OFFLOADS if pair[0] != "fsdp2" or processes > 1]
    return [pair for pair in [*several, *offloading] if is_supported(method, *pair)]


def find_least_memory(settings: Settings, shape: ModelShape, processes: int) -> MemoryRow:
    """Return the way to train that needs least memory, with one token in a micro-batch and all checkpointing."""
    ways = []
    for method in get_args(Method):
        for sharding, offload in shardings_for(method, processes):
            of_method = dataclasses.replace(settings, method=method)
            # Unsloth loads few models in shards.
            in_shards = sharding == "fsdp2" and settings.backend == "auto"
            other = in_shards or unsupported_by_unsloth(of_method, sharding, offload)
            work = Workload(
                tokens=1,
                precision=NUMBER_BYTES[precision_of(settings)],
                master=NUMBER_BYTES[settings.full_weights],
                optimizer=settings.optim,
                checkpointing="torch",
                processes=processes,
                backend="transformers" if other else backend_of(settings),
                offload=offload,
                in_shards=unsloth_in_shards(of_method, shape),
            )
            found = estimate_memory(shape, method, sharding, work)
            ways.append(MemoryRow(method, sharding, "torch", found, "-", offload))
    return min(ways, key=lambda way: way.memory.total)


def make_speed_query(
    settings: Settings, shape: ModelShape, rows: RowLengths, batch: BatchPlan, checkpointing: Checkpointing
) -> SpeedQuery:
    """Describe the run in the terms of a calibration."""
    return SpeedQuery(
        method=settings.method,
        backend=backend_of(settings),
        precision=precision_of(settings),
        gradient_checkpointing=checkpointing,
        rows="packed" if rows.packing is not None else kind_of_rows(rows.mean, settings.max_length),
        tokens_a_micro_batch=batch.per_device * rows.mean,
        flops_a_token=shape.flops_a_token(settings.method),
    )


def make_plan(
    settings: Settings,
    shape: ModelShape,
    rows: RowLengths,
    batch: BatchPlan,
    hardware: Hardware,
    calibration: Calibration | None,
) -> Plan:
    """Compute the plan of a run."""
    asked, gpu_memory = batch, hardware.gpu_memory
    step = choose_step(settings, shape, rows, asked, gpu_memory)
    batch = step.batch
    count = rows.units
    steps = batch.steps(count, settings.num_train_epochs, settings.max_steps)
    tokens_a_step = rows.mean * batch.global_batch if rows.streamed else rows.tokens / batch.steps_per_epoch(count)
    memory: list[MemoryRow] = []
    sharded: list[NetworkRow] = []

    def add(method: Method, sharding: Sharding, offload: Offload, copies: int = 1) -> Workload:
        of_method = dataclasses.replace(settings, method=method)
        chosen = choose_step(of_method, shape, rows, asked, gpu_memory, sharding, offload, copies)
        work = make_workload(of_method, rows, chosen.tokens, hardware.processes, chosen.batch.accumulation)
        work = dataclasses.replace(work, offload=offload, copies=copies)
        as_chosen = dataclasses.replace(settings, gradient_checkpointing=chosen.checkpointing)
        memory.append(make_memory_row(as_chosen, shape, method, sharding, work, gpu_memory))
        return work

    for method in get_args(Method):
        without: set[str] = set()
        for sharding, offload in shardings_for(method, hardware.processes):
            # Host memory is slow: it is offered where the GPUs' does not do.
            if offload != "none" and (not gpu_memory or {"fits", "tight"} & without):
                continue
            work = add(method, sharding, offload)
            if offload == "none":
                without.add(memory[-1].verdict)
            if (sharding, offload) == ("fsdp2", "none") and hardware.nodes > 1:
                sharded.append(make_network_row(shape, memory[-1], work, hardware))
                if hardware.gpus_per_node > 1:
                    work = add(method, sharding, offload, hardware.nodes)
                    sharded.append(make_network_row(shape, memory[-1], work, hardware))
    wanted = make_speed_query(settings, shape, rows, batch, step.checkpointing)
    speed = estimate_speed(calibration, wanted) if calibration else None
    gradients: dict[Method, float] = {m: count_gradient_bytes(shape, m, settings) for m in get_args(Method)}
    share = shape.backward_share(settings.method, step.checkpointing != "none")
    tokens = tokens_a_step * steps
    plan = Plan(batch, steps, tokens_a_step, tokens, step.tokens, step.graphs, memory, sharded, gradients, speed, [])
    ordered = in_order(rows.each, settings.seed)
    chosen = len(sizes_of(settings, asked)) > 1
    for gpus in gpu_counts(hardware.gpus_per_node):
        plan.scale.append(
            make_scale_row(plan, gpus, hardware, gradients[settings.method], share, list(ordered), chosen)
        )
    return plan


def count_gradient_bytes(shape: ModelShape, method: Method, settings: Settings) -> float:
    """Return the bytes that DDP averages in a step: gradients have the type of the trained weights."""
    return shape.trained(method) * (NUMBER_BYTES[settings.full_weights] if method == "full" else 4)


def make_scale_row(
    plan: Plan,
    gpus: int,
    hardware: Hardware,
    gradients: float,
    backward_share: float,
    ordered: list[int],
    micro_batch_is_chosen: bool,
) -> ScaleRow:
    """Estimate the efficiency of a number of GPUs; a smaller share of the global batch may mean a smaller micro-batch."""
    nodes, inside = max(1, gpus // hardware.gpus_per_node), min(gpus, hardware.gpus_per_node)
    links = [Links(network, hardware.inside) for network in hardware.networks]
    all_reduce = [all_reduce_seconds(gradients, nodes, inside, link) for link in links]
    per_device, accumulation = plan.batch.per_device, plan.batch.accumulation
    even = balance_efficiency(ordered, per_device, accumulation, gpus)
    if plan.speed is None:
        return ScaleRow(gpus, nodes, even, all_reduce, None, None, None)

    def efficiencies(at_once: int, steps: int, left: float) -> list[float]:
        tokens = plan.tokens_a_step / plan.batch.global_batch * at_once * steps
        step = StepWork(tokens / plan.speed.tokens_per_second, steps, backward_share, gradients)  # type: ignore[union-attr]
        return [scaling_efficiency(step, nodes, inside, link, left) for link in links]

    same_batch = hours = None
    share, left_over = divmod(plan.batch.global_batch, gpus)
    at_once = per_device
    if micro_batch_is_chosen and share:
        at_once = max(size for size in divisors(share) if size <= per_device)
    if not left_over and share % at_once == 0:
        steps = share // at_once
        same_batch = efficiencies(at_once, steps, balance_efficiency(ordered, at_once, steps, gpus) or 1.0)
        hours = [plan.tokens / (plan.speed.tokens_per_second * gpus * e) / 3600 for e in same_batch]
    same_work = efficiencies(per_device, accumulation, even or 1.0)
    return ScaleRow(gpus, nodes, even, all_reduce, same_work, same_batch, hours)
