"""A check as a table and as JSON."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from unsloth_ddp.parity.launches import LEARNING_RATE
from unsloth_ddp.parity.run import Check
from unsloth_ddp.parity.verdicts import Row, Tolerance
from unsloth_ddp.utils.json_file import write_as_asked
from unsloth_ddp.utils.versions import versions


def print_table(rows: Sequence[Row]) -> None:
    """The table, its first line the reference."""
    table = Table(box=box.SIMPLE, title="Difference from the first line, relative", title_justify="left")
    table.add_column("launch")
    for name in ("processes", "rows a device x accumulation", "weight update", "loss", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in rows:
        differences = [
            "-" if d is None or row.verdict == "reference" else "0" if d == 0 else f"{d:.1e}"
            for d in (row.update, row.loss)
        ]
        launch = row.launch
        table.add_row(
            launch.launcher, str(launch.processes), launch.shape, *differences, f"{row.seconds:.0f}", row.verdict
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def write_json(
    path: Path, rows: Sequence[Row], check: Check, tolerance: Tolerance, agree: bool, errors: list[str]
) -> None:
    """Everything that was measured.

    Raises:
        UserError: it cannot be written.
    """
    content = {
        "agree": agree,
        "tolerance": dataclasses.asdict(tolerance),
        "precision": check.precision,
        "steps": check.steps,
        "learning_rate": LEARNING_RATE,
        "gpus": len(check.gpus),
        "settings": dataclasses.asdict(check.settings),
        "launches": [dataclasses.asdict(row) for row in rows],
        "errors": errors,
        "versions": versions(),
    }
    write_as_asked("--json", path, content)
