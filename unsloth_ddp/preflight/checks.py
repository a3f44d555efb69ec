"""Define the rows of preflight's table, merge them over nodes, and derive the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from unsloth_ddp.utils.units import counted

Verdict = Literal["ok", "warning", "failure"]
SEVERITY: dict[Verdict, int] = {"ok": 0, "warning": 1, "failure": 2}


@dataclass(frozen=True)
class Check:
    """One row of the table: the property checked, the value seen on each node, the verdict and the remedy."""

    name: str
    values: dict[int, str]
    verdict: Verdict = "ok"
    remedy: str = ""


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


def not_checked(name: str, node: int, reason: str) -> Check:
    """Return a warning for a check that could not run; it says nothing about the node."""
    return Check(name, {node: f"not checked: {reason}"}, "warning", "Preflight could not check this; check it by hand.")


def summarize_checks(checks: Sequence[Check]) -> str:
    """Return `2 failures (data, kit) and 1 warning (clock)`, or `all ok`."""
    parts = []
    for verdict in ("failure", "warning"):
        names = [check.name for check in checks if check.verdict == verdict]
        if names:
            parts.append(f"{counted(len(names), verdict)} ({', '.join(names)})")
    return " and ".join(parts) or "all ok"
