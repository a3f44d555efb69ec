"""Only who holds the key is taken for a rank, and only once; who calls learns that it is the main process."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from unsloth_ddp.distributed.watch import admission

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A listening socket on the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


def port_of(listener: socket.socket) -> int:
    return listener.getsockname()[1]


class Main(threading.Thread):
    """The main process, accepting ranks 1 and 2."""

    def __init__(self, listener: socket.socket, seconds: float = 60) -> None:
        super().__init__()
        self.listener, self.seconds = listener, seconds
        self.admitted: dict[int, socket.socket] = {}
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.admitted = admission.accept_ranks(self.listener, KEY, (1, 2), self.seconds)
        except Exception as error:
            self.error = error

    def end(self) -> list[int]:
        self.join()
        for one in self.admitted.values():
            one.close()
        return sorted(self.admitted)


def assert_both_ranks_get_in(main: Main, listener: socket.socket) -> None:
    ranks = [admission.call_main("127.0.0.1", port_of(listener), KEY, r, 30) for r in (1, 2)]
    assert main.end() == [1, 2]
    for one in ranks:
        one.close()


@pytest.mark.parametrize(("key", "rank"), [(OTHER, 1), (KEY, 3), (KEY, 0), (KEY, -1)])
def test_a_wrong_key_or_rank_is_sent_away(listener, key, rank):
    main = Main(listener)
    challenge_seen = []
    with socket.create_connection(("127.0.0.1", port_of(listener))) as one:
        challenge_seen.append(admission._line(one, time.monotonic() + 30))
        proof = admission.answer(key, rank, "rank", challenge_seen[0])
        one.sendall(f"{rank} abc {proof}\n".encode())
        received = one.makefile().read()
    assert key == KEY or received == "", "a stranger is told nothing"
    assert_both_ranks_get_in(main, listener)


@pytest.mark.parametrize("said", [b"\n", b"1\n", b"\xff\xff \xff \xff\n", b"1 a b c\n", b"x" * 1000, b"one a b\n"])
def test_nonsense_is_sent_away(listener, said):
    main = Main(listener)
    with socket.create_connection(("127.0.0.1", port_of(listener))) as one:
        one.settimeout(30)
        challenge = admission._line(one, time.monotonic() + 30)
        one.sendall(said)
        # Closed with what it had sent unread, a connection is reset.
        with contextlib.suppress(ConnectionResetError):
            assert one.recv(100) == b""
    assert len(challenge) == 64
    assert_both_ranks_get_in(main, listener)


def test_a_rank_connects_once(listener, monkeypatch):
    proved = threading.Event()

    class Proved(queue.SimpleQueue):
        def put(self, item):
            super().put(item)
            proved.set()

    monkeypatch.setattr(admission, "queue", SimpleNamespace(SimpleQueue=Proved))
    main = Main(listener)
    first = admission.call_main("127.0.0.1", port_of(listener), KEY, 1, 30)
    # The caller reads the proof before the main process takes note of it.
    assert proved.wait(timeout=30)
    again = admission.call_main("127.0.0.1", port_of(listener), KEY, 1, 30)
    assert again.recv(1) == b"", "the second connection is closed"
    second = admission.call_main("127.0.0.1", port_of(listener), KEY, 2, 30)
    main.join()
    main.admitted[1].sendall(b"x")
    assert first.recv(1) == b"x"
    main.end()
    for one in (first, again, second):
        one.close()


def test_ranks_that_do_not_come_are_counted(listener):
    main = Main(listener, seconds=3)
    one = admission.call_main("127.0.0.1", port_of(listener), KEY, 1, 30)
    assert main.end() == []
    assert str(main.error) == "1 of 2 ranks did not connect"
    one.close()


def test_whoever_answers_in_the_place_of_the_main_process_is_found_out(listener, monkeypatch):
    def impostor() -> None:
        while True:
            try:
                one, _ = listener.accept()
            except OSError:
                return
            with one:
                one.sendall(b"challenge\n")
                number, _, proof = one.makefile().readline().split()
                # What the rank sent is all that an impostor has.
                one.sendall(f"{proof if number == '1' else ''}\n".encode())

    thread = threading.Thread(target=impostor)
    thread.start()
    # One try: of several the last may have too little time for an answer.
    monkeypatch.setattr(admission, "RETRY_SECONDS", 60)
    try:
        with pytest.raises(ConnectionRefusedError, match="another program answers there"):
            admission.call_main("127.0.0.1", port_of(listener), KEY, 1, 60)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_every_try_has_time_for_an_answer(monkeypatch):
    now, left = [0.0], []

    def refuse(address: str, port: int, key: bytes, rank: int, deadline: float) -> socket.socket:
        left.append(deadline - now[0])
        raise ConnectionRefusedError

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(admission, "_call_once", refuse)
    with pytest.raises(ConnectionRefusedError):
        admission.call_main("127.0.0.1", 1, KEY, 1, 10 * admission.RETRY_SECONDS + 0.001)
    assert len(left) > 5 and min(left) > admission.RETRY_SECONDS


def test_callers_that_say_nothing_hold_up_the_ranks_for_a_moment_only(listener):
    main = Main(listener)
    silent = [socket.create_connection(("127.0.0.1", port_of(listener))) for _ in range(2)]
    assert_both_ranks_get_in(main, listener)
    for one in silent:
        one.close()
