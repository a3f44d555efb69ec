"""Accept connections from the ranks of a run, and from nobody else, however slow or many the strangers are.

Both sides prove that they hold the same key: each sends a random text and answers the other's with a keyed hash of it,
so that the key itself never travels. All connections are served side by side, and each has one deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

# For all that a caller has to say: ranks answer in milliseconds.
GUEST_SECONDS = 5.0
MAX_GUESTS = 256
MAX_LINE = 256
RETRY_SECONDS = 0.1


@dataclass
class Guest:
    """A connection that has not proved yet whose it is."""

    socket: socket.socket
    challenge: str
    deadline: float
    line: bytes = b""


def answer(key: bytes, rank: int, role: str, challenge: str) -> str:
    """Return the proof that a caller (`role` "rank") or the listener ("main") gives for one connection."""
    return hmac.new(key, f"{role}\0{rank}\0{challenge}".encode(), hashlib.sha256).hexdigest()


def accept_ranks(
    listener: socket.socket, key: bytes, expected: Collection[int], seconds: float
) -> dict[int, socket.socket]:
    """Return the connections of the expected ranks; everybody else is sent away.

    Raises:
        TimeoutError: some ranks did not connect in time.
    """
    deadline = time.monotonic() + seconds
    admitted: dict[int, socket.socket] = {}
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as unfinished:
        selector.register(listener, selectors.EVENT_READ)
        guests: dict[socket.socket, Guest] = {}
        unfinished.callback(_close_all, guests)
        while len(admitted) < len(expected):
            now = time.monotonic()
            if now >= deadline:
                _close_all(admitted.values())
                raise TimeoutError(f"{len(expected) - len(admitted)} of {len(expected)} ranks did not connect")
            # Guests are in the order of their arrival, and so of their deadlines.
            late = [guest.socket for guest in guests.values() if guest.deadline <= now]
            for one in [*late, *list(guests)[len(late) : len(guests) - MAX_GUESTS]]:
                _send_away(one, guests, selector)
            due = min([deadline, *(guest.deadline for guest in list(guests.values())[:1])])
            for event, _ in selector.select(due - now):
                if event.fileobj is listener:
                    _receive_guest(listener, guests, selector)
                    continue
                guest = guests[event.data]
                rank = _rank_of(guest, key)
                if rank is None:
                    continue
                if rank in expected and rank not in admitted:
                    selector.unregister(guest.socket)
                    admitted[rank] = guests.pop(guest.socket).socket
                else:
                    _send_away(guest.socket, guests, selector)
    return admitted


def _close_all(sockets: Iterable[socket.socket]) -> None:
    for one in sockets:
        one.close()


def _receive_guest(
    listener: socket.socket, guests: dict[socket.socket, Guest], selector: selectors.BaseSelector
) -> None:
    with contextlib.suppress(OSError):
        one, _ = listener.accept()
        one.setblocking(False)
        guest = Guest(one, secrets.token_hex(32), time.monotonic() + GUEST_SECONDS)
        try:
            one.sendall(f"{guest.challenge}\n".encode())
        except OSError:
            one.close()
            return
        guests[one] = guest
        selector.register(one, selectors.EVENT_READ, one)


def _send_away(one: socket.socket, guests: dict[socket.socket, Guest], selector: selectors.BaseSelector) -> None:
    selector.unregister(one)
    del guests[one]
    one.close()


def _rank_of(guest: Guest, key: bytes) -> int | None:
    """Read what has arrived and return the rank that proved itself, -1 for a stranger, None for an unfinished line."""
    try:
        data = guest.socket.recv(MAX_LINE)
    except BlockingIOError:
        return None
    except OSError:
        return -1
    guest.line += data
    if not data or len(guest.line) > MAX_LINE:
        return -1
    if not guest.line.endswith(b"\n"):
        return None
    try:
        number, challenge, proof = guest.line.decode("ascii").split()
        rank = int(number)
    except ValueError:
        return -1
    if not hmac.compare_digest(proof, answer(key, rank, "rank", guest.challenge)):
        return -1
    try:
        guest.socket.sendall(f"{answer(key, rank, 'main', challenge)}\n".encode())
    except OSError:
        return -1
    return rank


def call_main(address: str, port: int, key: bytes, rank: int, seconds: float) -> socket.socket:
    """Return a connection to the main process, both sides proved; tried again until the time is up.

    Raises:
        OSError: nobody answers there who holds the key.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _call_once(address, port, key, rank, deadline)
        except OSError:
            # A last try without time for an answer would fail for that, and hide why this one failed.
            if time.monotonic() + 2 * RETRY_SECONDS >= deadline:
                raise
        time.sleep(RETRY_SECONDS)


def _call_once(address: str, port: int, key: bytes, rank: int, deadline: float) -> socket.socket:
    one = socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic()))
    try:
        challenge, own = _line(one, deadline), secrets.token_hex(32)
        one.sendall(f"{rank} {own} {answer(key, rank, 'rank', challenge)}\n".encode())
        if not hmac.compare_digest(_line(one, deadline).encode(), answer(key, rank, "main", own).encode()):
            raise ConnectionRefusedError("another program answers there")
    except BaseException:
        one.close()
        raise
    return one


def _line(one: socket.socket, deadline: float) -> str:
    """Read one line, byte by byte: what follows it belongs to whoever uses the connection next."""
    line = b""
    while not line.endswith(b"\n"):
        one.settimeout(max(0.001, deadline - time.monotonic()))
        byte = one.recv(1)
        if not byte or len(line) >= MAX_LINE or time.monotonic() >= deadline:
            raise ConnectionResetError("the connection was closed before both sides had proved themselves")
        line += byte
    return line.decode("ascii", "replace").strip()
