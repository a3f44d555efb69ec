"""Time all-reduce inside each node, between nodes and over all ranks, verify its result, and judge the bandwidth.

The backend is NCCL on GPUs and gloo on CPUs. A gloo group is formed on GPU nodes too, because the kit coordinates its
processes over gloo.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from unsloth_ddp.distributed.rendezvous import listen_on_loopback
from unsloth_ddp.preflight.checks import Check, Verdict
from unsloth_ddp.preflight.job import ProcessInfo
from unsloth_ddp.utils.errors import one_line
from unsloth_ddp.utils.units import KIB, MIB, shown_bytes, shown_seconds

LEAST_GBIT, RECOMMENDED_GBIT = 10, 100
SIZES = {"gloo": (64 * KIB, MIB, 16 * MIB), "nccl": (64 * KIB, MIB, 16 * MIB, 128 * MIB, 512 * MIB)}
# Seconds of measurement for one size and operation, and the expected seconds above which a size is left out.
MEASURED_SECONDS = 0.25
TOO_LONG_SECONDS = 3.0
MOST_TURNS = 20
# Gloo raises at its time limit. NCCL's watchdog ends the process instead, so run.MEASURE_SECONDS has to come first.
GLOO_SECONDS = 60
NCCL_SECONDS = 3600


@dataclass(frozen=True)
class CollectiveTiming:
    """One measured all-reduce: `scope` is inside, between or all; seconds are the slowest rank's mean."""

    scope: str
    node: int
    ranks: int
    bytes: int
    seconds: float
    right: bool = True

    @property
    def gbit(self) -> float:
        """Bus bandwidth in Gbit/s: the load of each link, comparable for any number of ranks.

        A ring sends 2 (n - 1) / n of the buffer over every link (nccl-tests, doc/PERFORMANCE.md).
        """
        factor = 2 * (self.ranks - 1) / self.ranks
        return factor * self.bytes * 8 / self.seconds / 1e9 if self.seconds > 0 else 0.0


SCOPES = {"inside": "inside a node", "between": "between nodes (one rank each)", "all": "all ranks"}


def check_bandwidth(timings: Sequence[CollectiveTiming], backend: str, nodes: Sequence[int]) -> list[Check]:
    """Return one row per scope: time and bus bandwidth of each size, judged between nodes only.

    Args:
        timings: for the scope inside, one set per node; for the others one rank's, and every wrong result.
        nodes: all nodes.
    """
    rows = []
    # All ranks together can use several network cards, so the best figure between nodes counts.
    best = max((t.gbit for t in timings if t.scope in ("between", "all")), default=0.0)
    for scope, where in SCOPES.items():
        of_scope = [t for t in timings if t.scope == scope]
        if not of_scope:
            continue
        inside = {node: _speeds([t for t in of_scope if t.node == node]) for node in sorted({t.node for t in of_scope})}
        shown = inside if scope == "inside" else dict.fromkeys(nodes, _speeds(of_scope))
        verdict: Verdict = "ok"
        remedy = ""
        if scope == "between" and best < LEAST_GBIT:
            verdict = "warning"
            remedy = (
                f"{_rate(best)} between nodes is below the {LEAST_GBIT} Gbit/s that several nodes need. Set "
                "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the fastest interface on every node; where InfiniBand or "
                "RoCE ports are active unset NCCL_IB_DISABLE, try NCCL_IB_GID_INDEX=3 for RoCE, and look for NET/IB in "
                "the output of NCCL_DEBUG=INFO. Until then use LoRA or QLoRA with DDP or fsdp2_hybrid.yaml (small "
                "gradients) and more gradient accumulation, not ZeRO-3, FSDP2 or full parameters; raise --ddp_timeout."
            )
        elif scope == "between" and best < RECOMMENDED_GBIT:
            remedy = f"Sufficient; {RECOMMENDED_GBIT} Gbit/s are recommended."
        rows.append(Check(f"all-reduce, {where}", shown, verdict, remedy))
    wrong = [t for t in timings if not t.right]
    if wrong:
        places = {t.node: f"all-reduce of {shown_bytes(t.bytes)} {SCOPES[t.scope]} gave wrong numbers" for t in wrong}
        remedy = "Data was corrupted between GPUs or nodes: try NCCL_P2P_DISABLE=1, check IOMMU, cables and drivers."
        rows.append(Check("sums are right", places, "failure", remedy))
    elif timings:
        rows.append(Check("sums are right", dict.fromkeys(nodes, f"all ({backend})")))
    return rows


def _speeds(timings: Sequence[CollectiveTiming]) -> str:
    return ", ".join(
        f"{shown_bytes(t.bytes)} {shown_seconds(t.seconds)} {_rate(t.gbit)}"
        for t in sorted(timings, key=lambda t: t.bytes)
    )


def _rate(gbit: float) -> str:
    return f"{gbit:.3g} Gbit/s" if gbit >= 0.1 else f"{gbit * 1000:.3g} Mbit/s"


def not_measured(cause: str, remedy: str, nodes: Sequence[int], verdict: Verdict) -> Check:
    """Return the row that says why no bandwidth was measured."""
    return Check("speed", dict.fromkeys(nodes, f"not measured: {cause}"), verdict, remedy)


def failed_group(backend: str, stuck: Mapping[int, str], node_of: Mapping[int, int], seconds: float) -> Check:
    """Return the row for a process group that did not form, or a collective that failed or hung.

    Args:
        stuck: the error of each rank that did not finish; "" when it did not end in time.
    """
    values: dict[int, str] = {}
    for rank, error in sorted(stuck.items()):
        text = f"rank {rank}: {one_line(error, 600) or f'did not end within {seconds:.0f} s'}"
        values[node_of[rank]] = f"{values[node_of[rank]]}; {text}" if node_of[rank] in values else text
    remedy = (
        f"Set {backend.upper()}_SOCKET_IFNAME to the interface that the nodes share, and open the firewall between the "
        f"nodes ({backend} chooses its ports)."
    )
    if backend == "nccl":
        remedy += (
            " On InfiniBand or RoCE try NCCL_IB_GID_INDEX=3, then NCCL_IB_DISABLE=1; inside a node try "
            "NCCL_P2P_DISABLE=1; NCCL_DEBUG=INFO shows where it stops."
        )
    return Check(f"process group ({backend})", values, "failure", remedy)


def find_blockers(checks: Sequence[Check]) -> list[str]:
    """Return the failures with which a process group would hang or its measurement mean nothing."""
    names = {"arrived", "host name", "master address", "network interface", "GPUs", "same GPUs"}
    names |= {"version of torch", "version of nccl"}
    failed = [check.name for check in checks if check.verdict == "failure"]
    return [name for name in failed if name in names or name.startswith("answers: ")]


# ---- the measurement ----


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
        if self.process.ranks.nodes == 1:
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
            for group, group_ranks in zip(groups, members, strict=True):
                if ranks.rank in group_ranks:
                    timings += self._measure(scope, group, group_ranks, device)
            # Groups take turns, so that none slows another down.
            dist.all_reduce(torch.ones(1))
        del groups
        dist.destroy_process_group()
        return timings

    def _measure(self, scope: str, group: Any, members: Sequence[int], device: Any) -> list[CollectiveTiming]:
        timings: list[CollectiveTiming] = []
        for size in SIZES[self.backend]:
            if timings and timings[-1].seconds * size / timings[-1].bytes > TOO_LONG_SECONDS:
                break
            seconds, right = self._time(size, group, members, device)
            timings.append(CollectiveTiming(scope, self.process.ranks.node_rank, len(members), size, seconds, right))
        return timings

    def _time(self, size: int, group: Any, members: Sequence[int], device: Any) -> tuple[float, bool]:
        """Return the slowest rank's mean seconds, equal on all ranks, and whether this rank's result was right."""
        import torch
        import torch.distributed as dist

        # Small whole numbers, so that sums over a thousand ranks are exact.
        pattern = (torch.arange(size // 4, device=device, dtype=torch.int32) % 17).float()
        factor = members.index(self.process.ranks.rank) + 1
        buffer = pattern * factor

        def slowest(seconds: float) -> float:
            agreed = torch.tensor([seconds], device=device, dtype=torch.float32)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
            return float(agreed.item())

        def timed(turns: int) -> float:
            slowest(0.0)
            began = time.perf_counter()
            for _ in range(turns):
                dist.all_reduce(buffer, group=group)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return slowest(time.perf_counter() - began) / turns

        # The first turn also connects, and its result is known.
        first = timed(1)
        right = bool(torch.equal(buffer, pattern * sum(range(1, len(members) + 1))))
        if first < TOO_LONG_SECONDS / 4:
            buffer.zero_()
            first = timed(1)
        turns = max(1, min(MOST_TURNS, int(MEASURED_SECONDS / max(first, 1e-6))))
        return (timed(turns) if turns > 1 else first), right


def scopes(world_size: int, per_node: int) -> list[tuple[str, list[list[int]]]]:
    """Return each scope to measure with its groups of ranks; every rank takes part in forming every group."""
    nodes = world_size // per_node
    measured: list[tuple[str, list[list[int]]]] = []
    if per_node > 1:
        measured.append(("inside", [list(range(n * per_node, (n + 1) * per_node)) for n in range(nodes)]))
    if nodes > 1:
        measured.append(("between", [list(range(0, world_size, per_node))]))
    if nodes > 1 and per_node > 1:
        measured.append(("all", [list(range(world_size))]))
    return measured
