"""Time all-reduce and broadcast inside each node, between nodes and over all ranks, and verify their results.

The backend is NCCL on GPUs and gloo on CPUs. A gloo group is formed on GPU nodes too, because the kit coordinates its
processes over gloo.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from unsloth_ddp.distributed.rendezvous import listen_on_loopback
from unsloth_ddp.preflight.bandwidth import CollectiveTiming
from unsloth_ddp.preflight.process_info import ProcessInfo
from unsloth_ddp.utils.units import KIB, MIB

SIZES = {"gloo": (64 * KIB, MIB, 16 * MIB), "nccl": (64 * KIB, MIB, 16 * MIB, 128 * MIB, 512 * MIB)}
# Seconds of measurement for one size and operation, and the expected seconds above which a size is left out.
MEASURED_SECONDS = 0.25
TOO_LONG_SECONDS = 3.0
MOST_TURNS = 20
# Gloo raises at its time limit. NCCL's watchdog ends the process instead, so run.MEASURE_SECONDS has to come first.
GLOO_SECONDS = 60
NCCL_SECONDS = 3600


class CollectiveBenchmark:
    """One process's part in the measurement; `phase` names the backend in use, for the report of a hang."""

    def __init__(self, process: ProcessInfo, backend: str) -> None:
        self.process = process
        self.backend = backend
        self.phase = "gloo"

    def run(self, store: Any) -> list[CollectiveTiming]:
        """Form the groups and measure; every rank has to call this, and it may hang.

        Raises:
            Exception: torch.distributed's own, when a group does not form or a collective fails.
        """
        import torch
        import torch.distributed as dist

        ranks = self.process.ranks
        if self.process.nodes == 1:
            listen_on_loopback(os.environ)
        seconds = NCCL_SECONDS if self.backend == "nccl" else GLOO_SECONDS
        device = torch.device("cuda", ranks.local_rank) if self.backend == "nccl" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "gloo", store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=timedelta(seconds=GLOO_SECONDS)
        )
        # Gloo connects at its first collective.
        dist.all_reduce(torch.ones(1))
        self.phase = self.backend
        timings = []
        for scope, members in scopes(ranks.world_size, ranks.local_world_size):
            groups = [
                dist.new_group(group, backend=self.backend, timeout=timedelta(seconds=seconds)) for group in members
            ]
            for group, own in zip(groups, members, strict=True):
                if ranks.rank in own:
                    timings += self._measure(scope, group, own, device)
            # Groups take turns, so that none slows another down.
            dist.all_reduce(torch.ones(1))
        del groups
        dist.destroy_process_group()
        return timings

    def _measure(self, scope: str, group: Any, members: Sequence[int], device: Any) -> list[CollectiveTiming]:
        timings = []
        for operation in ("all_reduce", "broadcast"):
            before = 0.0
            largest = 0
            for size in SIZES[self.backend]:
                if largest and before * size / largest > TOO_LONG_SECONDS:
                    break
                seconds, right = self._time(operation, size, group, members, device)
                timings.append(
                    CollectiveTiming(scope, self.process.node_rank, operation, len(members), size, seconds, right)
                )
                before, largest = seconds, size
        return timings

    def _time(self, operation: str, size: int, group: Any, members: Sequence[int], device: Any) -> tuple[float, bool]:
        """Return the slowest rank's mean seconds, equal on all ranks, and whether this rank's result was right."""
        import torch
        import torch.distributed as dist

        # Small whole numbers, so that sums over a thousand ranks are exact.
        pattern = (torch.arange(size // 4, device=device, dtype=torch.int32) % 17).float()
        own = members.index(self.process.ranks.rank) + 1
        buffer = pattern * own

        def once() -> None:
            if operation == "all_reduce":
                dist.all_reduce(buffer, group=group)
            else:
                dist.broadcast(buffer, src=members[0], group=group)

        def slowest(seconds: float) -> float:
            agreed = torch.tensor([seconds], device=device, dtype=torch.float32)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
            return float(agreed.item())

        def timed(turns: int) -> float:
            slowest(0.0)
            began = time.perf_counter()
            for _ in range(turns):
                once()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return slowest(time.perf_counter() - began) / turns

        # The first turn also connects, and its result is known.
        first = timed(1)
        total = sum(range(1, len(members) + 1)) if operation == "all_reduce" else 1
        right = bool(torch.equal(buffer, pattern * total))
        if first < TOO_LONG_SECONDS / 4:
            buffer.zero_()
            first = timed(1)
        turns = max(1, min(MOST_TURNS, int(MEASURED_SECONDS / max(first, 1e-6))))
        return (timed(turns) if turns > 1 else first), right


def scopes(world_size: int, per_node: int) -> list[tuple[str, list[list[int]]]]:
    """Return each scope to measure with its groups of ranks; every rank takes part in forming every group."""
    nodes = world_size // per_node
    found: list[tuple[str, list[list[int]]]] = []
    if per_node > 1:
        found.append(("inside", [list(range(n * per_node, (n + 1) * per_node)) for n in range(nodes)]))
    if nodes > 1:
        found.append(("between", [list(range(0, world_size, per_node))]))
    if nodes > 1 and per_node > 1:
        found.append(("all", [list(range(world_size))]))
    return found
