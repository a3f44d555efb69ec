"""Refuse options that do not exist, and say what to give instead."""

import difflib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_ddp.config.aliases import ALIASES, TOOLS
from unsloth_ddp.config.options import OPTIONS
from unsloth_ddp.config.trainer_args import OWNED_ARGS
from unsloth_ddp.config.upstream_names import sft_config_fields
from unsloth_ddp.utils.errors import UserError

# Names that are shown, fewer where the file is to be ported.
SHOWN, FEW = 25, 5
LONGEST_NAME = 60
# From this many names of another tool on, a file is taken for one of that tool's.
MANY = 3
# Options that were there before, and what to do without them.
GONE = {
    "bandwidth": "plan no longer predicts the time on a network; the preflight measures it, and a run shows the time "
    "left",
    "node_bandwidth": "plan no longer predicts the time between GPUs; the preflight measures it, and a run shows the "
    "time left",
    "tokens_per_second": "the time left is in the log lines of a run; plan guesses from measured runs",
}
# What a file is for that is given without an option, by its suffix.
OPTION_OF_FILE = {
    ".jsonl": "dataset", ".json": "dataset", ".parquet": "dataset", ".csv": "dataset",
    ".yaml": "config", ".yml": "config",
}  # fmt: skip


def unknown_options(values: Mapping[str, Any], source: str | Path, command: Any = None) -> UserError:
    """Return the refusal of all options of a file or command line that do not exist.

    Args:
        values: Their values by name.
        source: The file, or "command line".
        command: The Parser (command_line.py) of the command line, if it is not train_ddp.py's.
    """
    of_command_line = not isinstance(source, Path)
    command_options = command.option_names if command else ()
    if command and not command.takes_settings:
        hints = {name: _own_hint(name, command_options) for name in values}
        lists = f"{command.prog} --help lists"
    else:
        hints = {name: _hint(name, value, command_options, of_command_line) for name, value in values.items()}
        lists = f"{command.prog} --help and train_ddp.py --help list" if command else "train_ddp.py --help lists"
    tool = None if of_command_line else _tool_of(list(values))
    ported = (
        f"`uv run python -m unsloth_ddp.port {source}` turns this file of {tool} into one of this kit; " if tool else ""
    )
    if len(values) == 1:
        name, hint = next(iter(hints.items()))
        sentence = f"there is no option {name[:LONGEST_NAME]}; {hint or f'{lists} them all'}"
    else:
        shown_at_most = FEW if tool else SHOWN
        shown = [f"{name[:LONGEST_NAME]} ({hint})" if hint else name[:LONGEST_NAME] for name, hint in hints.items()]
        more = f", and {len(shown) - shown_at_most} more" if len(shown) > shown_at_most else ""
        names = ", ".join(shown[:shown_at_most])
        sentence = f"{ported}{len(values)} options do not exist: {names}{more}; {lists} those that do"
    return UserError(f"{source}: {sentence}{'' if sentence.endswith('?') else '.'}")


def unknown_words(words: list[str]) -> dict[str, str]:
    """Return the options among words that argparse left, with their values; one without a value is taken for a flag.

    Raises:
        UserError: a value stands without an option before it.
    """
    values: dict[str, str | None] = {}
    name = ""
    for word in words:
        if re.match(r"--?[A-Za-z_]", word):
            name, equals, value = word.lstrip("-").partition("=")
            values[name] = value if equals else None
        elif not values:
            option = OPTION_OF_FILE.get(Path(word).suffix.lower())
            fix = f"write --{option} {word}" if option else "every value follows the name of its option"
            raise UserError(f"command line: {word} belongs to no option; {fix}.")
        else:
            values[name] = values[name] or word
    return {name: "true" if value is None else value for name, value in values.items()}


def _own_hint(name: str, command_options: Sequence[str]) -> str:
    """Return what to give instead of an option that a command without train_ddp.py's options does not have."""
    if near := _near(name, command_options):
        return f"did you mean {near}?"
    return "it is an option of train_ddp.py" if name in OPTIONS else ""


def _near(name: str, names: Sequence[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name[:100], names, n=1, cutoff=0.75)), None)


def _hint(name: str, value: Any, command_options: Sequence[str], of_command_line: bool) -> str:
    """Return what to give instead of one option, or nothing; `own` are the command's options beside those of a run."""
    alias = ALIASES.get(name)
    if alias and alias.note and (near := _near(name, command_options)):
        return f"did you mean {near}?"
    if alias:
        if alias.option:
            return f"here it is {alias.option}"
        options = alias.translate(value)
        if options:
            return "give " + " ".join(_written(option, item, of_command_line) for option, item in options.items())
        return alias.note if options is None else "leave it out"
    if name in GONE:
        return GONE[name]
    if name in OWNED_ARGS:
        return OWNED_ARGS[name]
    if name in sft_config_fields():
        return "give it in trainer_args"
    if isinstance(value, Mapping):
        return "options do not nest; write each as a line of its own, without indentation"
    # A misspelt name only: a name that shares a word with another, such as micro_batch_size, may mean something else.
    names = [*command_options, *OPTIONS]
    near = _near(name, [*names, *ALIASES])
    if near and (alias := ALIASES.get(near)):
        return f"did you mean {alias.option}?" if alias.option else ""
    if near:
        return f"did you mean {near}?"
    holding = [other for other in names if len(name) > 2 and f"_{name}_" in f"_{other}_"]
    return f"did you mean {' or '.join(holding)}?" if 0 < len(holding) < 4 else ""


def _written(option: str, value: Any, of_command_line: bool) -> str:
    text = " ".join(value) if isinstance(value, list) else str(value)
    if isinstance(value, dict):
        text = f"'{json.dumps(value)}'" if of_command_line else json.dumps(value)
    return f"--{option} {text}" if of_command_line else f"{option}: {text}"


def _tool_of(names: Sequence[str]) -> str | None:
    """Return the tool that most of these names come from, if it can be ported."""
    counts = Counter(letter for name in names if name in ALIASES for letter in ALIASES[name].tools)
    letter, count = counts.most_common(1)[0] if counts else ("", 0)
    return TOOLS[letter] if count >= MANY and letter in "ALT" else None
