"""Check the measured bandwidth between ranks, and report why none was measured: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unsloth_ddp.preflight.checks import Check, Verdict
from unsloth_ddp.preflight.network import LEAST_GBIT
from unsloth_ddp.utils.units import shown_bytes, shown_seconds

RECOMMENDED_GBIT = 100


@dataclass(frozen=True)
class CollectiveTiming:
    """One measured collective: `scope` is inside, between or all; seconds are the slowest rank's mean."""

    scope: str
    node: int
    operation: str
    ranks: int
    bytes: int
    seconds: float
    right: bool = True

    @property
    def gbit(self) -> float:
        """Bus bandwidth in Gbit/s: the load of each link, comparable for any number of ranks.

        Ring all-reduce sends 2 (n - 1) / n of the buffer over every link, broadcast all of it
        (nccl-tests, doc/PERFORMANCE.md).
        """
        factor = 2 * (self.ranks - 1) / self.ranks if self.operation == "all_reduce" else 1.0
        return factor * self.bytes * 8 / self.seconds / 1e9 if self.seconds > 0 else 0.0


SCOPES = {"inside": "inside a node", "between": "between nodes (one rank each)", "all": "all ranks"}


def check_bandwidth(
    timings: Sequence[CollectiveTiming], backend: str, fast_ports: bool, nodes: Sequence[int]
) -> list[Check]:
    """Return one row per scope and operation: time and bus bandwidth of each size, judged between nodes only.

    Args:
        timings: for the scope inside, one set per node; for the others one rank's, and every wrong result.
        fast_ports: InfiniBand or RoCE ports are active on some node.
        nodes: all nodes.
    """
    rows = []
    for scope, where in SCOPES.items():
        for operation in ("all_reduce", "broadcast"):
            found = [t for t in timings if t.scope == scope and t.operation == operation]
            if not found:
                continue
            inside = {node: _speeds([t for t in found if t.node == node]) for node in sorted({t.node for t in found})}
            shown = inside if scope == "inside" else dict.fromkeys(nodes, _speeds(found))
            verdict: Verdict = "ok"
            remedy = ""
            # All ranks together can use several network cards, so the best figure between nodes counts.
            peers = [t for t in timings if t.scope in ("between", "all") and t.operation == operation]
            best = max((t.gbit for t in peers), default=0.0)
            if scope == "between" and best < LEAST_GBIT:
                verdict = "warning"
                remedy = _slow_network(best, backend, fast_ports)
            elif scope == "between" and best < RECOMMENDED_GBIT:
                remedy = f"Sufficient; {RECOMMENDED_GBIT} Gbit/s are recommended."
            rows.append(Check(f"{operation.replace('_', '-')}, {where}", shown, verdict, remedy))
    wrong = [t for t in timings if not t.right]
    if wrong:
        places = {
            t.node: f"{t.operation} of {shown_bytes(t.bytes)} {SCOPES[t.scope]} gave wrong numbers" for t in wrong
        }
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


def _slow_network(gbit: float, backend: str, fast_ports: bool) -> str:
    way = (
        "InfiniBand or RoCE ports are active: unset NCCL_IB_DISABLE, try NCCL_IB_GID_INDEX=3 for RoCE, and look for NET/IB "
        "in the output of NCCL_DEBUG=INFO. "
        if fast_ports and backend == "nccl"
        else "Set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the fastest interface on every node. "
    )
    return (
        f"{_rate(gbit)} between nodes is below the {LEAST_GBIT} Gbit/s that several nodes need. {way}Until then use LoRA or "
        "QLoRA with DDP or fsdp2_hybrid.yaml (small gradients) and more gradient accumulation, not ZeRO-3, FSDP2 or full parameters; raise "
        "--ddp_timeout."
    )


def not_measured(reason: str, remedy: str, nodes: Sequence[int], verdict: Verdict) -> Check:
    """Return the row that says why no bandwidth was measured."""
    return Check("speed", dict.fromkeys(nodes, f"not measured: {reason}"), verdict, remedy)


def failed_group(backend: str, stuck: Mapping[int, str], node_of: Mapping[int, int], seconds: float) -> Check:
    """Return the row for a process group that did not form, or a collective that failed or hung.

    Args:
        stuck: the error of each rank that did not finish; "" when it did not end in time.
    """
    values: dict[int, str] = {}
    for rank, error in sorted(stuck.items()):
        text = f"rank {rank}: {' '.join(error.split())[:300] or f'did not end within {seconds:.0f} s'}"
        values[node_of[rank]] = f"{values[node_of[rank]]}; {text}" if node_of[rank] in values else text
    if backend == "nccl":
        remedy = (
            "Set NCCL_SOCKET_IFNAME to the interface that the nodes share; on InfiniBand or RoCE try NCCL_IB_GID_INDEX=3, then "
            "NCCL_IB_DISABLE=1; inside a node try NCCL_P2P_DISABLE=1; open the firewall between the nodes (NCCL chooses "
            "its ports); NCCL_DEBUG=INFO shows where it stops."
        )
    else:
        remedy = (
            "Set GLOO_SOCKET_IFNAME to the interface that the nodes share, and open the firewall between the nodes (gloo "
            "chooses its ports)."
        )
    return Check(f"process group ({backend})", values, "failure", remedy)


def find_blockers(checks: Sequence[Check]) -> list[str]:
    """Return the failures with which a process group would hang or its measurement mean nothing."""
    names = {"arrived", "host name", "master address", "network interface"}
    names |= {"GPUs", "same GPUs", "one GPU a rank", "driver and CUDA"}
    blocking = [c for c in checks if c.verdict == "failure" and (c.name in names or c.name.startswith("answers: "))]
    different = [c for c in checks if c.verdict == "failure" and c.name in ("version of torch", "version of nccl")]
    return [c.name for c in (*blocking, *different)]
