"""The settings of a run, read from a YAML file and the command line; options.py lists them.

The command line wins over the file, the file over the defaults. Nothing heavier than PyYAML is imported here,
because the settings decide what may be imported next (Unsloth has to come before Transformers, TRL and PEFT). That
is also why TRL's own TrlParser, whose conventions this follows, is not used.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import json
import math
import re
import reprlib
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, NoReturn

from unsloth_ddp.config.options import TOPICS, Settings, check, look_up
from unsloth_ddp.config.yaml_file import Unreadable, read_yaml
from unsloth_ddp.utils.errors import UserError, os_reason

__all__ = ["Settings", "parse_settings", "read_config"]

DEMO_RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "demo.yaml"
FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
TYPES = typing.get_type_hints(Settings)
TRUTHS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
# int | None is one, int | Literal["auto"] the other.
UNIONS = (types.UnionType, typing.Union)
SHOW = reprlib.Repr()
SHOW.maxlevel, SHOW.maxstring, SHOW.maxother = 2, 200, 100


def parse_settings(argv: list[str], description: str = "", beside: argparse.ArgumentParser | None = None) -> Settings:
    """The settings of a run from its command line; with neither config, model nor dataset, those of the demo.

    Args:
        beside: the parser that took a command's own options first (see beside_train_options).

    Raises:
        UserError: an unknown option, a value of the wrong type, or settings that contradict each other.
    """
    given, unknown = make_parser(description).parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        if not name.lstrip("-") or not name.startswith("-"):
            raise UserError(f"command line: {name} stands alone; every value follows an option such as --dataset.")
        raise unknown_option(name.lstrip("-"), "command line", beside)
    on_command_line = {
        # Written out in full, because in the saved settings ./ will mean the run's own folder.
        name: _relative_to(Path.cwd(), name, coerce(name, value, "command line"))
        for name, value in vars(given).items()
        if name != "config"
    }
    config = getattr(given, "config", None)
    if config is None and not {"model", "dataset"} & on_command_line.keys():
        config = DEMO_RECIPE
    settings = Settings(**{**(read_config(Path(config)) if config else {}), **on_command_line})
    check(settings)
    return settings


def read_config(path: Path) -> dict[str, Any]:
    """The options of a YAML file, checked. Paths that begin with ./ or ../ are relative to the file."""
    try:
        if path.is_dir():
            raise UserError(f"--config {path} is a folder; name one of the .yaml files in it.")
        if not path.is_file():
            raise UserError(f"--config {path}: there is no such file; recipes/ holds examples.")
        content = read_yaml(path)
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {os_reason(error)}.") from None
    except Unreadable as error:
        raise UserError(f"--config {path} is not YAML: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"--config {path} holds no options; write one `name: value` a line.")
    if "distributed_type" in content:
        raise UserError(
            f"--config {path} is a file for accelerate launch; give it before train_ddp.py: accelerate launch --config_file "
            f"{path} train_ddp.py ..."
        )
    options = {}
    for name, value in content.items():
        if name == "config":
            raise UserError(f"{path}: config is for the command line only; a file holds all its options itself.")
        if name not in FIELDS:
            raise unknown_option(name, str(path))
        options[name] = _relative_to(path.parent, name, coerce(name, value, str(path)))
    return options


def _relative_to(folder: Path, name: str, value: Any) -> Any:
    if not FIELDS[name].metadata.get("path"):
        return value
    if isinstance(value, list):
        return [_relative_to(folder, name, item) for item in value]
    if isinstance(value, str) and value.startswith(("./", "../")):
        return str(look_up(name, folder / value))
    return value


# ---- one value ----


def coerce(name: str, value: Any, source: str) -> Any:
    """`value` as the type of option `name`; a UserError names the value, where it came from and what is accepted."""
    if value is False and FIELDS[name].metadata.get("no_is_a_word"):
        value = "no"  # what YAML reads an unquoted no as
    try:
        return _as_type(TYPES[name], value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        accepts = _accepted(TYPES[name])
        if value is None:
            raise UserError(
                f"{source}: {name} is empty, but it takes {accepts}; leave it out for its default."
            ) from None
        hint = "; put it in quotes" if "text" in accepts and not isinstance(value, (str, list, dict)) else ""
        raise UserError(f"{source}: {name} is {_shortened(value)}, but it takes {accepts}{hint}.") from None


def _shortened(value: Any) -> str:
    """A few lines of YAML aliases can stand for gigabytes, and Python prints no int over 4300 digits."""
    try:
        return SHOW.repr(value)
    except ValueError:
        return "a huge number"


def _as_type(wanted: Any, value: Any) -> Any:
    """`value` as the type `wanted`, or a ValueError (or what float(), int() and json.loads() raise)."""
    kind = typing.get_origin(wanted) or wanted
    unset = value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
    if kind in UNIONS:
        return _as_one_of(typing.get_args(wanted), value, unset)
    if kind is list:
        items = value if isinstance(value, list) else [value]
        return [] if unset or value == ["none"] else [_as_type(str, item) for item in items]
    if kind is dict:
        value = {} if unset else _parsed_json(value) if isinstance(value, str) else value
        return _plain(value) if isinstance(value, dict) else _refuse()
    if kind is Literal:
        # YAML reads an unquoted no or off as False, and on as True.
        choices = typing.get_args(wanted)
        if isinstance(value, bool):
            value = next((word for word in (("on",) if value else ("no", "off")) if word in choices), value)
        return value if value in choices else _refuse()
    if kind is bool:
        return TRUTHS[str(value).lower()] if str(value).lower() in TRUTHS else _refuse()
    if kind is str:
        return _text(value) if isinstance(value, str) and value.strip() and "\0" not in value else _refuse()
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        _refuse()
    if kind is int:
        return _whole_number(value)
    return float(value) if math.isfinite(float(value)) else _refuse()


def _as_one_of(kinds: tuple[Any, ...], value: Any, unset: bool) -> Any:
    if unset and type(None) in kinds:
        return None
    for kind in kinds:
        if kind is not type(None):
            with contextlib.suppress(TypeError, ValueError, OverflowError, RecursionError):
                return _as_type(kind, value)
    return _refuse()


def _whole_number(value: int | float | str) -> int:
    """An int, also from text such as 1e3; a long seed is not sent through float, which would round it."""
    if isinstance(value, str):
        value = int(value) if re.fullmatch(r"[+-]?\d{1,18}", value) else float(value)
    return int(value) if value == int(value) and abs(value) < 2**63 else _refuse()


def _text(value: str) -> str:
    """`value`, or a ValueError where it cannot be written to a file (an argument that is not UTF-8)."""
    value.encode()
    return value


def _parsed_json(text: str) -> Any:
    """The value of a JSON text in which no key stands twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return dict(pairs) if len(dict(pairs)) == len(pairs) else _refuse()

    return json.loads(text, object_pairs_hook=unique)


def _plain(value: Any) -> Any:
    """`value` if settings.yaml and a checkpoint's manifest can hold it and give it back, or a ValueError."""
    if isinstance(value, dict):
        return {name if isinstance(name, str) else _refuse(): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isfinite(value):
        _refuse()
    # An int of more digits than Python prints fails at str().
    return value if value is None or (isinstance(value, (bool, int, float)) and str(value)) else _refuse()


def _refuse() -> NoReturn:
    raise ValueError


def _accepted(wanted: Any) -> str:
    """What an option takes, in words."""
    if typing.get_origin(wanted) in UNIONS:
        return " or ".join("none" if t is type(None) else _accepted(t) for t in typing.get_args(wanted))
    if typing.get_origin(wanted) is Literal:
        return " or ".join(typing.get_args(wanted))
    if typing.get_origin(wanted) is list:
        return "text, or a list of texts"
    if typing.get_origin(wanted) is dict:
        return "a mapping of plain, finite values (JSON on the command line)"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(wanted, "text")


def unknown_option(name: str, source: str, beside: argparse.ArgumentParser | None = None) -> UserError:
    """The refusal of an option that does not exist, with one that is near; `beside` as for parse_settings."""
    name = name[:100]
    own = [option.lstrip("-") for option in beside._option_string_actions] if beside else []
    names = [*own, *FIELDS]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    # epochs is far from num_train_epochs, letter by letter.
    near += [other for other in names if len(name) > 3 and f"_{name}_" in f"_{other}_"]
    lists = f"{beside.prog} --help and train_ddp.py --help list" if beside else "train_ddp.py --help lists"
    hint = f"did you mean {near[0]}?" if near else f"{lists} them all."
    return UserError(f"{source}: there is no option {name}; {hint}")


# ---- the command line ----


class Parser(argparse.ArgumentParser):
    """argparse that raises instead of printing its usage from every rank, and reads - and _ alike."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, with --global-batch-size read as --global_batch_size."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([_with_underscores(word) for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}.")


def beside_train_options(prog: str, description: str | None) -> Parser:
    """The parser of a command that has options of its own, and hands all others on to parse_settings."""
    return Parser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="All other options are those of train_ddp.py.",
    )


def make_parser(description: str) -> argparse.ArgumentParser:
    """The command line: one group of options a topic, each option as text that `coerce` reads."""
    parser = Parser(
        prog="train_ddp.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of options; the command line wins over it.")
    defaults = Settings()
    for topic in TOPICS:
        group = parser.add_argument_group(str(topic.__doc__))
        for f in dataclasses.fields(topic):
            text = f"{f.metadata['help']} [{_shown(getattr(defaults, f.name))}]".replace("%", "%%")
            kind = TYPES[f.name]
            if kind is bool:
                group.add_argument(f"--{f.name}", nargs="?", const="true", metavar="BOOL", help=text)
                group.add_argument(
                    f"--no_{f.name}", dest=f.name, action="store_const", const="false", help=argparse.SUPPRESS
                )
            elif typing.get_origin(kind) is list:
                group.add_argument(f"--{f.name}", nargs="+", action="extend", metavar="NAME", help=text)
            else:
                values = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
                metavar = "{" + ",".join(values) + "}" if values else "VALUE"
                group.add_argument(f"--{f.name}", metavar=metavar, help=text)
    return parser


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list):
        return " ".join(default) or "none"
    return "none" if default is None or default == {} else str(default)


def _with_underscores(word: str) -> str:
    """--global-batch-size=8 as --global_batch_size=8, so that both spellings work."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value
