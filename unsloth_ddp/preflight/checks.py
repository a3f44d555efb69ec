"""Run checks with a time limit, define the rows of preflight's table, and merge them over nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from unsloth_ddp.utils.errors import one_line
from unsloth_ddp.utils.units import counted

T = TypeVar("T")

CHECK_SECONDS = 20

Verdict = Literal["ok", "warning", "failure"]
SEVERITY: dict[Verdict, int] = {"ok": 0, "warning": 1, "failure": 2}


@dataclass(frozen=True)
class Check:
    """One row of the table: the property checked, the value seen on each node, the verdict and the remedy."""

    name: str
    values: dict[int, str]
    verdict: Verdict = "ok"
    remedy: str = ""


@dataclass(frozen=True)
class Finding:
    """What a check found on one node: the value shown, the verdict and the remedy."""

    shown: str
    verdict: Verdict = "ok"
    remedy: str = ""

    def row(self, name: str, node: int) -> Check:
        """Return the row of the table for this node."""
        return Check(name, {node: self.shown}, self.verdict, self.remedy)


def failure(shown: str, remedy: str) -> Finding:
    """Return a finding that prevents training."""
    return Finding(shown, "failure", remedy)


def warning(shown: str, remedy: str) -> Finding:
    """Return a finding that the user decides about."""
    return Finding(shown, "warning", remedy)


def run_check(name: str, node: int, check: Callable[[], Finding], seconds: float = CHECK_SECONDS) -> Check:
    """Run a check of one node with a time limit; an error or a timeout becomes a warning."""
    try:
        return run_with_limit(check, seconds).row(name, node)
    except Exception as error:
        return not_checked(f"{type(error).__name__}: {one_line(error)}").row(name, node)


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the most severe verdict; ok for none."""
    return max(verdicts, key=lambda v: SEVERITY[v], default="ok")


def exit_code(checks: Iterable[Check]) -> int:
    """Return 1 after a failure and 0 otherwise; the user decides about warnings."""
    return int(worst_verdict(check.verdict for check in checks) == "failure")


def merge_checks(checks: Sequence[Check]) -> list[Check]:
    """Merge the checks of all nodes to one row per name, in order of first appearance.

    A remedy that only some nodes need begins with their numbers.
    """
    rows: list[Check] = []
    for name in dict.fromkeys(check.name for check in checks):
        same = [check for check in checks if check.name == name]
        nodes = {node for check in same for node in check.values}
        remedies: dict[str, set[int]] = {}
        for check in same:
            if check.remedy:
                remedies.setdefault(check.remedy, set()).update(check.values)
        texts = [text if on == nodes else f"{name_nodes(on).capitalize()}: {text}" for text, on in remedies.items()]
        values = {node: value for check in same for node, value in check.values.items()}
        rows.append(Check(name, dict(sorted(values.items())), worst_verdict(c.verdict for c in same), "\n".join(texts)))
    return rows


def name_nodes(nodes: Iterable[int]) -> str:
    """Return `node 3`, or `nodes 0-3, 7`."""
    numbers = sorted(nodes)
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return f"node {text}" if len(numbers) == 1 else f"nodes {text}"


def not_checked(reason: str) -> Finding:
    """Return a warning for a check that could not run; it says nothing about the node."""
    return warning(f"not checked: {reason}", "Preflight could not check this; check it by hand.")


def summarize_checks(checks: Sequence[Check]) -> str:
    """Return `2 failures (data, kit) and 1 warning (clock)`, or `all ok`."""
    parts = []
    for verdict in ("failure", "warning"):
        names = [check.name for check in checks if check.verdict == verdict]
        if names:
            parts.append(f"{counted(len(names), verdict)} ({', '.join(names)})")
    return " and ".join(parts) or "all ok"


def run_with_limit(work: Callable[[], T], seconds: float) -> T:
    """Return the result of `work`, which may hang (a dead file system, a stuck driver), run in a thread of its own.

    Raises:
        TimeoutError: `work` did not end in time. Its thread is abandoned and does not keep the process alive.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return results[0]


def run_or_none(work: Callable[[], T], seconds: float) -> T | None:
    """Return the result of `work`, or None after the limit, as on a network file system whose server is gone."""
    try:
        return run_with_limit(work, seconds)
    except TimeoutError:
        return None
