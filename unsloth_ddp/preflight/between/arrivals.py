"""Check which processes arrived at the rendezvous: pure functions of what each said about itself."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from unsloth_ddp.preflight.checks import Check, name_nodes
from unsloth_ddp.utils.units import counted


@dataclass(frozen=True)
class Arrival:
    """The rank, host and size of the job that a process reports on arrival."""

    rank: int
    node_rank: int
    host: str
    nodes: int
    world_size: int
    local_world_size: int


def check_arrivals(
    world_size: int, nodes: int, present: Sequence[Arrival], waited: float, address: str, in_time: bool = False
) -> Check:
    """Check that every rank arrived once and belongs to the same job; a failure names the ones that do not.

    Args:
        world_size, nodes: the size of the job according to rank 0.
        present: every process that arrived, those with an impossible rank included.
        waited: seconds of waiting.
        address: host:port of the rendezvous.
        in_time: as many processes arrived as the job has, so the wait ended early.
    """
    per_node = max(1, world_size // nodes)
    problems = _contradictions(world_size, nodes, per_node, present)
    problems += _absences(
        world_size, nodes, per_node, {arrival.rank for arrival in present}, waited, address, in_time=in_time
    )
    values: dict[int, str] = dict.fromkeys(range(nodes), "did not arrive")
    for arrival in present:
        if arrival.rank % per_node == 0 or arrival.node_rank not in values:
            earlier = values.get(arrival.node_rank, "did not arrive")
            values[arrival.node_rank] = arrival.host if earlier == "did not arrive" else f"{earlier} and {arrival.host}"
    return Check(
        "arrived", dict(sorted(values.items())), "failure" if problems else "ok", "\n".join(dict.fromkeys(problems))
    )


def _contradictions(world_size: int, nodes: int, per_node: int, present: Sequence[Arrival]) -> list[str]:
    """Return a sentence for each rank that came twice, and for each process that belongs to a job of another shape."""
    problems = []
    by_rank: dict[int, list[Arrival]] = {}
    for arrival in present:
        by_rank.setdefault(arrival.rank, []).append(arrival)
    for rank, several in sorted(by_rank.items()):
        if len(several) > 1 and rank % per_node == 0:
            hosts = " and ".join(sorted(arrival.host for arrival in several))
            problems.append(
                f"Node rank {several[0].node_rank} was taken {len(several)} times, by {hosts}: "
                "give every node a NODE_RANK of its own."
            )
    for arrival in present:
        if arrival.nodes != nodes:
            problems.append(
                f"{arrival.host} has NNODES {arrival.nodes}, node 0 has {nodes}; set the same on every node."
            )
        elif arrival.world_size != world_size or arrival.local_world_size != per_node:
            problems.append(
                f"{arrival.host} starts {counted(arrival.local_world_size, 'process')} of {arrival.world_size}, but "
                f"node 0 starts {per_node} of {world_size}; start the same number on every node."
            )
        elif arrival.rank >= world_size:
            problems.append(
                f"{arrival.host} says it is node {arrival.node_rank} of {nodes}, but ranks go from 0 to {nodes - 1}; "
                "correct its NODE_RANK."
            )
    return problems


def _absences(
    world_size: int, nodes: int, per_node: int, ranks: Collection[int], waited: float, address: str, *, in_time: bool
) -> list[str]:
    """Return a sentence on whole nodes that are missing, and one on ranks of other nodes."""
    problems = []
    missing = [rank for rank in range(world_size) if rank not in ranks]
    whole = [n for n in range(nodes) if all(r in missing for r in range(n * per_node, (n + 1) * per_node))]
    parts = [rank for rank in missing if rank // per_node not in whole]
    if whole and in_time:
        problems.append(f"So {name_nodes(whole)} {'is' if len(whole) == 1 else 'are'} missing.")
    elif whole:
        problems.append(
            f"{name_nodes(whole).capitalize()} did not arrive at {address} within {waited:.0f} s: start preflight "
            "there too (or raise --timeout), check NODE_RANK, MASTER_ADDR and MASTER_PORT there, and open the firewall "
            "for MASTER_PORT."
        )
    if parts:
        named, whose = ("Rank", "its") if len(parts) == 1 else ("Ranks", "their")
        listed = ", ".join(map(str, parts))
        problems.append(f"{named} {listed} did not arrive within {waited:.0f} s; look at {whose} output.")
    return problems


def missing_answers(missing: Sequence[int], hosts: Mapping[int, str], seconds: float) -> Check:
    """Return the row for nodes that arrived but did not send their report."""
    values = dict.fromkeys(missing, "no answer")
    named = ", ".join(f"node {node} ({hosts.get(node, 'host not known')})" for node in missing)
    remedy = f"{named} arrived, but sent no report within {seconds:.0f} s: look at its output, disks and load."
    return Check("answers: report", values, "failure", remedy)
