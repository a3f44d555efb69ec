"""Print the report as text: edits by kind, then every warning with its place."""

from __future__ import annotations

import shlex
from collections import Counter

from unsloth_ddp.notebook.types import ConversionReport, ReportEntry


def summary(report: ConversionReport, outcome: str) -> str:
    """Return a short table for the terminal; `outcome` says where the script was written."""
    lines = [f"{report.notebook} {outcome}"]
    counts = Counter(entry.kind for entry in report.edits)
    width = max((len(kind) for kind in counts), default=0)
    for kind, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        example = next(entry.message for entry in report.edits if entry.kind == kind)
        lines.append(f"  {count:4}  {kind:<{width}}  {example}")
    if not report.warnings:
        lines.append("no warnings")
    else:
        lines.append(f"{len(report.warnings)} warning{'s' * (len(report.warnings) > 1)}, marked `# ddp: CHECK:`")
        lines += [f"  {_place(entry)}{entry.kind}: {entry.message}" for entry in report.warnings]
    if report.requirements:
        lines.append(f"the notebook installed: pip install {shlex.join(report.requirements)}")
    return "\n".join(lines)


def _place(entry: ReportEntry) -> str:
    cell = f"cell {entry.cell}, " if entry.cell is not None else ""
    line = f"line {entry.line}: " if entry.line is not None else ""
    return cell + line
