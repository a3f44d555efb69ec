"""Accept connections from the ranks of a run, and from nobody else, however slow or many the strangers are.

Both sides prove that they hold the same key: each sends a random text and answers the other's with a keyed hash of it,
so that the key itself never travels. Every caller has a thread, and one deadline.
"""

import contextlib
import hashlib
import hmac
import queue
import secrets
import socket
import threading
import time
from collections.abc import Collection

# For all that a caller has to say: ranks answer in milliseconds.
GUEST_SECONDS = 5.0
POLL_SECONDS = 0.05
MAX_LINE = 256
RETRY_SECONDS = 0.1


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
    proved: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
    listener.settimeout(POLL_SECONDS)
    while len(admitted) < len(expected):
        if time.monotonic() >= deadline:
            for connection in admitted.values():
                connection.close()
            raise TimeoutError(f"{len(expected) - len(admitted)} of {len(expected)} ranks did not connect")
        with contextlib.suppress(TimeoutError):
            guest, _ = listener.accept()
            until = min(deadline, time.monotonic() + GUEST_SECONDS)
            threading.Thread(
                target=lambda guest=guest, until=until: proved.put((_rank_of(guest, key, until), guest)), daemon=True
            ).start()
        while not proved.empty():
            rank, connection = proved.get()
            if rank in expected and rank not in admitted:
                admitted[rank] = connection
            else:
                connection.close()
    return admitted


def _rank_of(connection: socket.socket, key: bytes, deadline: float) -> int:
    """Return the rank that a caller proves to be; -1 for a stranger."""
    challenge_to_rank = secrets.token_hex(32)
    try:
        connection.sendall(f"{challenge_to_rank}\n".encode())
        number, challenge, proof = _line(connection, deadline).split()
        rank = int(number)
        if not hmac.compare_digest(proof.encode(), answer(key, rank, "rank", challenge_to_rank).encode()):
            return -1
        connection.sendall(f"{answer(key, rank, 'main', challenge)}\n".encode())
    except (OSError, ValueError):
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
    connection = socket.create_connection((address, port), timeout=max(0.1, deadline - time.monotonic()))
    try:
        challenge, challenge_to_main = _line(connection, deadline), secrets.token_hex(32)
        connection.sendall(f"{rank} {challenge_to_main} {answer(key, rank, 'rank', challenge)}\n".encode())
        if not hmac.compare_digest(
            _line(connection, deadline).encode(), answer(key, rank, "main", challenge_to_main).encode()
        ):
            raise ConnectionRefusedError("another program answers there")
    except BaseException:
        connection.close()
        raise
    return connection


def _line(connection: socket.socket, deadline: float) -> str:
    """Read one line, byte by byte: what follows it belongs to whoever uses the connection next."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(line) >= MAX_LINE or time.monotonic() >= deadline:
            raise ConnectionResetError("the connection was closed before both sides had proved themselves")
        line += byte
    return line.decode("ascii", "replace").strip()
