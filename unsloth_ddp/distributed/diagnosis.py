"""What is surely wrong with the ranks of a run, from what was last heard of each: plain values in, one sentence out."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unsloth_ddp.distributed.ranks import RankLocation
from unsloth_ddp.utils.errors import UserError

# In these phases a rank's threads get their turn every few milliseconds, so silence means that something is wrong.
# Elsewhere a library may keep Python waiting while it reads or writes gigabytes, and PATIENCE applies.
STEADY = ("training", "evaluating")
PATIENCE = 10
# How long the real cause may take to arrive after its consequences (connections closed by peers).
GRACE = 3.0
RANKS_LISTED = 16
LONGEST_TEXT = 20_000

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

    place: RankLocation
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
