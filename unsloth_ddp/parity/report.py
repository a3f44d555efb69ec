"""Write the result of a parity check as a table and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from unsloth_ddp.parity.comparison import LaunchComparison, Tolerance
from unsloth_ddp.parity.launches import LEARNING_RATE
from unsloth_ddp.parity.run import ParityCheck
from unsloth_ddp.utils.json_file import write_as_asked
from unsloth_ddp.utils.tables import Column, render_table
from unsloth_ddp.utils.versions import versions

COLOURS = {"agrees": "green", "differs": "bold red", "failed": "bold red"}
COLUMNS = [
    Column("launched by"),
    *(
        Column(name, "right")
        for name in ("processes", "rows per device x accumulation", "weight update", "loss", "seconds")
    ),
    Column("verdict", styles=COLOURS),
]


def render_comparisons(rows: Sequence[LaunchComparison], *, width: int | None = None, colour: bool = False) -> str:
    """Return the table, its first line the reference."""
    cells = []
    for row in rows:
        differences = [
            "-" if d is None or row.verdict == "reference" else "0" if d == 0 else f"{d:.1e}"
            for d in (row.update, row.loss)
        ]
        launch = row.launch
        numbers = [str(launch.processes), launch.shape, *differences, f"{row.seconds:.0f}"]
        cells.append([launch.launcher, *numbers, row.verdict])
    title = "Relative difference from the first line"
    return render_table(COLUMNS, cells, title=title, width=width, colour=colour)


def write_result(
    path: Path,
    rows: Sequence[LaunchComparison],
    check: ParityCheck,
    tolerance: Tolerance,
    agree: bool,
    errors: list[str],
) -> None:
    """Write everything that was measured as JSON.

    Raises:
        UserError: the file cannot be written.
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
