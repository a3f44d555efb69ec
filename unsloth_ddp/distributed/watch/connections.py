"""Connect the main process with every other rank of a run, apart from the connections that the collectives use."""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import threading
from dataclasses import dataclass, field
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.rendezvous import SECRET
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.watch.admission import accept_ranks, call_main
from unsloth_ddp.distributed.watch.diagnosis import RankStatus

CONNECT_SECONDS = 30.0


@dataclass
class Peer:
    """A connection to another rank, its status, and the bytes of a message that has not arrived completely."""

    socket: socket.socket
    status: RankStatus
    buffer: bytes = b""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: dict[str, Any]) -> None:
        """Send one line of JSON. A lost connection is noticed when reading."""
        with self.lock, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived; the end of the connection is noted in `status.connection_lost`."""
        data = b""
        try:
            data = self.socket.recv(1 << 16)
        except OSError as error:
            # This side's own timeout has no number, the kernel's has ETIMEDOUT.
            if isinstance(error, TimeoutError) and error.errno is None:
                return []
            # A process that dies with unread messages resets its connections.
            if not isinstance(error, ConnectionResetError):
                self.status.mark_lost(error.strerror or str(error))
        if not data:
            self.status.mark_lost("")
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]


def connect(settings: Settings, runtime: Runtime) -> dict[int, socket.socket] | None:
    """Return the connections by rank: those to all others in the main process, the one to the main process elsewhere.

    Returns None, after the main process has said why, if a rank cannot connect (a firewall that lets only the
    collectives through).
    """
    ranks, sockets, problem = runtime.ranks, {}, None
    listener = _listen(ranks.nodes == 1) if ranks.is_main else None
    offer = (listener.getsockname()[1], secrets.token_hex(32)) if listener else None
    offer_of_main = runtime.gather(offer)[0]
    assert offer_of_main is not None
    port, token = offer_of_main
    # The token has gone over the network in the clear; the secret of the launch files, where there is one, has not.
    key = hmac.new(os.environ.get(SECRET, "").encode(), token.encode(), hashlib.sha256).digest()
    try:
        if listener is not None:
            sockets = accept_ranks(listener, key, range(1, ranks.world_size), CONNECT_SECONDS)
        else:
            address = "127.0.0.1" if ranks.nodes == 1 else os.environ["MASTER_ADDR"]
            sockets = {0: call_main(address, port, key, ranks.rank, CONNECT_SECONDS)}
    except OSError as error:
        problem = f"{runtime.locations[ranks.rank]}: {error}"
    finally:
        if listener is not None:
            listener.close()
    problems = [text for text in runtime.gather(problem) if text]
    if problems:
        for connection in sockets.values():
            connection.close()
        if ranks.is_main:
            print(f"The ranks are not watched, because they cannot reach port {port} of rank 0 ({problems[-1]}).")
        return None
    for connection in sockets.values():
        connection.settimeout(5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # The kernel gives up on a host that no longer acknowledges, whatever the process on that host is doing.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, settings.watch_timeout * 1000)
    return sockets


def _listen(one_node: bool) -> socket.socket:
    """Open a listening socket on a free port: of the loopback interface for one node, of every interface otherwise."""
    if one_node:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)
