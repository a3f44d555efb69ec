"""Verdicts on what one node sees by itself: pure functions from plain values to a Check with its remedy.

What several nodes have to agree on is judged in compare.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Verdict = Literal["ok", "warning", "failure"]
SEVERITY: dict[Verdict, int] = {"ok": 0, "warning": 1, "failure": 2}

DEFAULT_PORT = 6001
GIB = 2**30
# What a container gets unless told otherwise is 64 MB; NCCL and data loaders want more.
SHARED_MEMORY_WANTED = GIB
CACHE_WANTED = 2 * GIB
LOGS_WANTED = GIB // 4
# The kernel's own bound on the clock's error, above which systemd calls it unsynchronised too.
CLOCK_ERROR_LIMIT = 16.0
LEAST_GBIT = 10
RECOMMENDED_GBIT = 100


@dataclass(frozen=True)
class Check:
    """One row of the table: what was looked at, what each node showed, and what to do about it."""

    name: str
    values: dict[int, str]
    verdict: Verdict = "ok"
    remedy: str = ""


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The most severe of some verdicts; ok for none."""
    return max(verdicts, key=lambda v: SEVERITY[v], default="ok")


def exit_code(checks: Iterable[Check]) -> int:
    """1 after a failure, 0 otherwise: a warning is for the user to weigh."""
    return int(worst(check.verdict for check in checks) == "failure")


def merge(checks: Sequence[Check]) -> list[Check]:
    """One row a name, in order of first appearance; a remedy that only some nodes need says which."""
    rows: list[Check] = []
    for name in dict.fromkeys(check.name for check in checks):
        same = [check for check in checks if check.name == name]
        nodes = {node for check in same for node in check.values}
        remedies: dict[str, set[int]] = {}
        for check in same:
            if check.remedy:
                remedies.setdefault(check.remedy, set()).update(check.values)
        texts = [text if on == nodes else f"{named_nodes(on).capitalize()}: {text}" for text, on in remedies.items()]
        values = {node: value for check in same for node, value in check.values.items()}
        rows.append(Check(name, dict(sorted(values.items())), worst(c.verdict for c in same), "\n".join(texts)))
    return rows


def named_nodes(nodes: Iterable[int]) -> str:
    """`node 3`, or `nodes 0-3, 7`."""
    numbers = sorted(nodes)
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return f"node {text}" if len(numbers) == 1 else f"nodes {text}"


def unmade(name: str, node: int, reason: str) -> Check:
    """A check that could not be made, which is no verdict on the node."""
    return Check(name, {node: f"not checked: {reason}"}, "warning", "Look at this by hand; preflight could not.")


def size(count: float) -> str:
    """Bytes as people write them: 512 MiB, 1.5 TiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


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
    shown, problems, verdict = [], [], "ok"
    for variable, pattern in wanted.items():
        exactly = variable == "GLOO_SOCKET_IFNAME"
        taken = [i for i in interfaces if (i.name in pattern.split(",") if exactly else matches(pattern, i.name))]
        taken = (
            [i for i in taken if i.up] if not pattern.startswith("^") else [i for i in taken if i.up and i.addresses]
        )
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
    return Check(name, {node: "; ".join(shown) or "not known"}, verdict, " ".join(problems))  # type: ignore[arg-type]


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


# ---- clock, disks, memory ----


def clock(node: int, error_seconds: float | None, nodes: int) -> Check:
    """Whether the kernel's clock is kept by NTP.

    Args:
        error_seconds: the kernel's bound on its error; None where it cannot be asked.
    """
    if error_seconds is None:
        return Check("clock", {node: "synchronisation not known"})
    if error_seconds < CLOCK_ERROR_LIMIT:
        return Check("clock", {node: "synchronised"})
    if nodes == 1:
        return Check("clock", {node: "not synchronised"})
    remedy = "Start chrony, ntpd or systemd-timesyncd: nodes whose clocks differ disagree on which file is newer."
    return Check("clock", {node: "not synchronised"}, "warning", remedy)


@dataclass(frozen=True)
class Folder:
    """A folder that a run writes to: free bytes, or why it cannot be written."""

    path: str
    free: int = 0
    error: str = ""


def disk(name: str, node: int, folder: Folder, needed: int, what: str, option: str) -> Check:
    """Whether a folder can be written and holds what the run will put there.

    Args:
        needed: bytes; twice that is comfortable.
        what: what the bytes are for.
        option: how to choose another folder.
    """
    if folder.error:
        remedy = f"{folder.path} cannot be written ({folder.error}); mend that, or choose another with {option}."
        return Check(name, {node: f"{folder.path}: {folder.error}"}, "failure", remedy)
    shown = f"{folder.path}: {size(folder.free)} free, about {size(needed)} wanted"
    if folder.free < needed:
        remedy = f"Free space for {what}, or choose another folder with {option}."
        return Check(name, {node: shown}, "failure", remedy)
    if folder.free < 2 * needed:
        remedy = f"{what.capitalize()} will just fit; free some space, or choose another folder with {option}."
        return Check(name, {node: shown}, "warning", remedy)
    return Check(name, {node: shown})


def shared_memory(node: int, free: int, total: int, processes: int, gpu: bool) -> Check:
    """Whether /dev/shm is large enough for NCCL between the processes of one node, and for data loaders."""
    shown = f"{size(free)} free of {size(total)}"
    if free >= SHARED_MEMORY_WANTED or (processes <= 1 and not gpu):
        return Check("shared memory", {node: shown})
    remedy = "NCCL shares buffers in /dev/shm: start the container with --ipc=host or --shm-size=8g."
    return Check("shared memory", {node: shown}, "warning", remedy)


# ---- GPUs ----


def gpus(
    node: int,
    devices: Sequence[Mapping[str, Any]],
    *,
    cpu: bool,
    hardware: bool,
    reason: str,
    expected: int | None,
    processes: int,
    visible: str | None,
) -> Check:
    """Whether torch sees the GPUs that the run counts on.

    Args:
        devices: name and memory (bytes) of each GPU that torch sees.
        cpu: the run is on the CPU by choice.
        hardware: the machine has NVIDIA's driver loaded, or a GPU's device file.
        reason: why torch sees none.
        expected: GPUS_PER_NODE; None when not set.
        processes: started on this node; 0 when no launcher has started them yet.
        visible: CUDA_VISIBLE_DEVICES.
    """
    if cpu:
        return Check("GPUs", {node: "not used: the run is on the CPU"})
    limit = f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else ""
    shown = gpu_list(devices) + limit

    def row(verdict: Verdict, remedy: str) -> Check:
        return Check("GPUs", {node: shown}, verdict, remedy)

    if not devices:
        if hardware:
            return row("failure", f"This node has an NVIDIA GPU, but torch sees none: {reason or 'no reason given'}.")
        if expected:
            return row(
                "failure",
                f"GPUS_PER_NODE is {expected}, but no GPU is here; check the driver (nvidia-smi), start the container "
                "with --gpus all, or give --use_cpu for a run on the CPU.",
            )
        return row("warning", "The run will be on the CPU; give --use_cpu if that is meant, or check nvidia-smi.")
    if expected and len(devices) != expected:
        return row(
            "failure",
            f"GPUS_PER_NODE is {expected}, but {len(devices)} are visible{limit}; every node needs the same number.",
        )
    if processes > len(devices):
        return row("failure", f"{processes} processes were started for {len(devices)} GPUs; start one a GPU.")
    if processes and processes < len(devices):
        return row("warning", f"{len(devices) - processes} GPUs stay idle; start one process a GPU.")
    return Check("GPUs", {node: shown})


def gpu_list(devices: Sequence[Mapping[str, Any]]) -> str:
    """`4 x NVIDIA H200 141 GiB`, or each kind apart."""
    kinds = [f"{d['name']} {size(d['memory'])}" for d in devices]
    return ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)) or "none"


def driver(node: int, driver_version: str | None, driver_cuda: int | None, torch_cuda: str | None) -> Check:
    """Whether the driver can run what torch was built for.

    Within one major version of CUDA a newer toolkit runs on an older driver, but code compiled on the spot (Triton)
    may not (docs.nvidia.com/deploy/cuda-compatibility).

    Args:
        driver_cuda: the newest CUDA of the driver as cuDriverGetVersion gives it: 12080 for 12.8.
        torch_cuda: torch.version.cuda: "12.8"; None for a build without CUDA.
    """
    name = "driver and CUDA"
    if torch_cuda is None:
        remedy = "This torch was built without CUDA; install the kit's own with uv sync."
        return Check(name, {node: "torch without CUDA"}, "failure", remedy)
    if driver_cuda is None:
        return Check(
            name, {node: f"torch for CUDA {torch_cuda}; the driver's is not known"}, "warning", "Run nvidia-smi."
        )
    newest = (driver_cuda // 1000, driver_cuda % 1000 // 10)
    built = tuple(int(part) for part in torch_cuda.split(".")[:2])
    known = f"driver {driver_version}, " if driver_version else ""
    shown = f"{known}up to CUDA {newest[0]}.{newest[1]}; torch for CUDA {torch_cuda}"
    if newest[0] < built[0]:
        remedy = f"Update the driver to one for CUDA {built[0]}, or install a torch built for CUDA {newest[0]}."
        return Check(name, {node: shown}, "failure", remedy)
    if newest < built:
        remedy = "Mostly works within one major version; if kernels fail to compile or load, update the driver."
        return Check(name, {node: shown}, "warning", remedy)
    return Check(name, {node: shown})


def doctor(node: int, code: int | None, report: str) -> Check:
    """What `unsloth doctor --gpus` came to.

    Args:
        code: its exit status; None when it did not end in time or could not be started.
        report: what it printed.
    """
    name = "unsloth doctor --gpus"
    hints = report.partition("=== Verdict:")[2].strip().splitlines()[1:]
    said = " ".join(line.strip().lstrip("- ") for line in hints if line.strip())
    if code == 0:
        return Check(name, {node: "OK"})
    if code is None:
        return Check(
            name, {node: report or "did not end"}, "warning", "Run unsloth doctor --gpus by hand on this node."
        )
    if not said:
        last = report.strip().splitlines()[-1:] or [""]
        return Check(name, {node: f"exit {code}: {last[0][:200]}"}, "warning", "Run unsloth doctor --gpus by hand.")
    return Check(name, {node: "PROBLEMS FOUND"}, "failure", said)


def renumbered(check: Check, node: int) -> Check:
    """The same row as another node's."""
    return replace(check, values={node: next(iter(check.values.values()))})
