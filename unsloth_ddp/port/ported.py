"""Collect the options of a ported file, and what was left out and why."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unsloth_ddp.config.options import OPTIONS
from unsloth_ddp.config.values import convert_value
from unsloth_ddp.utils.errors import UserError


@dataclass
class Ported:
    """The result of a port.

    Attributes:
        tool: The tool that the file is for, as in aliases.TOOLS.
        folder: The folder of its file.
        content: The keys of the file that are not empty.
        options: The kit's options, in the order in which they were found.
        left_out: What was left out or changed, by name, and why.
        to_do: What has to be done before the result runs.
        revisions: Of the Hub datasets for which the file gives one.
        columns: By column, the name under which it is read, and the dataset that has it.
        launch_config: The file in accelerate_configs/ to start with.
    """

    tool: str
    folder: Path
    content: Mapping[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    to_do: list[str] = field(default_factory=list)
    launch_config: str = "ddp"
    revisions: dict[str, str] = field(default_factory=dict)
    columns: dict[str, tuple[str, str]] = field(default_factory=dict)

    def rename(self, title: str, names: Mapping[str, str]) -> None:
        """Take the columns of the dataset `title`, each with the name under which it has to be read.

        The option columns serves all datasets, so a column with two meanings is something to do.
        """
        for old, new in names.items():
            meaning, other = self.columns.setdefault(old, (new, title))
            if meaning != new:
                self.to_do.append(
                    f"{title}: rename the column {old} to {new} in its rows, since in {other} it is {meaning}."
                )

    def add(self, options: dict[str, Any], name: str) -> None:
        """Take options that stand for `name` of the file; those that the kit refuses are left out."""
        for option, value in options.items():
            try:
                converted = convert_value(option, value, self.tool)
                OPTIONS[option].check(option, converted)
            except UserError as refused:
                sentence = str(refused).removeprefix(f"{self.tool}: ").rstrip(".")
                self.left_out[name] = sentence.removeprefix(f"{name} is ")
                continue
            # load_in_4bit or quantization_bit beside an adapter of kind lora, in either order.
            if option == "method" and {converted, self.options.get("method")} == {"lora", "qlora"}:
                converted = "qlora"
            # A file unfreezes the two by keys of their own.
            if option == "train_towers" and {converted, self.options.get(option)} == {"tower", "projector"}:
                converted = True
            self.options[option] = converted
