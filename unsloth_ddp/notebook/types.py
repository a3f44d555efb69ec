"""Define the plain values that the steps of a conversion pass to each other."""

import shlex
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from unsloth_ddp.utils.errors import UserError


class NotebookError(UserError):
    """A notebook that cannot be converted: one sentence with the value, the reason and the fix."""


@dataclass(frozen=True)
class ConversionOptions:
    """The user's choices.

    per_device_batch_size: rows a process takes at once; None keeps the notebook's own; "auto" keeps it too, but takes
        one row at once where Unsloth trains.
    tensorboard: report to TensorBoard whatever the notebook reports to.
    seed: for splits, shuffles and samples that have none.
    """

    per_device_batch_size: int | Literal["auto"] | None = "auto"
    tensorboard: bool = False
    seed: int = 3407


@dataclass
class ReportEntry:
    """One edit or one warning. Cells count from 1 and include markdown; the line is the script's."""

    kind: str
    message: str
    cell: int | None = None
    line: int | None = None


@dataclass
class ConversionReport:
    """Every edit that a conversion made, every warning, and what the notebook installed, each package once."""

    notebook: str
    edits: list[ReportEntry] = field(default_factory=list)
    warnings: list[ReportEntry] = field(default_factory=list)
    requirements: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        return asdict(self)

    def summary(self, outcome: str) -> str:
        """Return a short table for the terminal; `outcome` says where the script was written."""
        lines = [f"{self.notebook} {outcome}"]
        counts = Counter(entry.kind for entry in self.edits)
        width = max((len(kind) for kind in counts), default=0)
        for kind, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            example = next(entry.message for entry in self.edits if entry.kind == kind)
            lines.append(f"  {count:4}  {kind:<{width}}  {example}")
        many = "s" * (len(self.warnings) > 1)
        lines.append(f"{len(self.warnings)} warning{many}, marked `# ddp: CHECK:`" if self.warnings else "no warnings")
        for entry in self.warnings:
            cell = f"cell {entry.cell}, " if entry.cell is not None else ""
            line = f"line {entry.line}: " if entry.line is not None else ""
            lines.append(f"  {cell}{line}{entry.kind}: {entry.message}")
        if self.requirements:
            lines.append(f"the notebook installed: pip install {shlex.join(self.requirements)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Conversion:
    """The finished script and its report."""

    script: str
    report: ConversionReport


@dataclass(frozen=True)
class Cell:
    """A notebook cell: its number (from 1, markdown included), its kind and its text."""

    number: int
    kind: str
    source: str


@dataclass(frozen=True)
class Notebook:
    """A notebook: its name for messages, and its cells."""

    name: str
    cells: tuple[Cell, ...]
