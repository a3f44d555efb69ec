"""Read and check names, ports and network interfaces of one node."""

import contextlib
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from unsloth_ddp.preflight.checks import Finding, failure, run_with_limit, warning

RESOLVE_SECONDS = 20


def check_host_name(
    host: str, addresses: Sequence[str], nodes: int, interface: str | None, one_machine: bool = False
) -> Finding:
    """Check that this host's own name resolves to an address that other nodes can reach.

    Gloo, which the kit uses beside NCCL, listens at the address of the host's own name unless GLOO_SOCKET_IFNAME
    names an interface (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, createDefaultDevice).

    Args:
        interface: GLOO_SOCKET_IFNAME.
        one_machine: MASTER_ADDR is a loopback address, so all nodes are on this machine.
    """
    shown = f"{host} = {', '.join(addresses) or 'no address'}"
    if nodes == 1 or interface or one_machine or any(not is_loopback(address) for address in addresses[:1]):
        return Finding(shown)
    why = f"resolves to {addresses[0]}, a loopback address" if addresses else "has no address"
    remedy = (
        f"The name {host} {why}, so other nodes cannot connect to this one: give it this node's network address in "
        "/etc/hosts (Debian writes 127.0.1.1 there), or set GLOO_SOCKET_IFNAME to the network interface."
    )
    return failure(shown, remedy)


def check_master_address(node: int, name: str, addresses: Sequence[str], local: bool, nodes: int) -> Finding:
    """Check that MASTER_ADDR resolves to an address of node 0 that all nodes can reach.

    Args:
        addresses: the addresses that the name resolves to here; empty when it does not.
        local: one of them belongs to this machine.
    """
    shown = name if list(addresses) == [name] else f"{name} = {', '.join(addresses) or 'no address'}"

    if nodes == 1:
        return Finding(shown)
    if not addresses:
        return failure(
            shown, f"MASTER_ADDR {name} does not resolve here; give node 0's IP address, or add the name to /etc/hosts."
        )
    if all(is_loopback(address) for address in addresses):
        if name == "localhost" or is_loopback(name):
            return warning(shown, f"MASTER_ADDR {name} only works if all {nodes} nodes are this one machine.")
        return failure(
            shown,
            f"MASTER_ADDR {name} resolves to {addresses[0]}, a loopback address: give node 0's network address, "
            "or correct /etc/hosts (Debian maps a host's name to 127.0.1.1).",
        )
    if node == 0 and not local:
        return failure(
            shown,
            f"NODE_RANK is 0, but MASTER_ADDR {name} is not this machine: node 0 has to be the one at MASTER_ADDR; "
            "correct NODE_RANK or MASTER_ADDR.",
        )
    return Finding(shown)


def is_loopback(address: str) -> bool:
    """Return whether an address is reachable from its own machine only."""
    return address.startswith("127.") or address in ("::1", "localhost")


def check_free_port(port: int, holder: str | None) -> Finding:
    """Check on node 0, before a launcher listens there, that MASTER_PORT is free.

    Args:
        holder: the program that listens there already; None if there is none.
    """
    if holder is None:
        return Finding(f"{port} is free")
    remedy = f"MASTER_PORT {port} is in use on node 0 by {holder}: end it, or set another MASTER_PORT on every node."
    return failure(f"{port} is in use", remedy)


def check_master_answers(master: str, port: int, outcome: str, seconds: float) -> Finding:
    """Check on the other nodes that node 0 answers at MASTER_ADDR:MASTER_PORT.

    Args:
        outcome: "" when it answered, else the outcome of the last try: refused, timed out, another program, or text.
        seconds: length of the attempt.
    """
    place = f"{master}:{port}"
    if not outcome:
        return Finding(f"{place} answers")
    causes = {
        "refused": "nothing listens there yet: start node 0 too (or raise --timeout), check that MASTER_ADDR is node 0 "
        "and that MASTER_PORT is the same on every node",
        "timed out": f"no packet comes back: open the firewall for MASTER_PORT {port} (and for the ports NCCL and gloo "
        "choose between the nodes), and check that MASTER_ADDR is node 0's address on a network both share",
        "another program": "another program listens there: end it, or set another MASTER_PORT on every node",
    }
    cause = causes.get(outcome, f"{outcome}; check MASTER_ADDR and the route to it")
    remedy = f"Node 0 did not answer at {place} within {seconds:.0f} s: {cause}."
    return failure(f"{place}: {outcome}", remedy)


def check_network_interface(up: Mapping[str, Sequence[str]], patterns: Mapping[str, str], nodes: int) -> Finding:
    """Check that the interfaces named for the traffic between the nodes are up and reach further than this node.

    Args:
        up: the addresses of each interface that is up.
        patterns: NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, where they are set.
    """
    if nodes == 1:
        return Finding("not needed for one node")
    for variable, pattern in patterns.items():
        selected = [name for name in up if selects(variable, pattern, name)]
        if not selected:
            remedy = f"{variable} is {pattern}, but this node has no such interface that is up ({', '.join(up)})."
            return failure(f"{variable}={pattern}: none", remedy)
        if all(is_loopback(address) for name in selected for address in up[name]):
            remedy = f"{variable} is {pattern}, a loopback interface; name the interface of the network."
            return failure(f"{variable}={pattern}: {', '.join(selected)}", remedy)
    return Finding(", ".join(f"{variable}={pattern}" for variable, pattern in patterns.items()) or "none named")


def selects(variable: str, pattern: str, name: str) -> bool:
    """Return whether NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME of this value selects an interface.

    NCCL's rules: a name is a prefix, `=name` is exact, and `^` before the list excludes its interfaces
    (docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html). gloo takes exact names only.
    """
    if variable == "GLOO_SOCKET_IFNAME":
        return name in pattern.split(",")
    names = [item for item in pattern.lstrip("^").lstrip("=").split(",") if item]
    exact = pattern.lstrip("^").startswith("=")
    matches = name in names if exact else name.startswith(tuple(names))
    return matches != pattern.startswith("^")


def check_infiniband(ports: Sequence[Mapping[str, str]], disabled: bool, nodes: int) -> Finding:
    """Check that InfiniBand or RoCE ports are active and used.

    Args:
        ports: name, rate, state and link_layer of each, as in /sys/class/infiniband.
        disabled: NCCL_IB_DISABLE=1 is set.
    """
    if not ports:
        return Finding("none")
    shown = "; ".join(f"{p['name']} {p['rate']} {p['link_layer']} {p['state'].split(': ')[-1]}" for p in ports)
    active = [p for p in ports if "ACTIVE" in p["state"]]
    if nodes > 1 and not active:
        remedy = "No port is ACTIVE: check cable and subnet manager, or set NCCL_IB_DISABLE=1 to use the network."
        return warning(shown, remedy)
    if nodes > 1 and disabled:
        remedy = "NCCL_IB_DISABLE=1 leaves these fast ports unused; unset it unless they do not work."
        return warning(shown, remedy)
    return Finding(shown)


# ---- what is read ----


def resolve_name(name: str) -> list[str]:
    """Return the addresses that a name resolves to here, best first; none when it does not resolve."""
    try:
        entries = run_with_limit(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), RESOLVE_SECONDS)
    except (OSError, TimeoutError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def read_interfaces() -> dict[str, list[str]]:
    """Return the addresses of each network interface of this machine that is up and has one."""
    import psutil

    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    interfaces = {
        name: [e.address.partition("%")[0] for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        for name, entries in sorted(psutil.net_if_addrs().items())
        if name in up
    }
    return {name: addresses for name, addresses in interfaces.items() if addresses}


def is_here(addresses: list[str]) -> bool:
    """Return whether one of these addresses belongs to this machine."""
    local = {address for interface in read_interfaces().values() for address in interface}
    return any(address in local or is_loopback(address) for address in addresses)


def read_infiniband_ports(root: Path = Path("/sys/class/infiniband")) -> list[dict[str, str]]:
    """Return name, rate, state and link layer of every InfiniBand or RoCE port."""
    ports = []
    for port in sorted(root.glob("*/ports/*")):
        entry = {"name": f"{port.parent.parent.name}:{port.name}"}
        for name in ("rate", "state", "link_layer"):
            try:
                entry[name] = (port / name).read_text().strip()
            except OSError:
                entry[name] = "unknown"
        ports.append(entry)
    return ports


def find_port_holder(port: int) -> str | None:
    """Return the program that keeps this machine from listening on `port`; None when the port is free."""
    try:
        with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
            # As the launcher's own server sets it, so that a recently closed connection does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if probe.family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("", port))
            probe.listen(1)
        return None
    except OSError as error:
        import psutil

        with contextlib.suppress(psutil.Error, OSError):
            for entry in psutil.net_connections("tcp"):
                if entry.laddr and entry.laddr.port == port and entry.status == psutil.CONN_LISTEN and entry.pid:
                    return f"{psutil.Process(entry.pid).name()} (pid {entry.pid})"
        return f"another program ({error.strerror})"
