"""The checks as one table for people, and as JSON for programs."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unsloth_ddp.preflight.bandwidth import Timing
from unsloth_ddp.preflight.checks import Check, exit_code, named_nodes, summary, worst

COLOURS = {"ok": "green", "warning": "yellow", "failure": "bold red"}
# Logs have no width of their own.
LOG_WIDTH = 160
LEAST_WIDTH = 80


def render(checks: Sequence[Check], title: str, *, width: int | None = None, colour: bool = False) -> str:
    """The table: check, value of each node, verdict, what to do."""
    table = Table(title=Text(title), title_justify="left", box=box.ROUNDED, expand=False)
    table.add_column("Check", overflow="fold", min_width=12, max_width=24)
    table.add_column("Seen", overflow="fold", ratio=5)
    table.add_column("Verdict", no_wrap=True)
    table.add_column("What to do", overflow="fold", ratio=5)
    before = ""
    for check in checks:
        verdict = Text(check.verdict, style=COLOURS[check.verdict])
        if check.remedy or before:
            table.add_section()
        before = check.remedy
        table.add_row(Text(check.name), Text(seen(check.values)), verdict, Text(check.remedy))
    console = Console(file=StringIO(), width=width or terminal_width(), force_terminal=colour, highlight=False)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def terminal_width() -> int:
    """The terminal's width, or a log's."""
    return max(LEAST_WIDTH, shutil.get_terminal_size((LOG_WIDTH, 24)).columns) if sys.stdout.isatty() else LOG_WIDTH


def seen(values: Mapping[int, str]) -> str:
    """A value for every node, nodes that saw the same in one line."""
    if len(set(values.values())) == 1:
        return next(iter(values.values()))
    by_value: dict[str, list[int]] = {}
    for node, value in values.items():
        by_value.setdefault(value, []).append(node)
    return "\n".join(f"{named_nodes(nodes)}: {value}" for value, nodes in by_value.items())


def verdict_line(checks: Sequence[Check]) -> str:
    """The last line: what it comes to."""
    text = {
        "ok": "all is well; training can start",
        "warning": f"{summary(checks)}; training can start",
        "failure": f"{summary(checks)}; mend what failed before training",
    }[worst(check.verdict for check in checks)]
    return f"preflight: {text}."


def as_json(checks: Sequence[Check], hosts: Mapping[int, str], timings: Sequence[Timing]) -> dict[str, Any]:
    """Everything in the table, and the figures behind the speed rows."""
    return {
        "verdict": worst(check.verdict for check in checks),
        "exit_code": exit_code(checks),
        "nodes": {str(node): host for node, host in sorted(hosts.items())},
        "checks": [
            {**dataclasses.asdict(check), "values": {str(node): text for node, text in check.values.items()}}
            for check in checks
        ],
        "timings": [{**dataclasses.asdict(t), "bus_gbit_per_second": t.gbit} for t in timings],
    }
