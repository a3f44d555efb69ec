"""Collect the options of a ported file, and what was left out and why."""

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
        options: The kit's options, in the order in which they were found.
        left_out: What was left out or changed, by name, and why.
        to_do: What has to be done before the result runs.
        launch_config: The file in accelerate_configs/ to start with.
    """

    tool: str
    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    to_do: list[str] = field(default_factory=list)
    launch_config: str = "ddp"

    def add(self, options: dict[str, Any], name: str) -> None:
        """Take options that stand for `name` of the file; those that the kit refuses are left out."""
        for option, value in options.items():
            try:
                converted = convert_value(option, value, self.tool)
                OPTIONS[option].check(option, converted)
            except UserError as refused:
                said = str(refused).removeprefix(f"{self.tool}: ").rstrip(".")
                self.left_out[name] = said.removeprefix(f"{name} is ")
                continue
            # load_in_4bit or quantization_bit beside an adapter of kind lora, in either order.
            if option == "method" and {converted, self.options.get("method")} == {"lora", "qlora"}:
                converted = "qlora"
            # A file unfreezes the two by keys of their own.
            if option == "train_towers" and {converted, self.options.get(option)} == {"tower", "projector"}:
                converted = True
            self.options[option] = converted
