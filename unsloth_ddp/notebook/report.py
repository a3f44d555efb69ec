"""The report as text: edits by kind, then every warning with its place."""

from __future__ import annotations

from collections import Counter

from unsloth_ddp.notebook.types import Finding, Report


def summary(report: Report, outcome: str) -> str:
    """A short table for the terminal; `outcome` says where the script went."""
    lines = [f"{report.notebook} {outcome}"]
    counts = Counter(finding.kind for finding in report.edits)
    width = max((len(kind) for kind in counts), default=0)
    for kind, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        example = next(finding.message for finding in report.edits if finding.kind == kind)
        lines.append(f"  {count:4}  {kind:<{width}}  {example}")
    if not report.warnings:
        lines.append("no warnings")
    else:
        lines.append(f"{len(report.warnings)} warning{'s' * (len(report.warnings) > 1)}, marked `# ddp: CHECK:`")
        lines += [f"  {_place(finding)}{finding.kind}: {finding.message}" for finding in report.warnings]
    return "\n".join(lines)


def _place(finding: Finding) -> str:
    cell = f"cell {finding.cell}, " if finding.cell is not None else ""
    line = f"line {finding.line}: " if finding.line is not None else ""
    return (cell + line) or ""
