"""What the edits of one conversion share: options, names, and the report they write to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from unsloth_ddp.notebook.prologue import Names
from unsloth_ddp.notebook.types import Finding, Options, Report

_MARK = re.compile("\x00(\\d+)\x00")


@dataclass
class Context:
    """One conversion in progress."""

    options: Options
    names: Names
    report: Report
    bound: set[str]
    imports: dict[str, str]
    config_classes: set[str] = field(default_factory=set)
    trainers_of_config: dict[str, set[str]] = field(default_factory=dict)
    requirements: list[str] = field(default_factory=list)
    cell: int | None = None
    on_one_process: bool = False  # inside a statement that a guard keeps off the others
    _marked: dict[int, Finding] = field(default_factory=dict)

    def edit(self, kind: str, message: str) -> str:
        """Note an edit; returns the comment that marks it in the script."""
        return self._note(Finding(kind, message, self.cell), self.report.edits, "# ddp: ")

    def warn(self, kind: str, message: str) -> str:
        """Note a warning; returns the comment that marks it in the script."""
        return self._note(Finding(kind, message, self.cell), self.report.warnings, "# ddp: CHECK: ")

    def _note(self, finding: Finding, into: list[Finding], prefix: str) -> str:
        into.append(finding)
        number = len(self._marked)
        self._marked[number] = finding
        return f"{prefix}{finding.message}\x00{number}\x00"

    def place(self, script: str) -> str:
        """Take the marks out of the finished script, and give each finding its line."""
        lines = script.split("\n")
        for index, line in enumerate(lines):
            for number in _MARK.findall(line):
                self._marked[int(number)].line = index + 1
            lines[index] = _MARK.sub("", line)
        return "\n".join(lines)
