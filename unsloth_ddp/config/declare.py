"""Declare an option: its default, help text and bounds, and what a resumed run does with it."""

from dataclasses import dataclass, field
from typing import Any, Literal

from unsloth_ddp.utils.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of a number; other values, such as auto and none, are exempt.

    Values over an upper bound are typing errors that would end in a hang or in an error far from its cause.
    """

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None

    def check(self, name: str, value: Any) -> None:
        """Refuse a number that is out of bounds."""
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        if self.above is not None and value <= self.above:
            raise UserError(f"{name} is {value}, but it has to be above {self.above:,}.")
        if self.at_least is not None and value < self.at_least:
            raise UserError(f"{name} is {value}, but it has to be {self.at_least:,} or above.")
        if self.at_most is not None and value > self.at_most:
            raise UserError(f"{name} is {value}, but it has to be {self.at_most:,} or below.")
        if self.below is not None and value >= self.below:
            raise UserError(f"{name} is {value}, but it has to be below {self.below:,}.")


@dataclass(frozen=True, kw_only=True)
class Option(Bounds):
    """The declaration of one option, without its type and default, which stand in the dataclass field.

    Attributes:
        help: One line for --help, which shows the default too.
        on_resume: What happens when the value differs from the checkpoint's. refuse: the run is refused unless
            --resume_anyway is given. keep: it is refused with --resume_anyway too, because the optimizer's saved state
            holds the first value, and another would do nothing. report: the run continues and names the change. allow:
            nothing, either because the option does not change what is learned or because its effect is compared instead
            (rows, data, steps).
        resolved: On resume, compare the value that the run decided on (a fact of the run with the option's name). For
            options that can be auto, or that follow from others.
        new_run: A start with another value is another run, which does not continue in an unfinished start's folder.
        path: read: a file or folder that the run reads; a relative path in a config file may be relative to that file.
            written: a folder that the run writes, relative to the working directory.
        words: Values of a path option that are no paths, such as auto.
        bare: Value on a command line that gives none, for options that are flags in other tools.
    """

    help: str
    on_resume: Literal["refuse", "keep", "report", "allow"]
    resolved: bool = False
    new_run: bool = True
    path: Literal["read", "written"] | None = None
    words: tuple[str, ...] = ()
    bare: str | None = None


def option(default: Any, help: str, on_resume: Literal["refuse", "keep", "report", "allow"], **declared: Any) -> Any:
    """Return a dataclass field with its declaration (see Option). A list or dict is copied for each use."""
    metadata = {"option": Option(help=help, on_resume=on_resume, **declared)}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)
