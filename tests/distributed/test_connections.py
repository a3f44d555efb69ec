"""Ranks find the main process in a moment, whatever strangers do at its port."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed.groups import Group
from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.watch import admission, connections

STRANGERS = 20


def connect_all(size: int) -> tuple[list[Any], float]:
    """Connect the ranks of a job, as threads; returns what each came to and the seconds it took."""
    group, found = Group(size), [None] * size

    def one(rank: int) -> None:
        runtime = SimpleNamespace(
            ranks=Ranks(rank, rank, size, size),
            gather=group.gather_of(rank),
            locations=[f"rank {r}" for r in range(size)],
        )
        found[rank] = connections.connect(Settings(), runtime)

    began = time.monotonic()
    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found, time.monotonic() - began


def close(found: list[dict[int, socket.socket]]) -> None:
    """Close the connections of all ranks."""
    for sockets in found:
        for one in sockets.values():
            one.close()


def drip(port: int, over: threading.Event) -> None:
    """Send a byte at a time, never a whole line."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as one:
        while not over.wait(0.2):
            one.sendall(b"x")


def flood(port: int, over: threading.Event) -> None:
    """Connect again and again, and hang up."""
    while not over.is_set():
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()


@pytest.fixture
def strangers_first(monkeypatch):
    """Connect strangers before any rank can: silent ones, and those of the given functions."""
    over, opened, threads = threading.Event(), [], []

    def use(*functions: Any) -> None:
        def listen(one_node: bool, real: Any = connections._listen) -> socket.socket:
            listener = real(one_node)
            port = listener.getsockname()[1]
            opened.extend(socket.create_connection(("127.0.0.1", port)) for _ in range(STRANGERS))
            for function in functions:
                threads.append(threading.Thread(target=function, args=(port, over)))
                threads[-1].start()
            return listener

        monkeypatch.setattr(connections, "_listen", listen)

    yield use
    over.set()
    for thread in threads:
        thread.join()
    for one in opened:
        one.close()


def test_each_rank_is_connected_to_the_main_process():
    found, _ = connect_all(4)
    assert [sorted(sockets) for sockets in found] == [[1, 2, 3], [0], [0], [0]]
    for rank in (1, 2, 3):
        found[rank][0].sendall(f"from {rank}\n".encode())
        assert found[0][rank].recv(100) == f"from {rank}\n".encode()
        found[0][rank].sendall(b"back\n")
        assert found[rank][0].recv(100) == b"back\n"
    close(found)


@pytest.mark.parametrize("others", [(), (drip,), (flood,)], ids=["silent", "dripping", "flooding"])
def test_strangers_do_not_delay_the_ranks(strangers_first, others, monkeypatch):
    monkeypatch.setattr(admission, "GUEST_SECONDS", 25.0)
    strangers_first(*others)
    found, seconds = connect_all(3)
    assert [sorted(sockets) for sockets in found] == [[1, 2], [0], [0]]
    assert seconds < 20, "one stranger is waited for"
    close(found)
