"""Estimate the time to average gradients and the scaling efficiency: pure arithmetic.

Only link bandwidth and uneven rows are modelled. NCCL's start-up time, congestion and occasionally slow machines are
left out, so real figures are lower, and more so with more machines (docs/plan.md, Time).
"""

import math
from dataclasses import dataclass

import numpy as np

from unsloth_ddp.data.order.batch_plan import BatchPlan, arrange

# DDP sends gradients in buckets of this size during the backward pass; nothing overlaps with the last one.
DDP_BUCKET = 25 * 2**20
# Number of steps sampled to see how uneven rows are.
MOST_STEPS = 200


@dataclass(frozen=True)
class Links:
    """Bandwidths in bytes per second: a machine's network, and a GPU to the others of its machine (None: not counted)."""

    network: float
    inside: float | None = None


def all_reduce_seconds(size: float, nodes: int, gpus: int, links: Links) -> float:
    """Return the seconds to average `size` bytes over `nodes` machines of `gpus` GPUs each.

    A ring of N sends 2 (N - 1) / N of the data over each link. The GPUs of a machine first reduce among themselves (half
    of a ring), then the machines reduce over the network, then the result is gathered inside each machine. A machine's
    network carries the parts of all its GPUs.
    """
    inside = 2 * (gpus - 1) / gpus * size / links.inside if links.inside else 0.0
    between = 2 * (nodes - 1) / nodes * size / links.network
    return inside + between


def exposed_seconds(size: float, all_reduce: float, backward: float) -> float:
    """Return the seconds of an all-reduce that do not overlap with the backward pass.

    Args:
        size: bytes of gradients.
        all_reduce: seconds for all of them.
        backward: seconds of the backward pass of the last micro-batch, which overlaps with all but the last bucket.
    """
    if not size:
        return 0.0
    last = all_reduce * min(1.0, DDP_BUCKET / size)
    return last + max(0.0, all_reduce - last - backward)


def balance_efficiency(lengths: np.ndarray, plan: BatchPlan, beside: np.ndarray) -> float | None:
    """Return the efficiency that uneven rows allow: the mean work of a GPU over the work of the slowest.

    A step takes as long as its process with the most tokens, padding and the work of images (`beside`) included. Rows are dealt as in a run
    (batch_plan.arrange). Only full steps count, and only a sample of many; None without a full step.
    """
    steps = len(lengths) // plan.global_batch
    if not steps:
        return None
    shape = (steps, plan.global_batch)
    rows, images = (values[: steps * plan.global_batch].reshape(shape) for values in (lengths, beside))
    average = slowest = 0.0
    for number in range(0, steps, math.ceil(steps / MOST_STEPS)):
        step, extra = rows[number], images[number]
        dealt = arrange(np.arange(len(step)), step, plan, padded=True, beside=extra).reshape(
            plan.accumulation, plan.processes, plan.per_device
        )
        work = (step[dealt].max(axis=2) * plan.per_device + extra[dealt].sum(axis=2)).sum(axis=0)
        average += work.mean()
        slowest += work.max()
    return float(average / slowest)


@dataclass(frozen=True)
class StepWork:
    """The work of one GPU in an optimizer step.

    Args:
        compute: seconds without communication, for `accumulation` micro-batches.
        backward_share: share of a micro-batch's time in its backward pass.
        gradients: bytes to average.
    """

    compute: float
    accumulation: int
    backward_share: float
    gradients: float


def scaling_efficiency(step: StepWork, nodes: int, gpus: int, links: Links, even: float = 1.0) -> float:
    """Return the speed of one of `nodes` x `gpus` GPUs relative to one alone; `even` is from balance_efficiency."""
    backward = step.compute / step.accumulation * step.backward_share
    all_reduce = all_reduce_seconds(step.gradients, nodes, gpus, links)
    compute = step.compute / even
    return step.compute / (compute + exposed_seconds(step.gradients, all_reduce, backward))
