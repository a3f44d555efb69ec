"""Detect within seconds that a rank has died, frozen or lost its network, name it, and end all ranks.

Every rank has a daemon thread with a TCP connection to the main process's thread. Both sides send a heartbeat every
few seconds; those to the main process also hold the rank's step and the place in the code where its training thread is.
`judge` decides from plain values whether something is wrong. The main process then prints the sentence and sends it to
the others. Every rank writes the stacks of its threads to its log and ends from the watchdog thread, because the
training thread may be blocked in a collective forever. Each rank detects the loss of the main process by itself, and
the first rank of each node prints it.
"""

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

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.exit_codes import EXIT_USER_ERROR, first_to_tell, note_exit_code
from unsloth_ddp.distributed.ranks import RankLocation, seconds_after_boot, this_location
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.watch.connections import Peer, connect
from unsloth_ddp.distributed.watch.diagnosis import (
    GRACE_SECONDS,
    RANKS_LISTED,
    Diagnosis,
    ExitNotice,
    Limits,
    RankStatus,
    exit_notice_for,
    judge,
    limits_from,
)
from unsloth_ddp.utils.known_errors import explain
from unsloth_ddp.utils.redaction import hide
from unsloth_ddp.utils.streams import print_to_stderr

logger = logging.getLogger("unsloth_ddp")

# Longest time that the end of this process may take before it is forced.
END_SECONDS = 8.0
KIT = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep


def describe_stack(thread: int) -> str:
    """Return a thread's innermost three frames and the innermost one of this kit, without those of this module."""
    frame = sys._current_frames().get(thread)
    frames: list[str] = []
    depth = 0
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None:
        code, depth = frame.f_code, depth + 1
        kit = code.co_filename.startswith(KIT)
        if depth <= 3 or kit:
            frames.append(f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}")
        if kit:
            break
        frame = frame.f_back
    return " < ".join(frames)


def log_path() -> str | None:
    """Return the path of this rank's log file, None before there is one."""
    files = (
        handler.baseFilename for handler in logging.getLogger().handlers if isinstance(handler, logging.FileHandler)
    )
    return next(files, None)


@contextlib.contextmanager
def watched(settings: Settings, runtime: Runtime) -> Iterator[Callable[[int], None]]:
    """Watch the ranks of a run inside this block; if one is lost, end every process.

    An exception that leaves the block is sent to the main process, which prints it once with its traceback. Then all
    processes end with code 1. A UserError is left to the caller.

    Yields:
        the function that ends this process at once with an exit code (on a signal), after it has told the other ranks.
    """
    sockets = connect(settings, runtime) if runtime.ranks.world_size > 1 and settings.watch_timeout else None
    if sockets is None:
        yield os._exit
        return
    watchdog = Watchdog(runtime, limits_from(settings.watch_timeout, settings.ddp_timeout), sockets)
    watchdog.start()
    try:
        yield watchdog.end_process
    except BaseException as error:
        watchdog.leave(error)
        raise
    else:
        watchdog.leave(None)


class Watchdog:
    """The watchdog thread of one rank. The main process watches all other ranks, each of them the main process."""

    def __init__(self, runtime: Runtime, limits: Limits, sockets: dict[int, socket.socket]) -> None:
        now = time.monotonic()
        self.runtime = runtime
        self.ranks = runtime.ranks
        self.limits = limits
        self.peers = {rank: Peer(s, RankStatus(runtime.locations[rank], now, now)) for rank, s in sockets.items()}
        self.status = RankStatus(runtime.locations[self.ranks.rank], now, now)
        location = this_location(self.ranks)
        # The other ranks on this machine.
        self.neighbours = [
            other
            for other in runtime.locations
            if other.host == location.host and other.node == location.node and other.rank != location.rank
        ]
        self.training_thread = threading.get_ident()
        self.released = threading.Event()
        self.ending = threading.Event()
        self.wake_reader, self.wake_writer = socket.socketpair()
        self.thread = threading.Thread(target=self._run_guarded, name="watchdog", daemon=True)

    # ---- called by the training thread ----

    def start(self) -> None:
        self.runtime.progress.notify = self._send_heartbeat
        self.wake_reader.setblocking(False)
        self.wake_writer.setblocking(False)
        _close_in_children(self)
        self.thread.start()

    def leave(self, error: BaseException | None) -> None:
        """Send the exit notice. After a failure this waits for the watchdog thread, which ends the process."""
        notice = exit_notice_for(error, time.monotonic())
        if error is not None and notice.kind in ("failed", "secondary") and log_path():
            logger.error("this rank failed: %s", notice.text, exc_info=error)
        self._send_heartbeat()
        self.status.exit_notice = notice
        # The others learn of a failure of the main process from its diagnosis.
        if not self.ranks.is_main or notice.kind in ("user_error", "signalled"):
            self._send_to_all(_exit_message(notice))
        with contextlib.suppress(OSError):
            self.wake_writer.send(b"\0")
        if notice.kind in ("failed", "secondary"):
            # The diagnosis arrives within the limits; if it does not, the exception propagates as without a watchdog.
            self.thread.join(timeout=self.limits.silence + 10 * GRACE_SECONDS)
        elif notice.kind == "finished" and self.ranks.is_main:
            # The other ranks may still be writing, and one that dies now is to be named too.
            self.released.wait()
        elif notice.kind != "finished":
            self.released.set()

    def end_process(self, code: int) -> None:
        """End this process on a signal: tell the others first, or wait until a diagnosis that was found is printed."""
        if self.ending.is_set():
            self.thread.join(timeout=END_SECONDS)
        self._send_to_all(_exit_message(ExitNotice("signalled", "by a signal", time.monotonic(), code)))
        os._exit(code)

    # ---- the watchdog thread ----

    def _run_guarded(self) -> None:
        try:
            self._run()
        except Exception:
            # A fault of the watchdog is no reason to end a run.
            logger.exception("the watchdog over the other ranks ended")
            self.released.set()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self.wake_reader, selectors.EVENT_READ)
        for peer in self.peers.values():
            selector.register(peer.socket, selectors.EVENT_READ, peer)
        due = time.monotonic()
        while not self.released.is_set():
            if time.monotonic() >= due:
                self._send_heartbeat()
                self._report_suspended_neighbours()
                due = time.monotonic() + self.limits.interval
            timeout = max(0.0, due - time.monotonic())
            waiting_since = time.monotonic()
            for key, _ in selector.select(timeout=timeout):
                if key.data is None:
                    self.wake_reader.recv(4096)
                    continue
                self._read(key.data)
                if key.data.status.connection_lost is not None:
                    selector.unregister(key.data.socket)
            now = time.monotonic()
            if now - waiting_since > timeout + 2 * self.limits.interval:
                # This process was itself suspended (with the whole job, say); the others' messages are still unread.
                for peer in self.peers.values():
                    peer.status.last_heard = peer.status.last_progress = now
            self._decide(now)

    def _read(self, peer: Peer) -> None:
        now = time.monotonic()
        for message in peer.receive():
            if "heartbeat" in message:
                peer.status.update(message["heartbeat"], now)
            for rank in message.get("suspended", []):
                if rank in self.peers:
                    self.peers[rank].status.suspended = True
            if "exit" in message:
                peer.status.exit_notice = ExitNotice(at=now, **message["exit"])
            if "abort" in message:
                self._end(message["abort"], message["code"], message["frozen"])

    def _decide(self, now: float) -> None:
        """End the run if something is wrong, and this thread once every rank has finished."""
        if self.ranks.is_main:
            self.status.update(self._heartbeat(), now)
            everybody = {self.ranks.rank: self.status, **{rank: peer.status for rank, peer in self.peers.items()}}
            diagnosis = judge(everybody, now, self.limits)
            if diagnosis is not None:
                self._announce_and_end(diagnosis)
            if all(status.exit_kind == "finished" for status in everybody.values()):
                self._send_to_all(_exit_message(ExitNotice("finished", "", now)))
                self.released.set()
            return
        main = self.peers[0].status
        # The diagnosis of the main process comes before its exit notice, so only its own state is judged here.
        failure_known = self.status.exit_kind == "secondary"
        diagnosis = judge({0: main, self.ranks.rank: self._healthy_self(now)}, now, self.limits, failure_known)
        if diagnosis is not None:
            frozen = [0] if diagnosis.frozen else []
            self._end(diagnosis.sentence, diagnosis.code, frozen, printed=not self._prints_for_node(main))
        if main.exit_kind == "finished":
            self.released.set()

    def _healthy_self(self, now: float) -> RankStatus:
        """Return a status of this rank with no fault, so that only the main process is judged."""
        notice = self.status.exit_notice
        if notice is not None and notice.kind not in ("user_error", "signalled", "finished"):
            notice = None
        return RankStatus(self.status.location, now, now, step=self.runtime.progress.step, exit_notice=notice)

    def _heartbeat(self) -> dict[str, Any]:
        progress = self.runtime.progress
        return {
            "step": progress.step,
            "count": progress.count,
            "phase": progress.phase,
            "stack": describe_stack(self.training_thread),
        }

    def _send_heartbeat(self) -> None:
        self._send_to_all({"heartbeat": self._heartbeat()})

    def _send_to_all(self, message: dict[str, Any]) -> None:
        for peer in self.peers.values():
            peer.send(message)

    def _report_suspended_neighbours(self) -> None:
        """Tell the main process which ranks of this node the operating system has stopped."""
        suspended = [other.rank for other in self.neighbours if _process_state(other) == psutil.STATUS_STOPPED]
        for rank in suspended:
            if rank in self.peers:
                self.peers[rank].status.suspended = True
        if suspended and not self.ranks.is_main:
            self.peers[0].send({"suspended": suspended})

    def _prints_for_node(self, main: RankStatus) -> bool:
        """Return whether this rank is the first one left on its node, now that the main process is gone."""
        # Every rank raises a UserError, and the main process tells it even if its exit notice is lost with its
        # connection.
        if main.exit_kind in ("user_error", "failed") or self.status.exit_kind == "user_error":
            return False
        others = [o.rank for o in self.neighbours if o.rank != 0 and _process_state(o) is not None]
        return self.ranks.rank == min([self.ranks.rank, *others])

    # ---- the end ----

    def _announce_and_end(self, diagnosis: Diagnosis) -> None:
        """Print the diagnosis, send it to the other ranks, and end the main process."""
        self.ending.set()
        _force_end_later()
        if first_to_tell(diagnosis.sentence):
            print_to_stderr(self._report(diagnosis))
        frozen = list(diagnosis.ranks) if diagnosis.frozen else []
        self._send_to_all({"abort": diagnosis.sentence, "code": diagnosis.code, "frozen": frozen})
        # Closing a connection with unread messages in it would throw away what was just sent.
        deadline = time.monotonic() + 2
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_WR)
        open_peers = [p for r, p in self.peers.items() if p.status.connection_lost is None and r not in frozen]
        while open_peers and time.monotonic() < deadline:
            for peer in open_peers:
                peer.socket.settimeout(0.05)
                with contextlib.suppress(ValueError):
                    peer.receive()
            open_peers = [peer for peer in open_peers if peer.status.connection_lost is None]
        self._end(diagnosis.sentence, diagnosis.code, frozen)

    def _report(self, diagnosis: Diagnosis) -> str:
        """Return the original traceback if there is one, the sentence, the state of every rank, and known remedies."""
        parts = [diagnosis.traceback.rstrip() + "\n"] if diagnosis.traceback else []
        parts.append(f"train_ddp.py: error: {diagnosis.sentence}\n")
        if diagnosis.code != EXIT_USER_ERROR:
            everybody = [self.status, *(peer.status for peer in self.peers.values())]
            everybody.sort(key=lambda s: (s.location.rank not in diagnosis.ranks, s.location.rank))
            parts += [f"  {s}\n" for s in sorted(everybody[:RANKS_LISTED], key=lambda s: s.location.rank)]
            if len(everybody) > RANKS_LISTED:
                parts.append(f"  and {len(everybody) - RANKS_LISTED} more\n")
            parts.append(explain(diagnosis.traceback or diagnosis.sentence))
        return "".join(parts)

    def _end(self, sentence: str, code: int, frozen: list[int], printed: bool = True) -> None:
        """End this process: kill frozen processes of this node, write the stacks to the log, leave the exit code."""
        self.ending.set()
        _force_end_later()
        if not printed:
            print_to_stderr(f"train_ddp.py: error: {sentence}\n")
        for other in self.neighbours:
            if other.rank in frozen and _process_state(other) is not None:
                with contextlib.suppress(OSError):
                    os.kill(other.pid, signal.SIGKILL)
        path = log_path()
        with contextlib.suppress(OSError):
            if path is not None:
                with open(path, "a", encoding="utf-8") as log:
                    log.write(f"The run ended: {hide(sentence)}\nStacks of all threads of this rank:\n")
                    log.flush()
                    faulthandler.dump_traceback(file=log, all_threads=True)
            elif frozen:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        with contextlib.suppress(Exception):
            self.runtime.cleanup.close()
        note_exit_code(code, sentence=f"train_ddp.py: error: {sentence}")
        os._exit(code)


def _exit_message(notice: ExitNotice) -> dict[str, Any]:
    return {"exit": {"kind": notice.kind, "text": notice.text, "code": notice.code, "traceback": notice.traceback}}


def _force_end_later() -> None:
    """End this process after END_SECONDS even if Python gets stuck before, on a dead file system for instance."""
    faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=2)


def _process_state(location: RankLocation) -> str | None:
    """Return the operating system's state of a process on this node, None if it is gone."""
    try:
        process = psutil.Process(location.pid)
        return process.status() if abs(seconds_after_boot(process) - location.started) < 1 else None
    except psutil.Error:
        return None


def _close_in_children(watchdog: Watchdog) -> None:
    """Keep forked processes (loaders of data) from holding the connections open after this one has died."""
    reference = weakref.ref(watchdog)

    def close() -> None:
        watchdog = reference()
        if watchdog is None:
            return
        for peer in watchdog.peers.values():
            peer.socket.close()
        watchdog.wake_writer.close()
        watchdog.wake_reader.close()
        watchdog.runtime.progress.notify = None

    os.register_at_fork(after_in_child=close)
