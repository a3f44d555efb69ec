"""Hold what the edits of one conversion share: options, names, and the report they write to."""

import re
from dataclasses import dataclass, field

from unsloth_ddp.notebook.types import ConversionOptions, ConversionReport, ReportEntry
from unsloth_ddp.notebook.write.prologue import Names

_MARK = re.compile("\x00(\\d+)\x00")


@dataclass
class ConversionContext:
    """The state of one conversion."""

    options: ConversionOptions
    names: Names
    report: ConversionReport
    bound: set[str]
    imports: dict[str, str]
    config_classes: set[str] = field(default_factory=set)
    trainers_of_config: dict[str, set[str]] = field(default_factory=dict)
    known_arguments: set[str] = field(default_factory=set)  # names that hold a trainer's arguments made by such a class
    environ_names: set[str] = field(default_factory=set)  # names for os.environ
    requirements: list[str] = field(default_factory=list)
    cell: int | None = None
    secrets: set[str] = field(default_factory=set)  # names that hold a secret, which may be unset
    left_out: list[tuple[int, str]] = field(default_factory=list)  # cell and text of what is not in the script
    host_names: set[str] = field(default_factory=set)  # names of the host's modules, whose imports were left out
    host_paths: set[str] = field(default_factory=set)  # paths of the host that have been warned of
    shared_loops: set[object] = field(default_factory=set)  # statements whose loop by hand shares rows and gradients
    accelerated: bool = False  # Accelerate prepares the DataLoaders that the notebook makes
    batch_term: str = ""  # what in a loss takes several rows of a batch together
    idle_tower: bool = False  # Unsloth's adapters reach a tower for images, and no row has one
    by_row: bool = False  # every loss of Sentence Transformers in the notebook takes each row alone
    search: str | None = None  # why unused weights are not searched for; None leaves that to Transformers
    distributors: set[str] = field(default_factory=set)  # names that hold a launcher of Spark
    texts: dict[str, str] = field(default_factory=dict)  # what names hold that are given a text
    processes: int = 1  # for which the notebook's launcher starts its function, each with a batch of its own
    on_one_process: bool = False  # inside a statement that a guard keeps off the others
    _marked: dict[int, ReportEntry] = field(default_factory=dict)

    @property
    def unsloth(self) -> bool:
        """Return whether the notebook trains with Unsloth."""
        return any(path.split(".")[0] == "unsloth" for path in self.imports.values())

    @property
    def rows_at_once(self) -> int | None:
        """Return the rows of a pass that the user asks for, or the guide for Unsloth; None keeps the notebook's."""
        size = self.options.per_device_batch_size
        return (1 if self.unsloth else None) if size == "auto" else size

    def edit(self, kind: str, message: str) -> str:
        """Add an edit to the report and return the comment that marks it in the script."""
        return self._note(ReportEntry(kind, message, self.cell), self.report.edits, "# ddp: ")

    def warn(self, kind: str, message: str) -> str:
        """Add a warning to the report and return the comment that marks it in the script."""
        return self._note(ReportEntry(kind, message, self.cell), self.report.warnings, "# ddp: CHECK: ")

    def _note(self, entry: ReportEntry, into: list[ReportEntry], prefix: str) -> str:
        into.append(entry)
        entry.message = " ".join(entry.message.split())  # a comment is one line, whatever it quotes
        number = len(self._marked)
        self._marked[number] = entry
        return f"{prefix}{entry.message}\x00{number}\x00"

    def place(self, script: str) -> str:
        """Remove the marks from the finished script, and give each report entry its line."""
        placed: list[str] = []
        comments: dict[str, int] = {}  # comments right above what is placed next, and their lines
        for line in script.split("\n"):
            text = _MARK.sub("", line)
            comments = comments if text.lstrip().startswith("# ddp:") else {}
            if text not in comments:
                placed.append(text)
                comments[text] = len(placed)
            for number in _MARK.findall(line):
                self._marked[int(number)].line = comments[text]
        return "\n".join(placed)
