"""Stage 2: all processes meet at a store on node 0, find out who is missing, and hand in what is to be compared.

Everything here goes through torch's TCPStore and works before, and without, any process group: a wait always has an
end, and who did not come is known by name. Without a launcher node 0 listens at MASTER_ADDR:MASTER_PORT, the very
port the launcher will use; below a launcher its own store, which listens there already, is shared.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from unsloth_ddp.preflight import compare, verdicts
from unsloth_ddp.preflight.bounded import bounded
from unsloth_ddp.preflight.checks import Check
from unsloth_ddp.preflight.compare import Arrival
from unsloth_ddp.preflight.place import Place
from unsloth_ddp.utils.errors import one_line

POLL_SECONDS = 0.2
# How long after its own time is up a process still waits for node 0 to say who is missing.
GRACE_SECONDS = 5
# A store that talks answers within this; what does not is no store.
HANDSHAKE_SECONDS = 10
TOKEN_SECONDS = 6
CLOCK_SECONDS = 5
LEAVE_SECONDS = 10


class Lost(Exception):
    """The store on node 0 does not answer any more, or never did."""


def uses_agent_store() -> bool:
    """Whether the launcher's own store listens at MASTER_ADDR:MASTER_PORT."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def hosts_store(place: Place, master_is_here: bool) -> bool:
    """Whether this process is the one that listens.

    A node 0 that is not at MASTER_ADDR must not: it would wait alone while the others meet elsewhere.
    """
    if place.ranks.rank != 0:
        return False
    return not uses_agent_store() if place.launched else master_is_here


def wait_for_port(host: str, port: int, seconds: float) -> str:
    """Try until something listens at host:port; "" when it does, else what the last try came to."""
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.5, deadline - time.monotonic())
        try:
            socket.create_connection((host, port), timeout=min(5.0, left)).close()
            return ""
        except ConnectionRefusedError:
            outcome = "refused"
        except TimeoutError:
            outcome = "timed out"
        except socket.gaierror:
            outcome = f"{host} does not resolve"
        except OSError as error:
            outcome = "timed out" if error.errno == errno.ETIMEDOUT else (error.strerror or str(error)).lower()
        if time.monotonic() >= deadline:
            return outcome
        time.sleep(POLL_SECONDS)


class Meeting:
    """The store where the processes of one preflight meet, with JSON values and bounded waits."""

    def __init__(self, place: Place, listens: bool, seconds: float) -> None:
        """Listen, or connect to who listens.

        Raises:
            Lost: what listens there is no store, or nothing can be listened on.
        """
        self.place = place
        self.listens = listens
        self.attempt = f"preflight/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._server = self._connect(listens, seconds)
        self._store = self._prefixed(self._server, "meeting")

    def _connect(self, listens: bool, seconds: float) -> Any:
        from torch.distributed import TCPStore

        def connect() -> Any:
            listener = None
            if listens and self.place.nodes == 1:
                # Without a socket of its own the store would listen on every interface.
                listener = socket.create_server(("127.0.0.1", self.place.port), backlog=1024).detach()
            return TCPStore(
                self.place.master,
                self.place.port,
                is_master=listens,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
                master_listen_fd=listener,
            )

        try:
            return bounded(connect, seconds + GRACE_SECONDS)
        except Exception as error:
            raise Lost(one_line(error)) from None

    def _prefixed(self, store: Any, part: str) -> Any:
        from torch.distributed import PrefixStore

        return PrefixStore(f"{self.attempt}/{part}", store)

    def group_store(self) -> Any:
        """A store for a process group, over a connection of its own, so that its waits hold up no others."""
        return self._prefixed(self._connect(False, HANDSHAKE_SECONDS), "group")

    def put(self, key: str, value: Any) -> None:
        """Hand in a value.

        Raises:
            Lost: node 0 is gone.
        """
        self._asked(lambda: self._store.set(key, json.dumps(value)), HANDSHAKE_SECONDS)

    def get(self, key: str, seconds: float) -> Any:
        """A value that some process hands in.

        Raises:
            TimeoutError: nobody did in time.
            Lost: node 0 is gone.
        """
        from torch.distributed import DistStoreError

        def wait() -> Any:
            try:
                self._store.wait([key], timedelta(seconds=max(0.05, seconds)))
            except DistStoreError:
                return None
            return self._store.get(key)

        found = self._asked(wait, max(0.0, seconds))
        if found is None:
            raise TimeoutError(f"no {key} within {seconds:.0f} s")
        return json.loads(found)

    def count(self, key: str, add: int = 0) -> int:
        """A counter, after adding to it.

        Raises:
            Lost: node 0 is gone.
        """
        return int(self._asked(lambda: self._store.add(key, add), HANDSHAKE_SECONDS))

    def _asked(self, question: Callable[[], Any], seconds: float) -> Any:
        """What the store answers; over a link that was cut it would wait for ever, and not hear Ctrl-C either."""
        try:
            return bounded(question, seconds + GRACE_SECONDS)
        except Exception as error:
            raise Lost(one_line(error)) from None

    def gather(self, key: str, numbers: Iterable[int], seconds: float) -> dict[int, Any]:
        """`key/number` of each number that is handed in until the time is up."""
        deadline = time.monotonic() + seconds
        found = {}
        for number in numbers:
            try:
                found[number] = self.get(f"{key}/{number}", deadline - time.monotonic())
            except TimeoutError:
                continue
        return found

    def leave(self) -> None:
        """Wait a little for the others, so that whoever ends first cuts nobody off; who holds the store ends last.

        A launcher ends all processes of a node as soon as one has failed; everything is said by now, and each is to
        end with its own exit code, so its signal is not heard any more.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deadline = time.monotonic() + LEAVE_SECONDS
        try:
            came = self.count("came")
            self.count("left", 1)
            self._reach("left", came, deadline)
            if self.listens:
                self._reach("gone", came - 1, deadline)
            else:
                self.count("gone", 1)
        except Lost:
            return

    def _reach(self, key: str, wanted: int, deadline: float) -> None:
        while self.count(key) < wanted and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def meet(place: Place, master_is_here: bool, seconds: float) -> tuple[Meeting | None, list[Check]]:
    """Go to the store and find out who else came.

    Returns the meeting (None when there is none) and the rows of the table about it.
    """
    listens = hosts_store(place, master_is_here)
    node = place.node_rank
    rows: list[Check] = []
    began = time.monotonic()
    if not listens:
        outcome = wait_for_port(place.master, place.port, seconds)
        waited = time.monotonic() - began
        rows.append(verdicts.answering_port(node, place.master, place.port, outcome, waited))
        if outcome:
            return None, rows
    try:
        meeting = Meeting(place, listens, min(HANDSHAKE_SECONDS, seconds))
    except Lost as error:
        if listens and "timed out" not in str(error).lower():
            return None, [verdicts.free_port(node, place.port, f"another program ({error})")]
        outcome = "timed out" if listens else "another program"
        waited = time.monotonic() - began
        return None, [verdicts.answering_port(node, place.master, place.port, outcome, waited)]
    try:
        rows.append(roll_call(meeting, seconds))
    except Lost:
        remedy = f"Node 0 ({place.master}) went away while this node waited for the others: look at its output."
        rows.append(Check("arrived", {node: place.host}, "failure", remedy))
    return meeting, rows


def roll_call(meeting: Meeting, seconds: float) -> Check:
    """Say that this process is here and learn who else is: rank 0 waits for all, and tells everyone at once.

    Raises:
        Lost: node 0 is gone.
    """
    place = meeting.place
    ranks = place.ranks
    me = Arrival(ranks.rank, place.node_rank, place.host, place.nodes, ranks.world_size, ranks.local_world_size)
    meeting.put(f"who/{meeting.count('came', 1)}", dataclasses.asdict(me))
    began = time.monotonic()
    # Two nodes may both believe to be node 0.
    decides = ranks.rank == 0 and meeting.count("deciders", 1) == 1
    if not decides:
        try:
            return _judged(meeting.get("roll", seconds + GRACE_SECONDS), place)
        except TimeoutError:
            return _judged(_roll(meeting, time.monotonic() - began), place)
    while meeting.count("came") < ranks.world_size and time.monotonic() - began < seconds:
        time.sleep(POLL_SECONDS)
    roll = _roll(meeting, time.monotonic() - began)
    meeting.put("roll", roll)
    return _judged(roll, place)


def _roll(meeting: Meeting, waited: float) -> dict[str, Any]:
    ranks = meeting.place.ranks
    came = meeting.gather("who", range(1, meeting.count("came") + 1), GRACE_SECONDS)
    return {
        "present": list(came.values()),
        "waited": waited,
        "in_time": len(came) >= ranks.world_size,
        "nodes": meeting.place.nodes,
        "world_size": ranks.world_size,
    }


def _judged(roll: dict[str, Any], place: Place) -> Check:
    present = [Arrival(**one) for one in roll["present"]]
    where = f"{place.master}:{place.port}"
    return compare.arrivals(roll["world_size"], roll["nodes"], present, roll["waited"], where, roll["in_time"])


# ---- clocks ----


def serve_clock(meeting: Meeting, ranks: Iterable[int]) -> None:
    """Node 0: answer the other nodes' questions for the time, one node after the other."""
    for rank in ranks:
        meeting.put(f"clock/{rank}/ready", True)
        for turn in range(3):
            try:
                meeting.get(f"clock/{rank}/ask/{turn}", CLOCK_SECONDS)
            except TimeoutError:
                break
            meeting.put(f"clock/{rank}/time/{turn}", time.time())


def ask_clock(meeting: Meeting, seconds: float) -> tuple[float, float] | None:
    """Another node: seconds its clock is ahead of node 0's, and how exactly that is known; the best of three tries."""
    rank = meeting.place.ranks.rank
    tries = []
    try:
        meeting.get(f"clock/{rank}/ready", seconds)
        for turn in range(3):
            before = time.time()
            meeting.put(f"clock/{rank}/ask/{turn}", True)
            there = meeting.get(f"clock/{rank}/time/{turn}", CLOCK_SECONDS)
            after = time.time()
            tries.append((abs(after - before) / 2, (before + after) / 2 - there))
    except TimeoutError:
        pass
    if not tries:
        return None
    exact, ahead = min(tries)
    return ahead, exact


# ---- the output folder ----


def leave_token(folder: Path) -> tuple[Path, str] | None:
    """Node 0: a file in the output folder for the others to find; None where it cannot be written."""
    secret = secrets.token_hex(8)
    path = folder / f".preflight-token-{secret}"
    try:
        path.write_text(secret)
    except OSError:
        return None
    return path, secret


def find_token(folder: Path, name: str, secret: str) -> bool | None:
    """Another node: whether node 0's file is in this node's output folder; None where that cannot be looked up.

    A network file system may show a new file a little later.
    """
    deadline = time.monotonic() + TOKEN_SECONDS
    while True:
        try:
            return (folder / name).read_text() == secret
        except FileNotFoundError:
            pass
        except OSError:
            return None
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
