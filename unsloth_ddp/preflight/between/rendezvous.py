"""Bring all processes of a preflight together at a store on node 0, and find out which are missing.

Everything goes through torch's TCPStore, before and without any process group, so every wait has a limit and missing
processes are known by name. Values are sent as JSON and never unpickled. Without a launcher node 0 listens at
MASTER_ADDR:MASTER_PORT, the port that the launcher uses later; below a launcher its own store, which listens there
already, is shared.
"""

import dataclasses
import hashlib
import hmac
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from unsloth_ddp.distributed.rendezvous import SECRET
from unsloth_ddp.preflight.between.arrivals import Arrival, check_arrivals
from unsloth_ddp.preflight.checks import Check, run_with_limit
from unsloth_ddp.preflight.job import ProcessInfo
from unsloth_ddp.preflight.node.network import check_free_port, check_master_answers
from unsloth_ddp.utils.errors import one_line, os_reason

POLL_SECONDS = 0.2
# A process waits this much longer than its own limit for node 0 to say which processes are missing.
GRACE_SECONDS = 5
# A server that does not answer within this time is not a store.
HANDSHAKE_SECONDS = 10
LEAVE_SECONDS = 10
SIGNATURE_LENGTH = hashlib.sha256().digest_size * 2


class RendezvousError(Exception):
    """The store on node 0 does not answer (any more), or holds a value that no process of this job sent."""


def hosts_store(process: ProcessInfo, master_is_here: bool) -> bool:
    """Return whether this process has to listen.

    A node 0 that is not at MASTER_ADDR does not: it would wait alone while the others connect elsewhere.
    """
    if process.ranks.rank != 0:
        return False
    # Below a launcher its own store may listen at MASTER_ADDR:MASTER_PORT.
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" if process.launched else master_is_here


def wait_for_port(host: str, port: int, seconds: float) -> str:
    """Try to connect until something listens at host:port; return "", or the outcome of the last try."""
    deadline = time.monotonic() + seconds
    while True:
        remaining = max(0.5, deadline - time.monotonic())
        try:
            socket.create_connection((host, port), timeout=min(5.0, remaining)).close()
            return ""
        except ConnectionRefusedError:
            outcome = "refused"
        except TimeoutError:
            outcome = "timed out"
        except OSError as error:
            outcome = os_reason(error).lower()
        if time.monotonic() >= deadline:
            return outcome
        time.sleep(POLL_SECONDS)


def encode(key: str, value: Any, secret: str) -> bytes:
    """Return `value` as JSON, with a signature in front where the job has a secret."""
    text = json.dumps(value).encode()
    return _signature(key, text, secret) + text if secret else text


def decode(key: str, content: bytes, secret: str) -> Any:
    """Return the value that `encode` was given.

    Raises:
        RendezvousError: the content is not signed with this job's secret, or is not JSON.
    """
    text = content
    if secret:
        signature, text = content[:SIGNATURE_LENGTH], content[SIGNATURE_LENGTH:]
        if not hmac.compare_digest(signature, _signature(key, text, secret)):
            raise RendezvousError(f"{key} is not signed with this job's {SECRET}; set the same on every node")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RendezvousError(f"{key} is not JSON; another program writes to this store") from None


def _signature(key: str, text: bytes, secret: str) -> bytes:
    # The key is signed too, so that a value cannot be moved to another one.
    return hmac.new(secret.encode(), key.encode() + b"\0" + text, "sha256").hexdigest().encode()


class Rendezvous:
    """The store that all processes of one preflight share, with JSON values and limited waits.

    Raises:
        RendezvousError: by every method, where node 0 is gone or a value is not from this job.
    """

    def __init__(self, process: ProcessInfo, listens: bool, seconds: float) -> None:
        """Listen, or connect to the process that listens.

        Raises:
            RendezvousError: another program listens there, or the port cannot be listened on.
        """
        self.process = process
        self.listens = listens
        self.secret = os.environ.get(SECRET, "")
        self.attempt = f"preflight/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._server = self._connect(listens, seconds)
        self._store = self._part_of(self._server, "meeting")

    def _connect(self, listens: bool, seconds: float) -> Any:
        from torch.distributed import TCPStore

        def connect() -> Any:
            listener = None
            if listens and self.process.ranks.nodes == 1:
                # Without a socket given to it the store would listen on every interface.
                listener = socket.create_server(("127.0.0.1", self.process.port), backlog=1024).detach()
            return TCPStore(
                self.process.master,
                self.process.port,
                is_master=listens,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
                master_listen_fd=listener,
            )

        return self._ask(connect, seconds)

    def _part_of(self, store: Any, part: str) -> Any:
        from torch.distributed import PrefixStore

        return PrefixStore(f"{self.attempt}/{part}", store)

    def open_group_store(self) -> Any:
        """Return a store for a process group, over a connection of its own, so that its waits block no others."""
        return self._part_of(self._connect(False, HANDSHAKE_SECONDS), "group")

    def put(self, key: str, value: Any) -> None:
        self._ask(lambda: self._store.set(key, encode(key, value, self.secret)), HANDSHAKE_SECONDS)

    def get(self, key: str, seconds: float) -> Any:
        """Return the value that another process sets.

        Raises:
            TimeoutError: no process set it in time.
        """
        from torch.distributed import DistStoreError

        def wait() -> Any:
            try:
                self._store.wait([key], timedelta(seconds=max(0.05, seconds)))
            except DistStoreError:
                return None
            return self._store.get(key)

        answer = self._ask(wait, max(0.0, seconds))
        if answer is None:
            raise TimeoutError(f"no {key} within {seconds:.0f} s")
        return decode(key, answer, self.secret)

    def count(self, key: str, add: int = 0) -> int:
        """Add to a counter and return it."""
        return int(self._ask(lambda: self._store.add(key, add), HANDSHAKE_SECONDS))

    def _ask(self, question: Callable[[], Any], seconds: float) -> Any:
        """Return the store's answer, with a limit: over a cut link it would wait for ever, deaf to Ctrl-C."""
        try:
            return run_with_limit(question, seconds + GRACE_SECONDS)
        except Exception as error:
            raise RendezvousError(one_line(error)) from None

    def gather(self, key: str, numbers: Iterable[int], seconds: float) -> dict[int, Any]:
        """Return `key/number` of each number that is set before the time is up."""
        deadline = time.monotonic() + seconds
        values = {}
        for number in numbers:
            try:
                values[number] = self.get(f"{key}/{number}", deadline - time.monotonic())
            except TimeoutError:
                continue
        return values

    def leave(self) -> None:
        """Wait briefly for the others, so that the process that holds the store ends last and cuts nobody off.

        A launcher ends all processes of a node as soon as one has failed. All output is written by now and each process
        has to end with its own exit code, so the launcher's SIGTERM is ignored from here on.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        deadline = time.monotonic() + LEAVE_SECONDS
        try:
            came = self.count("came")
            self.count("left", 1)
            self.wait_for_count("left", came, deadline)
            if self.listens:
                self.wait_for_count("gone", came - 1, deadline)
            else:
                self.count("gone", 1)
        except RendezvousError:
            return

    def wait_for_count(self, key: str, count: int, deadline: float) -> None:
        """Wait until a counter is at least `wanted`, or the time is up."""
        while self.count(key) < count and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def join_rendezvous(
    process: ProcessInfo, master_is_here: bool, seconds: float
) -> tuple[Rendezvous | None, list[Check]]:
    """Connect to the store and wait for all processes.

    Returns:
        the rendezvous, None where the store cannot be reached; and the table's rows about it.
    """
    listens = hosts_store(process, master_is_here)
    node, port = process.ranks.node_rank, process.port
    rows: list[Check] = []
    began = time.monotonic()

    def no_answer(outcome: str) -> Check:
        waited = time.monotonic() - began
        return check_master_answers(process.master, port, outcome, waited).row("master port", node)

    if not listens:
        outcome = wait_for_port(process.master, port, seconds)
        rows.append(no_answer(outcome))
        if outcome:
            return None, rows
    try:
        rendezvous = Rendezvous(process, listens, min(HANDSHAKE_SECONDS, seconds))
    except RendezvousError as error:
        if listens and "timed out" not in str(error).lower():
            return None, [check_free_port(port, f"another program ({error})").row("master port", node)]
        return None, [no_answer("timed out" if listens else "another program")]
    try:
        rows.append(call_roll(rendezvous, seconds))
    except RendezvousError as error:
        if SECRET in str(error):
            remedy = f"Node 0 ({process.master}) and this node do not share a secret: {error}."
        else:
            remedy = f"Node 0 ({process.master}) went away while this node waited for the others: look at its output."
        rows.append(Check("arrived", {node: process.host}, "failure", remedy))
    return rendezvous, rows


def call_roll(rendezvous: Rendezvous, seconds: float) -> Check:
    """Announce this process and learn which others are here: rank 0 waits for all and tells everyone at once."""
    process = rendezvous.process
    ranks = process.ranks
    me = Arrival(ranks.rank, ranks.node_rank, process.host, ranks.nodes, ranks.world_size, ranks.local_world_size)
    rendezvous.put(f"who/{rendezvous.count('came', 1)}", dataclasses.asdict(me))
    began = time.monotonic()
    # Two nodes may both take themselves for node 0.
    if ranks.rank == 0 and rendezvous.count("deciders", 1) == 1:
        rendezvous.wait_for_count("came", ranks.world_size, began + seconds)
        roll = _collect_roll(rendezvous, time.monotonic() - began)
        rendezvous.put("roll", roll)
    else:
        try:
            roll = rendezvous.get("roll", seconds + GRACE_SECONDS)
        except TimeoutError:
            roll = _collect_roll(rendezvous, time.monotonic() - began)
    return _judge_roll(roll, process)


def _collect_roll(rendezvous: Rendezvous, waited: float) -> dict[str, Any]:
    ranks = rendezvous.process.ranks
    came = rendezvous.gather("who", range(1, rendezvous.count("came") + 1), GRACE_SECONDS)
    return {
        "present": list(came.values()),
        "waited": waited,
        "in_time": len(came) >= ranks.world_size,
        "nodes": ranks.nodes,
        "world_size": ranks.world_size,
    }


def _judge_roll(roll: Any, process: ProcessInfo) -> Check:
    address = f"{process.master}:{process.port}"
    try:
        present = [Arrival(**arrival) for arrival in roll["present"]]
        return check_arrivals(roll["world_size"], roll["nodes"], present, roll["waited"], address, roll["in_time"])
    except (TypeError, KeyError):
        raise RendezvousError(
            "the roll has fields that preflight does not send; another program writes to this store"
        ) from None
