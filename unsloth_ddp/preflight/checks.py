"""Rows of preflight's table: what was looked at, what each node showed, and what they come to together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "failure"]
SEVERITY: dict[Verdict, int] = {"ok": 0, "warning": 1, "failure": 2}


@dataclass(frozen=True)
class Check:
    """One row of the table: what was looked at, what each node showed, and what to do about it."""

    name: str
    values: dict[int, str]
    verdict: Verdict = "ok"
    remedy: str = ""


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The most severe of some verdicts; ok for none."""
    return max(verdicts, key=lambda v: SEVERITY[v], default="ok")


def exit_code(checks: Iterable[Check]) -> int:
    """1 after a failure, 0 otherwise: a warning is for the user to weigh."""
    return int(worst(check.verdict for check in checks) == "failure")


def merge(checks: Sequence[Check]) -> list[Check]:
    """One row a name, in order of first appearance; a remedy that only some nodes need says which."""
    rows: list[Check] = []
    for name in dict.fromkeys(check.name for check in checks):
        same = [check for check in checks if check.name == name]
        nodes = {node for check in same for node in check.values}
        remedies: dict[str, set[int]] = {}
        for check in same:
            if check.remedy:
                remedies.setdefault(check.remedy, set()).update(check.values)
        texts = [text if on == nodes else f"{named_nodes(on).capitalize()}: {text}" for text, on in remedies.items()]
        values = {node: value for check in same for node, value in check.values.items()}
        rows.append(Check(name, dict(sorted(values.items())), worst(c.verdict for c in same), "\n".join(texts)))
    return rows


def named_nodes(nodes: Iterable[int]) -> str:
    """`node 3`, or `nodes 0-3, 7`."""
    numbers = sorted(nodes)
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return f"node {text}" if len(numbers) == 1 else f"nodes {text}"


def unmade(name: str, node: int, reason: str) -> Check:
    """A check that could not be made, which is no verdict on the node."""
    return Check(name, {node: f"not checked: {reason}"}, "warning", "Look at this by hand; preflight could not.")


def summary(checks: Sequence[Check]) -> str:
    """`2 failures (data, kit) and 1 warning (clock)`, or `all ok`."""
    parts = []
    for verdict in ("failure", "warning"):
        names = [check.name for check in checks if check.verdict == verdict]
        if names:
            parts.append(f"{len(names)} {verdict}{'s' if len(names) > 1 else ''} ({', '.join(names)})")
    return " and ".join(parts) or "all ok"
