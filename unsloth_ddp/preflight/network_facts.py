"""Read names, addresses, interfaces and ports of this machine."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from unsloth_ddp.preflight.network import Interface, is_loopback
from unsloth_ddp.preflight.time_limit import run_with_limit

RESOLVE_SECONDS = 20


def resolve_name(name: str) -> list[str]:
    """Return the addresses that a name resolves to here, best first; none when it does not resolve."""
    try:
        found = run_with_limit(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), RESOLVE_SECONDS)
    except (OSError, TimeoutError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def read_interfaces() -> list[Interface]:
    """Return the network interfaces of this machine."""
    import psutil

    states = psutil.net_if_stats()
    found = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        addresses = [e.address.partition("%")[0] for e in entries if e.family in (socket.AF_INET, socket.AF_INET6)]
        state = states.get(name)
        speed = state.speed if state and 0 < state.speed < 65535000 else 0
        found.append(Interface(name, tuple(addresses), bool(state and state.isup), speed))
    return found


def read_addresses() -> set[str]:
    """Return every address of this machine."""
    return {address for interface in read_interfaces() for address in interface.addresses}


def is_here(addresses: list[str]) -> bool:
    """Return whether one of these addresses belongs to this machine."""
    own = read_addresses()
    return any(address in own or is_loopback(address) for address in addresses)


def find_route_interface(addresses: list[str], found: list[Interface]) -> str | None:
    """Return the interface of the route to the first reachable address, or the one that has it; None if there is none."""
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            # No packet is sent: connecting a datagram socket only asks the kernel for the route.
            probe.connect((address, 9))
            source = probe.getsockname()[0]
            return next((i.name for i in found if source in i.addresses), None)
    return None


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
