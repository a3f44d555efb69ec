"""Time that averaging gradients takes, and what is left of a GPU's speed. Pure arithmetic.

All of it is what the links and the uneven rows decide: NCCL's start-up time, congestion and machines that are slow
now and then are left out, so real figures are lower, the more so the more machines there are. The published
figures in GUIDE show by how much: set to its 95 % on 4 GPUs, the ring alone explains 93 % on 8 and 92 % on 16, where
the guide has 88 % and 80 %.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from unsloth_ddp.data.batch_plan import BatchPlan, arrange

# Scaling efficiency that the guide for several machines publishes, 2 A100s a machine; how it was measured it does not
# say.
GUIDE = {4: 0.95, 8: 0.88, 16: 0.80}
GUIDE_GPUS_A_NODE = 2
# DDP sends gradients in pieces of this size while the backward pass goes on; the last one has nothing to hide behind.
DDP_BUCKET = 25 * 2**20
# Steps that are looked at to see how uneven rows are.
MOST_STEPS = 200


@dataclass(frozen=True)
class Links:
    """Bytes a second: of one machine's network, and of one GPU to the others of its machine (None: not counted)."""

    network: float
    inside: float | None = None


def all_reduce_seconds(size: float, nodes: int, gpus: int, links: Links) -> float:
    """Time to average `size` bytes over `nodes` machines of `gpus` GPUs each.

    A ring of N sends 2 (N - 1) / N of the data over each link. Inside a machine the GPUs first sum their parts (half of
    a ring), then each machine's parts go around the machines, and come back the same way: the machine's network
    carries all of them together.
    """
    inside = 2 * (gpus - 1) / gpus * size / links.inside if links.inside else 0.0
    between = 2 * (nodes - 1) / nodes * size / links.network
    return inside + between


def exposed_seconds(size: float, all_reduce: float, backward: float) -> float:
    """The part of an all-reduce that the GPUs wait for.

    Args:
        size: bytes of gradients.
        all_reduce: seconds for all of them.
        backward: seconds of the backward pass of the last micro-batch, behind which all but the last bucket hide.
    """
    if not size:
        return 0.0
    last = all_reduce * min(1.0, DDP_BUCKET / size)
    return last + max(0.0, all_reduce - last - backward)


def balance(lengths: Sequence[int], per_device: int, accumulation: int, processes: int) -> float | None:
    """Part of the time that the average GPU works while the one with the longest rows does.

    Args:
        lengths: tokens of each row, in the order of an epoch.

    A step is as slow as its slowest process, taken to be the one with the most tokens, padding included. Rows are
    dealt as in a run (batch.arrange). Only full steps count, of many some; None where there is none.
    """
    plan = BatchPlan(per_device, accumulation, processes)
    steps = len(lengths) // plan.global_batch
    if not steps:
        return None
    rows = np.asarray(lengths[: steps * plan.global_batch], dtype=np.int64).reshape(steps, plan.global_batch)
    average = slowest = 0.0
    for step in rows[:: math.ceil(steps / MOST_STEPS)]:
        dealt = arrange(np.arange(len(step)), step, plan, padded=True)
        work = step[dealt].reshape(accumulation, processes, per_device).max(axis=2).sum(axis=0)
        average += work.mean()
        slowest += work.max()
    return float(average / slowest)


def gpu_counts(gpus_per_node: int, most: int = 1024) -> list[int]:
    """1, 2, 4 ... GPUs of one machine, then 1, 2, 4 ... machines, up to `most` GPUs."""
    inside = [2**k for k in range(11) if 2**k < gpus_per_node]
    machines = [gpus_per_node * 2**k for k in range(11) if gpus_per_node * 2**k <= most]
    return [*inside, *machines] or [gpus_per_node]


@dataclass(frozen=True)
class Step:
    """An optimizer step of one GPU.

    Args:
        compute: seconds without communication, with `accumulation` micro-batches.
        backward_share: part of a micro-batch that its backward pass takes.
        gradients: bytes to be averaged.
    """

    compute: float
    accumulation: int
    backward_share: float
    gradients: float


def efficiency(step: Step, nodes: int, gpus: int, links: Links, even: float = 1.0) -> float:
    """Speed of a GPU among `nodes` x `gpus`, relative to one alone; `even` is what uneven rows leave (see balance)."""
    backward = step.compute / step.accumulation * step.backward_share
    all_reduce = all_reduce_seconds(step.gradients, nodes, gpus, links)
    compute = step.compute / even
    return step.compute / (compute + exposed_seconds(step.gradients, all_reduce, backward))


def ring_fit(known: float, nodes: int, others: Sequence[int]) -> list[float]:
    """Efficiency on other numbers of machines, if the ring between machines alone explains `known` on `nodes`."""
    waited = (1 / known - 1) / ((nodes - 1) / nodes)
    return [1 / (1 + waited * (count - 1) / count) for count in others]
