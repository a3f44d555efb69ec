"""Decide from the last messages of every rank whether one of them has failed: plain values in, one sentence out."""

import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from unsloth_ddp.distributed.ranks import RankLocation
from unsloth_ddp.utils.errors import UserError, one_line
from unsloth_ddp.utils.redaction import hide

# In these phases the watchdog thread gets the interpreter lock every few milliseconds, so silence is a failure.
# In all others a library may hold the lock while it reads or writes gigabytes: silence may last BUSY_FACTOR times
# longer.
RESPONSIVE_PHASES = ("training", "evaluating")
BUSY_FACTOR = 10
# A hang is so many times the longest time that a phase of this run has gone without progress, and at least so many
# seconds: a network disk or the Hub may stall for minutes. Phases of which nothing is known yet have only the limits of
# the options.
USUAL_FACTOR, LEAST_HANG_SECONDS = 20, 900.0
# Seconds in which the message about a cause may arrive after the failures that it causes on other ranks.
GRACE_SECONDS = 3.0
# What happens once in a run has no usual time.
UNIQUE_PHASES = ("preparing", "finishing")
RANKS_LISTED = 16
LONGEST_TRACEBACK = 20_000
LONGEST_TEXT = 500

# Texts of exceptions that report the loss of another rank, and so not the first failure.
SECONDARY = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|gloo|NCCL|nccl|Timed out waiting|TCPStore|"
    r"Socket Timeout|heartbeat|rank \d+ failed:|DistBackendError|DistNetworkError|DistStoreError|wait timeout",
)

# finished: the run ended on this rank; user_error: a UserError; signalled: ended by a signal; failed: any other
# exception; secondary: an exception that looks like the consequence of another rank's failure.
ExitKind = Literal["finished", "user_error", "signalled", "failed", "secondary"]


@dataclass(frozen=True)
class ExitNotice:
    """The last message of a rank before it leaves: why, when it was received (`at`, in seconds), its exit code."""

    kind: ExitKind
    text: str
    at: float
    code: int = 0
    traceback: str = ""


@dataclass
class RankStatus:
    """The last known state of one rank. Times are in seconds of this process's monotonic clock."""

    location: RankLocation
    last_heard: float
    last_progress: float
    step: int = 0
    progress_count: int = 0
    phase: str = "preparing"
    stack: str = ""
    # The operating system reports the process as stopped (SIGSTOP, a debugger).
    suspended: bool = False
    # Why the connection ended; "" if it was closed without an error, None while it is open.
    connection_lost: str | None = None
    exit_notice: ExitNotice | None = None
    # The longest time without progress in each phase, so far.
    longest: dict[str, float] = field(default_factory=dict)

    @property
    def exit_kind(self) -> ExitKind | None:
        """The kind of the exit notice, None before there is one."""
        return self.exit_notice.kind if self.exit_notice else None

    def update(self, heartbeat: dict[str, Any], now: float) -> None:
        """Apply a heartbeat that arrived at `now`."""
        if heartbeat["count"] != self.progress_count:
            self.longest[self.phase] = max(self.longest.get(self.phase, 0.0), now - self.last_progress)
            self.last_progress = now
        self.last_heard, self.suspended = now, False
        self.step, self.progress_count = heartbeat["step"], heartbeat["count"]
        self.phase, self.stack = heartbeat["phase"], heartbeat["stack"]

    def mark_lost(self, cause: str) -> None:
        """Record that the connection ended; of two reasons the first one that says something stays."""
        self.connection_lost = self.connection_lost or cause

    def __str__(self) -> str:
        if self.exit_notice:
            return f"{self.location}: step {self.step}, exited ({self.exit_notice.kind.replace('_', ' ')})"
        return f"{self.location}: step {self.step}, {self.phase}" + (f", at {self.stack}" if self.stack else "")


@dataclass(frozen=True)
class Limits:
    """Limits in seconds: without a heartbeat, without progress while training, and between two heartbeats."""

    silence: float
    no_progress: float
    interval: float


@dataclass(frozen=True)
class Diagnosis:
    """The reason to end the run: one sentence, the ranks it names, the exit code, and the original traceback if any."""

    sentence: str
    ranks: tuple[int, ...]
    code: int = 1
    traceback: str = ""
    frozen: bool = False


def limits_from(watch_timeout: float, ddp_timeout: float) -> Limits:
    """Return the limits that follow from the options.

    They end before the timeout of the collectives, whose error names the ranks that wait instead of the one that hangs.
    """
    interval = min(3.0, watch_timeout / 5, ddp_timeout / 10)
    return Limits(silence=watch_timeout, no_progress=ddp_timeout - 2 * interval, interval=interval)


def judge(
    statuses: Mapping[int, RankStatus], now: float, limits: Limits, failure_known: bool = False
) -> Diagnosis | None:
    """Return what has certainly gone wrong with these ranks at the time `now`, or None.

    Args:
        statuses: the ranks to judge, by rank, those with an exit notice included.
        failure_known: something has failed already, so no rank's silence is taken for work.
    """
    everybody = list(statuses.values())
    exited = sorted((s for s in everybody if s.exit_notice), key=lambda s: s.exit_notice.at if s.exit_notice else now)
    if failed := next((s for s in exited if s.exit_kind == "failed"), None):
        return _diagnose_failure(failed)
    dead = [s for s in everybody if s.connection_lost is not None and s.exit_notice is None]
    if dead:
        return _diagnose_dead(dead)
    present = [s for s in everybody if s.exit_notice is None]
    failure_known = failure_known or any(s.exit_kind == "secondary" for s in exited)
    silent = [s for s in present if now - s.last_heard > limits.silence * _patience(s, failure_known)]
    if silent:
        return _diagnose_silent(silent, now)
    if present and all(s.phase == present[0].phase for s in present):
        hang = _diagnose_hang(present, now, limits)
        if hang:
            return hang
    if exited and not any(now - s.last_heard > 3 * limits.interval for s in present):
        return _diagnose_partial_exit(exited, present, now, limits)
    return None


def _patience(status: RankStatus, failure_known: bool) -> int:
    return 1 if failure_known or status.suspended or status.phase in RESPONSIVE_PHASES else BUSY_FACTOR


def _names(statuses: list[RankStatus]) -> str:
    names = ", ".join(str(s.location) for s in statuses[:RANKS_LISTED])
    return names + (" and more" if len(statuses) > RANKS_LISTED else "")


def _diagnose_failure(status: RankStatus) -> Diagnosis:
    assert status.exit_notice is not None
    notice = status.exit_notice
    sentence = f"{status.location} failed while {status.phase}, at step {status.step}: {notice.text}"
    return Diagnosis(sentence, (status.location.rank,), traceback=notice.traceback)


def _diagnose_dead(dead: list[RankStatus]) -> Diagnosis:
    names, step = _names(dead), f"at step {dead[0].step} ({dead[0].phase})"
    sentence = (
        f"{names} died without an error message {step}: killed from outside (kill -9, or out of memory: see dmesg on "
        "that host) or crashed in native code."
    )
    if lost := dead[0].connection_lost:
        sentence = f"{names} cannot be reached any more, {step}: {lost}; the host is down or cut off from the network."
    return Diagnosis(sentence, tuple(s.location.rank for s in dead))


def _diagnose_silent(silent: list[RankStatus], now: float) -> Diagnosis:
    seconds = now - min(s.last_heard for s in silent)
    single = len(silent) == 1
    cause = (
        f"the {'process is' if single else 'processes are'} stopped (SIGSTOP, or a debugger)"
        if all(s.suspended for s in silent)
        else "the process is frozen, or its host is down or cut off from the network"
    )
    sentence = (
        f"{_names(silent)} {'has' if single else 'have'} not answered for {seconds:.0f} s, since step {silent[0].step} "
        f"({silent[0].phase}): {cause} (--watch_timeout sets the limit)."
    )
    return Diagnosis(sentence, tuple(s.location.rank for s in silent), frozen=True)


def _hang_limit(present: list[RankStatus], limits: Limits) -> tuple[float, str]:
    """Return the seconds without progress after which these ranks hang in their phase, and why so many."""
    phase = present[0].phase
    allowed = limits.no_progress if phase in RESPONSIVE_PHASES else float("inf")
    longest = max((s.longest[phase] for s in present if phase in s.longest), default=0.0)
    usual = max(LEAST_HANG_SECONDS, USUAL_FACTOR * longest) if longest and phase not in UNIQUE_PHASES else float("inf")
    if usual < allowed:
        return usual, f"the longest time so far was {longest:.0f} s"
    return allowed, "--ddp_timeout sets the limit"


def _diagnose_hang(present: list[RankStatus], now: float, limits: Limits) -> Diagnosis | None:
    """Name the ranks that are behind if no rank has made progress for much longer than usual or than allowed."""
    limit, why = _hang_limit(present, limits)
    if now - max(s.last_progress for s in present) <= limit:
        return None
    fewest = min(s.progress_count for s in present)
    behind = [s for s in present if s.progress_count == fewest]
    who = (
        f"{_names(behind)} {'hangs' if len(behind) == 1 else 'hang'} behind the others"
        if len(behind) < len(present)
        else "every rank hangs"
    )
    return Diagnosis(
        f"{who} at step {behind[0].step} ({behind[0].phase}): no rank has made progress for {limit:.0f} s "
        f"({why}); logs/rank_N.log shows what each was doing.",
        tuple(s.location.rank for s in behind),
    )


def _diagnose_partial_exit(
    exited: list[RankStatus], present: list[RankStatus], now: float, limits: Limits
) -> Diagnosis | None:
    """Name the reason of ranks that exited while others did not follow, or failed only because those had gone."""
    secondary = [s for s in exited if s.exit_kind == "secondary"]
    others = present + secondary
    if not others:
        return None
    for status in exited:
        notice, ranks = status.exit_notice, (status.location.rank,)
        assert notice is not None
        waited = now - notice.at
        if notice.kind == "user_error" and waited > GRACE_SECONDS:
            return Diagnosis(notice.text, ranks, code=notice.code)
        if notice.kind == "signalled" and waited > GRACE_SECONDS:
            return Diagnosis(
                f"{status.location} was told to end ({notice.text}) at step {status.step}, the others were not.", ranks
            )
        patience = GRACE_SECONDS if secondary else limits.silence
        if notice.kind == "finished" and notice.code and waited > patience:
            return Diagnosis(
                f"{status.location} left with code {notice.code} at step {status.step}, and {_names(others)} did not.",
                ranks,
            )
    if secondary and secondary[0].exit_notice and now - secondary[0].exit_notice.at > GRACE_SECONDS:
        return _diagnose_failure(secondary[0])
    return None


def exit_notice_for(error: BaseException | None, now: float) -> ExitNotice:
    """Return the notice of a rank that ends with `error`, or without one, with secrets hidden."""
    if error is None:
        return ExitNotice("finished", "", now)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1 if error.code else 0
        return ExitNotice("finished", "", now, code=code)
    if isinstance(error, UserError):
        return ExitNotice("user_error", str(error), now, code=error.exit_code)
    if isinstance(error, KeyboardInterrupt):
        return ExitNotice("signalled", "SIGINT", now)
    if getattr(error, "alone", False):
        # A RunEnd of one rank says all there is to say.
        return ExitNotice("failed", one_line(hide(str(error)), LONGEST_TEXT), now)
    text = hide(f"{type(error).__name__}: {error}".strip())
    # Hidden before it is cut: half a secret would not be recognised.
    written = hide("".join(traceback.format_exception(error)))[-LONGEST_TRACEBACK:]
    kind: ExitKind = "secondary" if SECONDARY.search(text) else "failed"
    return ExitNotice(kind, one_line(text, LONGEST_TEXT), now, traceback=written)
