"""Read the settings of a run from a YAML file and the command line; options.py declares them.

The command line wins over the file, the file over the defaults. Nothing heavier than PyYAML is imported here,
because the settings decide what may be imported next (Unsloth has to come before Transformers, TRL and PEFT). That
is also why TRL's own TrlParser, whose conventions this follows, is not used.
"""

import contextlib
import os
from pathlib import Path
from typing import Any

from unsloth_ddp.config.checks import check_settings, full_path, path_and_suffix
from unsloth_ddp.config.command_line import Parser, make_parser
from unsloth_ddp.config.options import OPTIONS, Settings
from unsloth_ddp.config.unknown import unknown_options, unknown_words
from unsloth_ddp.config.values import convert_value
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.missing import looked_in, similar_file
from unsloth_ddp.utils.files.yaml import read_mapping

REPO = Path(__file__).resolve().parents[2]
DEMO_RECIPE = REPO / "recipes" / "demo.yaml"
DEMO_MODEL = REPO / "demo" / "model"


def parse_settings(argv: list[str], description: str = "", command: Parser | None = None) -> Settings:
    """Return the settings of a run from its command line; with neither config, model nor dataset, those of the demo.

    Args:
        command: The parser that took a command's own options first (see make_command_parser), for suggestions.

    Raises:
        UserError: unknown options, a value of the wrong type, or settings that contradict each other.
    """
    arguments, unknown = make_parser(description).parse_known_args(argv)
    if unknown:
        raise unknown_options(unknown_words(unknown), "command line", command)
    on_command_line = {
        # Written as absolute paths, because in the saved settings ./ will mean the run's own folder.
        name: _relative_to(Path.cwd(), name, convert_value(name, value, "command line"))
        for name, value in vars(arguments).items()
        if name != "config"
    }
    config = getattr(arguments, "config", None)
    if config is None and not {"model", "dataset"} & on_command_line.keys():
        config = DEMO_RECIPE
    settings = Settings(**{**(read_config(Path(config)) if config else {}), **on_command_line})
    check_settings(settings)
    return settings


def is_demo_model(settings: Settings) -> bool:
    """Return whether the model is the tiny one of the demo, which trains on a CPU in seconds."""
    return settings.model is not None and Path(settings.model).resolve() == DEMO_MODEL


def read_config(path: Path) -> dict[str, Any]:
    """Return the options of a YAML file, each checked by itself.

    Paths that begin with ./ or ../ are relative to the file. Other relative paths are relative to the working
    directory, or to the file where they lead to something there only.

    Raises:
        UserError: the file cannot be read, or holds something other than options.
    """
    if os.path.isdir(path):
        raise UserError(f"--config {path} is a folder; name one of the .yaml files in it.")
    # A name that is too long for a file is refused by read_mapping.
    with contextlib.suppress(OSError):
        if not path.is_file():
            raise UserError(f"--config {path}: there is no such file{_instead(path)}")
    content = read_mapping(path, f"--config {path}")
    if "distributed_type" in content:
        raise UserError(
            f"--config {path} is a file for accelerate launch; give it before train_ddp.py: uv run accelerate launch "
            f"--config_file {path} train_ddp.py ..."
        )
    if "zero_optimization" in content:
        raise UserError(
            f"--config {path} is a file of DeepSpeed; start with uv run accelerate launch --config_file "
            "accelerate_configs/zero2.yaml (or zero3.yaml) train_ddp.py ..., and leave it out."
        )
    if "config" in content:
        raise UserError(f"{path}: config is for the command line only; a file holds all its options itself.")
    if unknown := {name: value for name, value in content.items() if name not in OPTIONS}:
        raise unknown_options(unknown, path)
    return {
        name: _relative_to(path.parent, name, convert_value(name, value, str(path)), beside=True)
        for name, value in content.items()
    }


def _instead(path: Path) -> str:
    """Return what to do about a file that is not there: a similar name in its folder, or where it was looked for."""
    if near := similar_file(path, (".yaml", ".yml")):
        return f"; did you mean {near}?"
    return f"{looked_in(path)}; {DEMO_RECIPE.parent} holds examples."


def _relative_to(folder: Path, name: str, value: Any, beside: bool = False) -> Any:
    """Return an option's value with paths that begin with ./ or ../ in full.

    Args:
        beside: Look for other relative paths in `folder` too.
    """
    if OPTIONS[name].path != "read" or value in OPTIONS[name].words:
        return value
    if isinstance(value, list):
        return [_relative_to(folder, name, item, beside) for item in value]
    if not isinstance(value, str) or value.startswith("~"):
        return value
    if value.startswith(("./", "../")):
        return str(full_path(name, folder / value))
    path, suffix = path_and_suffix(name, value)
    if beside and not _exists(Path(path)) and _exists(folder / path):
        return str(full_path(name, folder / path)) + suffix
    return value


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
