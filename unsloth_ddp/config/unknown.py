"""Refuse options that do not exist, and suggest what to give instead."""

from __future__ import annotations

import difflib

from unsloth_ddp.config.command_line import Parser
from unsloth_ddp.config.options import OPTIONS
from unsloth_ddp.utils.errors import UserError


def unknown_options(names: list[str], source: str, command: Parser | None = None) -> UserError:
    """Return the refusal of options that do not exist; `command` as for parse_settings."""
    name = names[0][:100]
    known = [*(command.own_options() if command else []), *OPTIONS]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    # epochs is far from num_train_epochs, letter by letter.
    near += [other for other in known if len(name) > 3 and f"_{name}_" in f"_{other}_"]
    lists = f"{command.prog} --help and train_ddp.py --help list" if command else "train_ddp.py --help lists"
    hint = f"did you mean {near[0]}?" if near else f"{lists} them all."
    return UserError(f"{source}: there is no option {name}; {hint}")
