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
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from unsloth_ddp.config.parse import Settings
from unsloth_ddp.distributed.connections import Peer, connect
from unsloth_ddp.distributed.diagnosis import GRACE, RANKS_LISTED, Bye, Finding, Limits, Seen, bye_of, judge, limits_of
from unsloth_ddp.distributed.exit_codes import note_exit_code
from unsloth_ddp.distributed.ranks import RankLocation, this_location
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.known_errors import explain

logger = logging.getLogger("unsloth_ddp")

END_SECONDS = 8.0

KIT = os.path.dirname(os.path.dirname(__file__)) + os.sep


def location(thread: int) -> str:
    """Where a thread stands: its innermost three frames, and the innermost one of this kit; not in this module."""
    frame = sys._current_frames().get(thread)
    places: list[str] = []
    depth = 0
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None:
        code, depth = frame.f_code, depth + 1
        kit = code.co_filename.startswith(KIT)
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
    sockets = connect(settings, runtime) if runtime.ranks.world_size > 1 and settings.watch_timeout else None
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


class Watch:
    """The watching thread of one rank: of all others in the main process, of the main process elsewhere."""

    def __init__(self, runtime: Runtime, limits: Limits, sockets: dict[int, socket.socket]) -> None:
        now = time.monotonic()
        self.runtime = runtime
        self.ranks = runtime.ranks
        self.limits = limits
        self.peers = {rank: Peer(s, Seen(runtime.locations[rank], now, now)) for rank, s in sockets.items()}
        self.own = Seen(runtime.locations[self.ranks.rank], now, now)
        me = this_location(self.ranks)
        self.neighbours = [
            p for p in runtime.locations if p.host == me.host and p.node == me.node and p.rank != me.rank
        ]
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


def _status(place: RankLocation) -> str | None:
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
