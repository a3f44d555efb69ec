"""Verdicts on what one node sees by itself: pure functions from plain values to a Check with its remedy.

Its clock, disks, memory and GPUs are judged in machine.py, what several nodes have to agree on in compare.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unsloth_ddp.preflight.checks import Check, Verdict

DEFAULT_PORT = 6001
LEAST_GBIT = 10


# ---- the environment ----


def environment(node: int, environ: Mapping[str, str], launched: bool) -> Check:
    """Whether the variables that describe the job are there, are numbers, and do not contradict each other."""
    problems = launcher_problems(environ) if launched else node_problems(environ)
    names: tuple[str, ...] = ("NNODES", "NODE_RANK", "GPUS_PER_NODE", "MASTER_ADDR", "MASTER_PORT")
    if launched:
        names = (*names, "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    shown = ", ".join(f"{name}={environ[name]}" for name in names if environ.get(name)) or "none set: one node"
    verdict: Verdict = "failure" if problems else "ok"
    elsewhere = environ.get("SLURM_NNODES") or environ.get("SLURM_JOB_NUM_NODES") or ""
    if not problems and not launched and not environ.get("NNODES") and elsewhere.isdigit() and int(elsewhere) > 1:
        problems = [f"Slurm gave this job {elsewhere} nodes, but NNODES is not set, so only this one is checked."]
        verdict = "warning"
    return Check("environment", {node: shown}, verdict, " ".join(problems))


def node_problems(environ: Mapping[str, str]) -> list[str]:
    """What is wrong with the variables that a user sets on each node, one sentence each."""
    problems = _not_numbers(environ, ("NNODES", "GPUS_PER_NODE", "MASTER_PORT"), least=1)
    problems += _not_numbers(environ, ("NODE_RANK",), least=0)
    if problems:
        return problems
    nodes, rank = int(environ.get("NNODES") or 1), environ.get("NODE_RANK")
    if nodes > 1:
        for name in ("NODE_RANK", "MASTER_ADDR"):
            if not environ.get(name):
                problems.append(f"NNODES is {nodes}, but {name} is not set on this node; set it.")
    elif rank and int(rank) > 0 and not environ.get("NNODES"):
        problems.append(f"NODE_RANK is {rank}, but NNODES is not set; set it to the number of nodes.")
    if int(environ.get("MASTER_PORT") or DEFAULT_PORT) > 65535:
        problems.append(f"MASTER_PORT is {environ['MASTER_PORT']}, but ports end at 65535; choose another.")
    return problems


def launcher_problems(environ: Mapping[str, str]) -> list[str]:
    """What is wrong with a launcher's variables, and with the user's beside them, one sentence each."""
    numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    missing = [name for name in numbers if not environ.get(name)]
    if missing:
        return [f"{', '.join(missing)} not set beside RANK and WORLD_SIZE; start with accelerate launch or torchrun."]
    problems = _not_numbers(environ, ("WORLD_SIZE", "LOCAL_WORLD_SIZE"), least=1)
    problems += _not_numbers(environ, ("RANK", "LOCAL_RANK", "NODE_RANK"), least=0)
    problems += _not_numbers(environ, ("NNODES", "GPUS_PER_NODE", "MASTER_PORT"), least=1)
    if problems:
        return problems
    rank, world, local_rank, local_world = (int(environ[name]) for name in numbers)
    if rank >= world or local_rank >= local_world or local_world > world:
        problems.append(
            f"RANK {rank} of WORLD_SIZE {world} and LOCAL_RANK {local_rank} of LOCAL_WORLD_SIZE {local_world} "
            "contradict each other; start with accelerate launch or torchrun."
        )
    if world % local_world:
        problems.append(
            f"{local_world} processes on this node do not divide {world} in all; start the same number on every node."
        )
    if world > 1:
        problems += [
            f"{name} is not set by the launcher." for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)
        ]
    for name, found, meaning in (
        ("NNODES", world // local_world, "the launcher started"),
        ("NODE_RANK", rank // local_world, "to the launcher this is"),
        ("GPUS_PER_NODE", local_world, "processes on this node are"),
    ):
        if environ.get(name) and int(environ[name]) != found:
            problems.append(f"{name} is {environ[name]}, but {meaning} {found}; give the launcher the same number.")
    return problems


def _not_numbers(environ: Mapping[str, str], names: Sequence[str], least: int) -> list[str]:
    return [
        f"{name} is {environ[name]!r}, but it takes a whole number from {least} on; set it anew."
        for name in names
        if environ.get(name) and not (environ[name].isdecimal() and int(environ[name]) >= least)
    ]


def node_rank(node: int, rank: int, nodes: int) -> Check:
    """Whether this node's number is one of 0 to nodes - 1."""
    if rank < nodes:
        return Check("node rank", {node: f"{rank} of {nodes}"})
    last = f"from 0 to {nodes - 1}" if nodes > 1 else "0 alone"
    remedy = f"NODE_RANK is {rank}, but with NNODES {nodes} ranks go {last}; number the nodes from 0."
    return Check("node rank", {node: f"{rank} of {nodes}"}, "failure", remedy)


# ---- names and network ----


def host_name(
    node: int, host: str, addresses: Sequence[str], nodes: int, interface: str | None, one_machine: bool = False
) -> Check:
    """Whether this host's own name leads to an address that other nodes can reach.

    Gloo, which the kit uses beside NCCL, listens where the host's own name leads to unless an interface is named
    in GLOO_SOCKET_IFNAME (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, createDefaultDevice).

    Args:
        interface: GLOO_SOCKET_IFNAME.
        one_machine: MASTER_ADDR says that all nodes are this machine.
    """
    shown = f"{host} = {', '.join(addresses) or 'no address'}"
    if nodes == 1 or interface or one_machine or any(not is_loopback(address) for address in addresses[:1]):
        return Check("host name", {node: shown})
    why = f"leads to {addresses[0]}, which is this machine alone" if addresses else "has no address"
    remedy = (
        f"The name {host} {why}, so other nodes cannot reach what listens there: give it this node's network address "
        "in /etc/hosts (Debian writes 127.0.1.1 there), or set GLOO_SOCKET_IFNAME to the network interface."
    )
    return Check("host name", {node: shown}, "failure", remedy)


def master_name(node: int, name: str, addresses: Sequence[str], local: bool, rank: int, nodes: int) -> Check:
    """Whether MASTER_ADDR leads to a machine, to one that all can reach, and to node 0.

    Args:
        addresses: what the name resolves to here; empty when it does not.
        local: whether one of them belongs to this machine.
    """
    shown = name if list(addresses) == [name] else f"{name} = {', '.join(addresses) or 'no address'}"

    def row(verdict: Verdict = "ok", remedy: str = "") -> Check:
        return Check("master address", {node: shown}, verdict, remedy)

    if nodes == 1:
        return row()
    if not addresses:
        return row(
            "failure",
            f"MASTER_ADDR {name} does not resolve here; give node 0's IP address, or add the name to /etc/hosts.",
        )
    if all(is_loopback(address) for address in addresses):
        if name == "localhost" or is_loopback(name):
            return row("warning", f"MASTER_ADDR {name} only works if all {nodes} nodes are this one machine.")
        return row(
            "failure",
            f"MASTER_ADDR {name} leads to {addresses[0]}, which is every machine's own: give node 0's network address, "
            "or mend /etc/hosts (Debian maps a host's name to 127.0.1.1).",
        )
    if rank == 0 and not local:
        return row(
            "failure",
            f"NODE_RANK is 0, but MASTER_ADDR {name} is not this machine: node 0 has to be the one at MASTER_ADDR; "
            "set NODE_RANK or MASTER_ADDR right.",
        )
    return row()


def is_loopback(address: str) -> bool:
    """Whether an address reaches no further than its own machine."""
    return address.startswith("127.") or address in ("::1", "localhost")


def free_port(node: int, port: int, holder: str | None) -> Check:
    """On node 0, before a launcher listens there: whether MASTER_PORT can be listened on.

    Args:
        holder: who listens there already, as far as can be known; None: nobody.
    """
    if holder is None:
        return Check("master port", {node: f"{port} is free"})
    remedy = f"MASTER_PORT {port} is in use on node 0 by {holder}: end that, or set another MASTER_PORT on every node."
    return Check("master port", {node: f"{port} is in use"}, "failure", remedy)


def answering_port(node: int, master: str, port: int, outcome: str, seconds: float) -> Check:
    """On the other nodes: whether node 0 answers at MASTER_ADDR:MASTER_PORT.

    Args:
        outcome: "" when it answered, else what the last try came to: refused, timed out, another program, or text.
        seconds: how long was tried.
    """
    place = f"{master}:{port}"
    if not outcome:
        return Check("master port", {node: f"{place} answers"})
    causes = {
        "refused": "nothing listens there yet: start node 0 too (or raise --timeout), check that MASTER_ADDR is node 0 "
        "and that MASTER_PORT is the same on every node",
        "timed out": f"nothing comes back: open the firewall for MASTER_PORT {port} (and for the ports NCCL and gloo "
        "choose between the nodes), and check that MASTER_ADDR is node 0's address on a network both share",
        "another program": "something else listens there: end it, or set another MASTER_PORT on every node",
    }
    cause = causes.get(outcome, f"{outcome}; check MASTER_ADDR and the route to it")
    remedy = f"Node 0 did not answer at {place} within {seconds:.0f} s: {cause}."
    return Check("master port", {node: f"{place}: {outcome}"}, "failure", remedy)


@dataclass(frozen=True)
class Interface:
    """A network interface: its addresses and its speed in Mbit/s (0: not known)."""

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = True
    mbit: int = 0


def matches(wanted: str, name: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME `wanted` takes interface `name`.

    NCCL's rules: names by their beginning, `=name` exactly, `^` in front of the list for all but these
    (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html). An exact name is right for gloo too.
    """
    excluded = wanted.startswith("^")
    names = wanted.lstrip("^").lstrip("=").split(",")
    exact = wanted.lstrip("^").startswith("=")
    found = any(name == item if exact else name.startswith(item) for item in names if item)
    return found != excluded


def network_interface(
    node: int, interfaces: Sequence[Interface], by_route: str | None, wanted: Mapping[str, str], nodes: int
) -> Check:
    """Which interface the nodes will talk over, and whether it can.

    Args:
        by_route: the interface on the way to MASTER_ADDR.
        wanted: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, where set.
    """
    name = "network interface"
    if nodes == 1:
        return Check(name, {node: "one node: none needed"})
    shown: list[str] = []
    problems: list[str] = []
    verdict: Verdict = "ok"
    for variable, pattern in wanted.items():
        exactly = variable == "GLOO_SOCKET_IFNAME"
        up = [i for i in interfaces if i.up]
        taken = [i for i in up if (i.name in pattern.split(",") if exactly else matches(pattern, i.name))]
        if pattern.startswith("^"):
            # Whatever is not named; of those, what can be talked over.
            taken = [i for i in taken if i.addresses]
        shown.append(f"{variable}={pattern}: {', '.join(described(i) for i in taken[:4]) or 'none'}")
        if not taken:
            there = ", ".join(i.name for i in interfaces if i.up)
            problems.append(f"{variable} is {pattern}, but this node has no such interface that is up ({there}).")
            verdict = "failure"
        elif all(is_loopback(a) for i in taken for a in i.addresses):
            problems.append(f"{variable} is {pattern}, which reaches no other node; name the network's interface.")
            verdict = "failure"
    chosen = next((i for i in interfaces if i.name == by_route), None)
    if chosen is not None:
        shown.append(f"to the master: {described(chosen)}")
    if not wanted and chosen is not None and chosen.name.startswith(("docker", "virbr", "br-", "veth", "cni")):
        problems.append(
            f"The way to the master is {chosen.name}, which looks like a container's own network; if nodes cannot "
            "reach each other, set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the real interface."
        )
        verdict = "warning"
    if verdict == "ok" and chosen is not None and 0 < chosen.mbit < LEAST_GBIT * 1000 and not wanted:
        problems.append(
            f"{chosen.name} runs at {chosen.mbit / 1000:g} Gbit/s, below the {LEAST_GBIT} that several nodes need; set "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to a faster interface if there is one."
        )
        verdict = "warning"
    return Check(name, {node: "; ".join(shown) or "not known"}, verdict, " ".join(problems))


def described(interface: Interface) -> str:
    """An interface with its speed and first address."""
    speed = f" {interface.mbit / 1000:g} Gbit/s" if interface.mbit else " (speed not known)"
    return interface.name + speed + (f" {interface.addresses[0]}" if interface.addresses else "")


def infiniband(node: int, ports: Sequence[Mapping[str, str]], disabled: bool, nodes: int) -> Check:
    """Whether InfiniBand or RoCE ports are up and used.

    Args:
        ports: of each: name, rate, state and link_layer, as /sys/class/infiniband words them.
        disabled: NCCL_IB_DISABLE=1 is set.
    """
    if not ports:
        return Check("InfiniBand / RoCE", {node: "none"})
    shown = "; ".join(f"{p['name']} {p['rate']} {p['link_layer']} {p['state'].split(': ')[-1]}" for p in ports)
    active = [p for p in ports if "ACTIVE" in p["state"]]
    if nodes > 1 and not active:
        remedy = "No port is ACTIVE: check cable and subnet manager, or set NCCL_IB_DISABLE=1 to use the network."
        return Check("InfiniBand / RoCE", {node: shown}, "warning", remedy)
    if nodes > 1 and disabled:
        remedy = "NCCL_IB_DISABLE=1 leaves these fast ports unused; unset it unless they do not work."
        return Check("InfiniBand / RoCE", {node: shown}, "warning", remedy)
    return Check("InfiniBand / RoCE", {node: shown})
