"""Ranks that watch each other, so that one that dies, freezes or is cut off is named and ends the others in seconds.

Every rank has a daemon thread with a TCP connection to the one in the main process. Both sides send a sign of life
every few seconds; the main process also learns each rank's step and what its training thread is at. What is wrong
is decided by `judge`, from plain values. The main process says it, tells the others, and every rank writes the stacks
of its threads to its log and ends from that thread, because the training thread may be waiting in a collective for
ever. If it is the main process that is gone, each rank finds that out alone, and the first of each node says it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hmac
import json
import logging
import os
import re
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from unsloth_ddp.errors import UserError
from unsloth_ddp.explain import explain
from unsloth_ddp.runtime import Place, Runtime, note_exit_code, this_place
from unsloth_ddp.settings import Settings

logger = logging.getLogger("unsloth_ddp")

# In these phases a rank's threads get their turn every few milliseconds, so silence means that something is wrong.
# Elsewhere a library may keep Python waiting while it reads or writes gigabytes, and PATIENCE applies.
STEADY = ("training", "evaluating")
PATIENCE = 10
# How long the real cause may take to arrive after its consequences (connections closed by peers).
GRACE = 3.0
CONNECT_SECONDS = 30.0
END_SECONDS = 8.0
RANKS_LISTED = 16
LONGEST_TEXT = 20_000

KIT = os.path.dirname(__file__)

# What an exception says when another rank went away, rather than what went wrong first.
SECONDARY = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|gloo|NCCL|nccl|Timed out waiting|TCPStore|"
    r"Socket Timeout|heartbeat|rank \d+ failed:|DistBackendError|DistNetworkError|DistStoreError|wait timeout",
)


@dataclass(frozen=True)
class Bye:
    """How a rank said that it leaves.

    `kind`: done (with `code`), user (a UserError), told (by a signal), failed, or secondary (a failure that looks like
    the consequence of another rank's).
    """

    kind: str
    text: str
    at: float
    code: int = 0
    traceback: str = ""


@dataclass
class Seen:
    """What is known of one rank."""

    place: Place
    heard: float
    moved: float
    step: int = 0
    moves: int = 0
    phase: str = "preparing"
    where: str = ""
    # The operating system says that the process is stopped (SIGSTOP, a debugger).
    stopped: bool = False
    # Why the connection ended.
    lost: str | None = None
    bye: Bye | None = None

    def update(self, beat: dict[str, Any], now: float) -> None:
        """Take in a sign of life."""
        if beat["moves"] != self.moves:
            self.moved = now
        self.heard, self.stopped = now, False
        self.step, self.moves, self.phase, self.where = beat["step"], beat["moves"], beat["phase"], beat["where"]

    def __str__(self) -> str:
        state = f"left ({self.bye.kind})" if self.bye else self.phase
        return f"{self.place}: step {self.step}, {state}" + (
            f", at {self.where}" if self.where and not self.bye else ""
        )


@dataclass(frozen=True)
class Limits:
    """Seconds: of silence; without a step while training; between two signs of life."""

    silence: float
    stuck: float
    interval: float


@dataclass(frozen=True)
class Finding:
    """What ended the run: one sentence, who is meant, the exit code, and the original error where there is one."""

    sentence: str
    accused: tuple[int, ...]
    code: int = 1
    traceback: str = ""
    frozen: bool = False


def limits_of(watch_timeout: float, ddp_timeout: float) -> Limits:
    """The limits that follow from the options; the collectives' own timeout would blame who waits, so come first."""
    interval = min(3.0, watch_timeout / 5, ddp_timeout / 10)
    return Limits(silence=watch_timeout, stuck=ddp_timeout - 2 * interval, interval=interval)


def judge(seen: Mapping[int, Seen], now: float, limits: Limits, hurry: bool = False) -> Finding | None:
    """What is surely wrong with these ranks at the time `now`, or None.

    Args:
        seen: the ranks judged, by rank; those that said goodbye included.
        hurry: something is known to be wrong already, so nobody's silence is taken for work.
    """
    everybody = list(seen.values())
    left = sorted((s for s in everybody if s.bye), key=lambda s: s.bye.at if s.bye else now)
    for s in left:
        if s.bye and s.bye.kind == "failed":
            return _failure(s)
    dead = [s for s in everybody if s.lost is not None and s.bye is None]
    if dead:
        return _dead(dead)
    here = [s for s in everybody if s.bye is None]
    hurry = hurry or any(s.bye and s.bye.kind == "secondary" for s in left)
    silent = [s for s in here if now - s.heard > _patience(s, limits, hurry)]
    if silent:
        return _silent(silent, now)
    if here and all(s.phase == here[0].phase and s.phase in STEADY for s in here):
        stuck = _stuck(here, now, limits)
        if stuck:
            return stuck
    if left and not any(now - s.heard > 3 * limits.interval for s in here):
        return _left_alone(left, here, now, limits)
    return None


def _patience(s: Seen, limits: Limits, hurry: bool) -> float:
    steady = hurry or s.stopped or s.phase in STEADY
    return limits.silence if steady else limits.silence * PATIENCE


def _names(ranks: list[Seen]) -> str:
    return ", ".join(str(s.place) for s in ranks[:RANKS_LISTED]) + (" and more" if len(ranks) > RANKS_LISTED else "")


def _verb(ranks: list[Seen], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many


def _failure(s: Seen) -> Finding:
    assert s.bye is not None
    sentence = f"{s.place} failed while {s.phase}, at step {s.step}: {s.bye.text}"
    return Finding(sentence, (s.place.rank,), traceback=s.bye.traceback)


def _dead(dead: list[Seen]) -> Finding:
    step = f"at step {dead[0].step} ({dead[0].phase})"
    accused = tuple(s.place.rank for s in dead)
    if dead[0].lost:
        return Finding(
            f"{_names(dead)} cannot be reached any more, {step}: {dead[0].lost}; the host is down or cut off from the "
            "network.",
            accused,
        )
    return Finding(
        f"{_names(dead)} died without a word {step}: killed from outside (kill -9, or out of memory: see dmesg on that "
        "host) or crashed in native code.",
        accused,
    )


def _silent(silent: list[Seen], now: float) -> Finding:
    seconds = now - min(s.heard for s in silent)
    reason = (
        f"the {_verb(silent, 'process is', 'processes are')} stopped (SIGSTOP, or a debugger)"
        if all(s.stopped for s in silent)
        else "the process is frozen, or its host is down or cut off from the network"
    )
    sentence = (
        f"{_names(silent)} {_verb(silent, 'has', 'have')} not answered for {seconds:.0f} s, since step "
        f"{silent[0].step} ({silent[0].phase}): {reason} (--watch_timeout sets how long is waited)."
    )
    return Finding(sentence, tuple(s.place.rank for s in silent), frozen=True)


def _stuck(here: list[Seen], now: float, limits: Limits) -> Finding | None:
    """No rank of those here has done anything for longer than a collective may take."""
    if now - max(s.moved for s in here) <= limits.stuck:
        return None
    fewest = min(s.moves for s in here)
    behind = [s for s in here if s.moves == fewest]
    who = (
        f"{_names(behind)} {_verb(behind, 'hangs', 'hang')} behind the others"
        if len(behind) < len(here)
        else "every rank hangs"
    )
    return Finding(
        f"{who} at step {behind[0].step} ({behind[0].phase}): no rank has moved for {limits.stuck:.0f} s (the limit is "
        "--ddp_timeout); logs/rank_N.log shows what each was doing.",
        tuple(s.place.rank for s in behind),
    )


def _left_alone(left: list[Seen], here: list[Seen], now: float, limits: Limits) -> Finding | None:
    """Ranks left in a way that all are expected to, and some have not, or only because the first ones were gone."""
    torn = [s for s in left if s.bye and s.bye.kind == "secondary"]
    behind = here + torn
    for s in left:
        bye, rank = s.bye, (s.place.rank,)
        if bye is None or not behind:
            continue
        waited = now - bye.at
        if bye.kind == "user" and waited > GRACE:
            return Finding(bye.text, rank, code=bye.code)
        if bye.kind == "told" and waited > GRACE:
            return Finding(f"{s.place} was told to end ({bye.text}) at step {s.step}, the others were not.", rank)
        if bye.kind == "done" and bye.code and waited > (GRACE if torn else limits.silence):
            return Finding(f"{s.place} left with code {bye.code} at step {s.step}, and {_names(behind)} did not.", rank)
    if torn and torn[0].bye and now - torn[0].bye.at > GRACE:
        return _failure(torn[0])
    return None


def bye_of(error: BaseException | None, now: float) -> Bye:
    """How a rank leaves that ends with `error`, or well."""
    if error is None:
        return Bye("done", "", now)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1 if error.code else 0
        return Bye("done", "", now, code=code)
    if isinstance(error, UserError):
        return Bye("user", str(error), now, code=error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return Bye("told", "SIGINT", now)
    text = f"{type(error).__name__}: {error}".strip()
    told = "".join(traceback.format_exception(error))[-LONGEST_TEXT:]
    kind = "secondary" if SECONDARY.search(text) else "failed"
    return Bye(kind, _first_lines(text), now, traceback=told)


def _first_lines(text: str) -> str:
    """An error's text in one line that can be read."""
    line = " ".join(text.split())
    return line if len(line) <= 500 else line[:500] + " ..."


def location(thread: int) -> str:
    """Where a thread stands: its innermost three frames, and the innermost one of this kit; not in this module."""
    frame = sys._current_frames().get(thread)
    places: list[str] = []
    depth = 0
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None:
        code, depth = frame.f_code, depth + 1
        kit = os.path.dirname(code.co_filename) == KIT
        if depth <= 3 or kit:
            places.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        if kit:
            break
        frame = frame.f_back
    return " < ".join(places)


def log_path() -> str | None:
    """This rank's log file, once there is one."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            return handler.baseFilename
    return None


@contextlib.contextmanager
def watched(settings: Settings, runtime: Runtime) -> Iterator[Callable[[int], None]]:
    """Watch the ranks of a run for as long as this lasts; where one is lost, every process is ended.

    An exception that leaves a rank is told to the main process, which says it once for all, original traceback
    included; then the processes end with code 1 (a UserError is left to the caller).

    Yields what a rank that is told to end at once (by a signal) ends with: a goodbye, then os._exit with this code.
    """
    sockets = _connect(settings, runtime) if runtime.ranks.world_size > 1 and settings.watch_timeout else None
    if sockets is None:
        yield os._exit
        return
    watch = Watch(runtime, limits_of(settings.watch_timeout, settings.ddp_timeout), sockets)
    watch.start()
    try:
        yield watch.end_told
    except BaseException as error:
        watch.leave(error)
        raise
    else:
        watch.leave(None)


@dataclass
class Peer:
    """A connection to another rank, and what has arrived of its next message."""

    socket: socket.socket
    seen: Seen
    buffer: bytes = b""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: dict[str, Any]) -> None:
        """Send one line of JSON; that a peer is gone is found when reading."""
        with self.lock, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived; the end of the connection is noted in `seen.lost`."""
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError as error:
            # Raised by this side's own timeout without a number, by the kernel's with ETIMEDOUT.
            if error.errno is None:
                return []
            data, self.seen.lost = b"", "Connection timed out"
        except ConnectionResetError:
            # A process that dies with unread messages resets its connections.
            data = b""
        except OSError as error:
            data, self.seen.lost = b"", error.strerror or str(error)
        if not data:
            self.seen.lost = self.seen.lost or ""
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Watch:
    """The watching thread of one rank: of all others in the main process, of the main process elsewhere."""

    def __init__(self, runtime: Runtime, limits: Limits, sockets: dict[int, socket.socket]) -> None:
        now = time.monotonic()
        self.runtime = runtime
        self.ranks = runtime.ranks
        self.limits = limits
        self.peers = {rank: Peer(s, Seen(runtime.places[rank], now, now)) for rank, s in sockets.items()}
        self.own = Seen(runtime.places[self.ranks.rank], now, now)
        me = this_place(self.ranks)
        self.neighbours = [p for p in runtime.places if p.host == me.host and p.node == me.node and p.rank != me.rank]
        self.training_thread = threading.get_ident()
        self.released = threading.Event()
        self.wakes, self.wake = socket.socketpair()
        self.thread = threading.Thread(target=self._guarded, name="watch", daemon=True)
        self.ending = threading.Event()

    # ---- what the training thread calls ----

    def start(self) -> None:
        """Begin to watch."""
        self.runtime.progress.changed = self._send_beat
        self.wakes.setblocking(False)
        self.wake.setblocking(False)
        _close_in_children(self)
        self.thread.start()

    def leave(self, error: BaseException | None) -> None:
        """Say goodbye; after a failure the thread ends the process while this waits."""
        bye = bye_of(error, time.monotonic())
        if error is not None and bye.kind in ("failed", "secondary") and log_path():
            logger.error("this rank failed: %s", bye.text, exc_info=error)
        self._send_beat()
        self.own.bye = bye
        for peer in self.peers.values():
            # What the main process finds, its own failures included, reaches the others as its verdict.
            if not self.ranks.is_main or bye.kind in ("user", "told"):
                peer.send({"bye": [bye.kind, bye.text, bye.code, bye.traceback]})
        self._notify()
        if bye.kind in ("failed", "secondary"):
            # The verdict is due within the limits; should it never come, the error goes its way as without a watch.
            self.thread.join(timeout=self.limits.silence + 10 * GRACE)
        elif bye.kind == "done" and self.ranks.is_main:
            # Others may still be writing; one of them that dies now is to be named as before.
            self.released.wait()
        elif bye.kind != "done":
            self.released.set()

    def _notify(self) -> None:
        with contextlib.suppress(OSError):
            self.wake.send(b"\0")

    def end_told(self, code: int) -> None:
        """End this process because it was told to: say goodbye first, or let what was found be said to its end."""
        if self.ending.is_set():
            self.thread.join(timeout=END_SECONDS)
        for peer in self.peers.values():
            peer.send({"bye": ["told", "by a signal", code, ""]})
        os._exit(code)

    # ---- the watching thread ----

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception:
            # A fault of the watch is no reason to end a run.
            logger.exception("the watch over the other ranks ended")
            self.released.set()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self.wakes, selectors.EVENT_READ)
        for peer in self.peers.values():
            selector.register(peer.socket, selectors.EVENT_READ, peer)
        due = time.monotonic()
        while not self.released.is_set():
            if time.monotonic() >= due:
                self._send_beat()
                self._look_at_neighbours()
                due = time.monotonic() + self.limits.interval
            wanted = max(0.0, due - time.monotonic())
            asked = time.monotonic()
            for key, _ in selector.select(timeout=wanted):
                if key.data is None:
                    self.wakes.recv(4096)
                    continue
                self._read(key.data)
                if key.data.seen.lost is not None:
                    selector.unregister(key.data.socket)
            now = time.monotonic()
            if now - asked > wanted + 2 * self.limits.interval:
                # This process was itself held up (suspended with the whole job, say); what others did is in the queue.
                for peer in self.peers.values():
                    peer.seen.heard = peer.seen.moved = now
            self._decide(now)

    def _read(self, peer: Peer) -> None:
        now = time.monotonic()
        for message in peer.receive():
            if "beat" in message:
                peer.seen.update(message["beat"], now)
            for rank in message.get("stopped", []):
                if rank in self.peers:
                    self.peers[rank].seen.stopped = True
            if "bye" in message:
                kind, text, code, told = message["bye"]
                peer.seen.bye = Bye(kind, text, now, code, told)
            if "abort" in message:
                self._end(message["abort"], message["code"], message["frozen"])

    def _decide(self, now: float) -> None:
        if self.ranks.is_main:
            beat = self._beat()
            self.own.update(beat, now)
            finding = judge({**{r: p.seen for r, p in self.peers.items()}, self.ranks.rank: self.own}, now, self.limits)
            if finding is not None:
                self._say_and_end(finding)
            everybody = [self.own, *(p.seen for p in self.peers.values())]
            if all(s.bye and s.bye.kind == "done" for s in everybody):
                for peer in self.peers.values():
                    peer.send({"bye": ["done", "", 0, ""]})
                self.released.set()
            return
        main = self.peers[0].seen
        hurry = self.own.bye is not None and self.own.bye.kind == "secondary"
        # The main process's verdict comes with its goodbye, so its goodbye alone is judged together with this rank.
        finding = judge({0: main, self.ranks.rank: self._here(now)}, now, self.limits, hurry)
        if finding is not None:
            self._end(finding.sentence, finding.code, [0] if finding.frozen else [], said=not self._speaks(main))
        if main.bye is not None and main.bye.kind == "done":
            self.released.set()

    def _here(self, now: float) -> Seen:
        """This rank, as one that is well: it judges the main process alone."""
        own = Seen(self.own.place, now, now, step=self.runtime.progress.step)
        if self.own.bye is not None and self.own.bye.kind in ("user", "told", "done"):
            own.bye = self.own.bye
        return own

    def _beat(self) -> dict[str, Any]:
        progress = self.runtime.progress
        return {
            "step": progress.step,
            "moves": progress.moves,
            "phase": progress.phase,
            "where": location(self.training_thread),
        }

    def _send_beat(self) -> None:
        beat = self._beat()
        for peer in self.peers.values():
            peer.send({"beat": beat})

    def _look_at_neighbours(self) -> None:
        """Tell the main process which ranks of this node the operating system has stopped."""
        stopped = [place.rank for place in self.neighbours if _status(place) == psutil.STATUS_STOPPED]
        for rank in stopped:
            if rank in self.peers:
                self.peers[rank].seen.stopped = True
        if stopped and not self.ranks.is_main:
            self.peers[0].send({"stopped": stopped})

    def _speaks(self, main: Seen) -> bool:
        """Whether this rank is the first of its node that is left, now that the main process is gone."""
        if main.bye is not None and main.bye.kind in ("user", "failed"):
            return False
        others = [p.rank for p in self.neighbours if p.rank != 0 and _status(p) is not None]
        return self.ranks.rank == min([self.ranks.rank, *others])

    # ---- the end ----

    def _say_and_end(self, finding: Finding) -> None:
        """In the main process: say what happened, tell the others, and end."""
        self.ending.set()
        _end_for_sure()
        os.write(2, self._report(finding).encode())
        frozen = list(finding.accused) if finding.frozen else []
        for peer in self.peers.values():
            peer.send({"abort": finding.sentence, "code": finding.code, "frozen": frozen})
        # Closing a connection with unread messages in it would throw away what was just sent.
        deadline = time.monotonic() + 2
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_WR)
        waiting = [p for p in self.peers.values() if p.seen.lost is None and p.seen.place.rank not in frozen]
        while waiting and time.monotonic() < deadline:
            for peer in waiting:
                peer.socket.settimeout(0.05)
                with contextlib.suppress(ValueError):
                    peer.receive()
            waiting = [p for p in waiting if p.seen.lost is None]
        self._end(finding.sentence, finding.code, frozen)

    def _report(self, finding: Finding) -> str:
        """The original error where there is one, the sentence, where every rank was, and what usually helps."""
        parts = [finding.traceback.rstrip() + "\n"] if finding.traceback else []
        parts.append(f"train_ddp.py: error: {finding.sentence}\n")
        if finding.code != 2:
            everybody = sorted([self.own, *(p.seen for p in self.peers.values())], key=lambda s: s.place.rank)
            shown = sorted(everybody, key=lambda s: (s.place.rank not in finding.accused, s.place.rank))[:RANKS_LISTED]
            parts += [f"  {s}\n" for s in sorted(shown, key=lambda s: s.place.rank)]
            if len(everybody) > RANKS_LISTED:
                parts.append(f"  and {len(everybody) - RANKS_LISTED} more\n")
            parts.append(explain(finding.traceback or finding.sentence))
        return "".join(parts)

    def _end(self, sentence: str, code: int, frozen: list[int], said: bool = True) -> None:
        """End this process: stacks to its log, frozen processes of this node killed, the exit code told."""
        self.ending.set()
        _end_for_sure()
        if not said:
            os.write(2, f"train_ddp.py: error: {sentence}\n".encode())
        for place in self.neighbours:
            if place.rank in frozen and _status(place) is not None:
                with contextlib.suppress(OSError):
                    os.kill(place.pid, signal.SIGKILL)
        path = log_path()
        with contextlib.suppress(OSError):
            if path is not None:
                with open(path, "a", encoding="utf-8") as log:
                    log.write(f"The run ended: {sentence}\nWhat every thread of this rank was doing:\n")
                    log.flush()
                    faulthandler.dump_traceback(file=log, all_threads=True)
            elif frozen:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        with contextlib.suppress(Exception):
            self.runtime.cleanup.close()
        note_exit_code(code)
        os._exit(code)


def _end_for_sure() -> None:
    """End this process in a few seconds even if Python gets stuck on the way, on a dead file system for instance."""
    faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=2)


def _status(place: Place) -> str | None:
    """What the operating system says of a process of this node; None: it is gone."""
    try:
        process = psutil.Process(place.pid)
        return process.status() if abs(process.create_time() - place.started) < 1 else None
    except psutil.Error:
        return None


def _close_in_children(watch: Watch) -> None:
    """Keep forked processes (loaders of data) from holding the connections open after this one has died."""
    mine = weakref.ref(watch)

    def forget() -> None:
        found = mine()
        if found is None:
            return
        for peer in found.peers.values():
            peer.socket.close()
        found.wake.close()
        found.wakes.close()
        found.runtime.progress.changed = lambda: None

    os.register_at_fork(after_in_child=forget)


# ---- connecting ----


def _connect(settings: Settings, runtime: Runtime) -> dict[int, socket.socket] | None:
    """Connections by rank: of the main process to all others, of each other to the main process.

    None, said once, where a rank cannot connect: it would take a firewall that lets the collectives through.
    """
    ranks, sockets, problem = runtime.ranks, {}, None
    listener = _listen(ranks.nodes == 1) if ranks.is_main else None
    offer = (listener.getsockname()[1], secrets.token_hex(32)) if listener else None
    told = runtime.gather(offer)[0]
    assert told is not None
    port, token = told
    try:
        if listener is not None:
            sockets = _accept_all(listener, token, ranks.world_size - 1)
        else:
            address = "127.0.0.1" if ranks.nodes == 1 else os.environ["MASTER_ADDR"]
            sockets = {0: _call(address, port, token, ranks.rank)}
    except OSError as error:
        problem = f"{runtime.places[ranks.rank]}: {error}"
    finally:
        if listener is not None:
            listener.close()
    problems = [text for text in runtime.gather(problem) if text]
    if problems:
        for one in sockets.values():
            one.close()
        if ranks.is_main:
            print(f"The ranks are not watched, because they cannot reach port {port} of rank 0 ({problems[-1]}).")
        return None
    for one in sockets.values():
        _set_timeouts(one, settings.watch_timeout)
    return sockets


def _listen(one_node: bool) -> socket.socket:
    """A listening socket on a free port: of the loopback interface for one node, else of every interface."""
    if one_node:
        return socket.create_server(("127.0.0.1", 0), backlog=1024)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _accept_all(listener: socket.socket, token: str, count: int) -> dict[int, socket.socket]:
    """Connections of `count` ranks that know the token; strangers are sent away."""
    deadline = time.monotonic() + CONNECT_SECONDS
    sockets: dict[int, socket.socket] = {}
    while len(sockets) < count:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            one, _ = listener.accept()
        except TimeoutError:
            raise TimeoutError(f"{count - len(sockets)} of {count} ranks did not connect") from None
        one.settimeout(2)
        with contextlib.suppress(OSError, ValueError):
            line = b""
            while not line.endswith(b"\n") and len(line) < 200:
                line += one.recv(1) or b"\n"
            known, rank = line.decode().split()
            if hmac.compare_digest(known, token):
                sockets[int(rank)] = one
                continue
        one.close()
    return sockets


def _call(address: str, port: int, token: str, rank: int) -> socket.socket:
    one = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
    one.sendall(f"{token} {rank}\n".encode())
    return one


def _set_timeouts(one: socket.socket, seconds: int) -> None:
    """Have the kernel give up on a host that no longer acknowledges, whatever the process over there is doing."""
    one.settimeout(5)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)
