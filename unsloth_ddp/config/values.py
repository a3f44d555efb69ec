"""Convert one value, from YAML or the command line, to the type of its option."""

import contextlib
import json
import math
import re
import reprlib
import types
import typing
from typing import Any, Literal, NoReturn

from unsloth_ddp.config.aliases import OTHER_VALUES
from unsloth_ddp.config.options import OPTIONS, TYPES
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.json import DECODER
from unsloth_ddp.utils.files.sources import source_text

BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
# int | None is one, int | Literal["auto"] the other.
UNIONS = (types.UnionType, typing.Union)
SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxstring, SHORT.maxother = 2, 200, 100


def convert_value(name: str, value: Any, source: str) -> Any:
    """Return `value` as the type of option `name`.

    Raises:
        UserError: naming the value, its source and what the option takes.
    """
    if name in ("dataset", "eval_dataset"):
        try:
            value = [source_text(item) for item in value] if isinstance(value, list) else source_text(value)
        except UserError as refused:
            raise UserError(f"{source}: {name} is {_shortened(value)}; {refused}") from None
    if name == "columns" and isinstance(value, dict):
        value = [f"{old}={new}" for old, new in value.items()]
    if value is False and "no" in OPTIONS[name].words:
        value = "no"  # YAML reads an unquoted no as False.
    try:
        return _as_type(TYPES[name], value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        takes = _described(TYPES[name])
        if isinstance(value, (str, bool)) and (equivalent := OTHER_VALUES.get(name, {}).get(str(value).lower())):
            raise UserError(
                f"{source}: {name} is {_shortened(value)}, but it takes {takes}; give {equivalent}."
            ) from None
        if value is None or value == "":
            raise UserError(f"{source}: {name} is empty, but it takes {takes}; leave it out for its default.") from None
        hint = "; put it in quotes" if "text" in takes and not isinstance(value, (str, list, dict)) else ""
        hint = f"; {error}" if isinstance(error, Refused) else hint
        raise UserError(f"{source}: {name} is {_shortened(value)}, but it takes {takes}{hint}.") from None


def accepted_values(name: str) -> str:
    """Return what option `name` takes, in words."""
    return _described(TYPES.get(name, str))


def _shortened(value: Any) -> str:
    try:
        return SHORT.repr(value)
    except ValueError:
        return "a huge number"  # Python prints no int of over 4300 digits.


def _as_type(annotation: Any, value: Any) -> Any:
    """Return `value` as the type `wanted`, or raise ValueError (or what float(), int() and json.loads() raise)."""
    value_type = typing.get_origin(annotation) or annotation
    unset = value is None or (isinstance(value, str) and value.lower() in ("none", "null"))
    if value_type in UNIONS:
        return _as_one_of(typing.get_args(annotation), value, unset)
    if value_type is list:
        items = value if isinstance(value, list) else [value]
        return [] if unset or value == ["none"] else [_as_type(str, item) for item in items]
    if value_type is dict:
        value = {} if unset else _parsed_json(value) if isinstance(value, str) else value
        return _plain(value) if isinstance(value, dict) else _refuse()
    if value_type is Literal:
        # YAML reads an unquoted no or off as False, and on as True.
        choices = typing.get_args(annotation)
        if isinstance(value, bool):
            value = next((word for word in (("on",) if value else ("no", "off")) if word in choices), value)
        return value if value in choices else _refuse()
    if value_type is bool:
        return BOOLEANS[str(value).lower()] if str(value).lower() in BOOLEANS else _refuse()
    if value_type is str:
        return _text(value) if isinstance(value, str) and value.strip() and "\0" not in value else _refuse()
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        _refuse()
    if value_type is int:
        return _whole_number(value)
    return float(value) if math.isfinite(float(value)) else _refuse()


def _as_one_of(value_types: tuple[Any, ...], value: Any, unset: bool) -> Any:
    if unset and type(None) in value_types:
        return None
    for value_type in value_types:
        if value_type is not type(None):
            with contextlib.suppress(TypeError, ValueError, OverflowError, RecursionError):
                return _as_type(value_type, value)
    return _refuse()


def _whole_number(value: int | float | str) -> int:
    """Return an int, also from text such as 1e3; a long seed does not go through float, which would round it."""
    if isinstance(value, str):
        value = int(value) if re.fullmatch(r"[+-]?\d{1,18}", value) else float(value)
    return int(value) if value == int(value) and abs(value) < 2**63 else _refuse()


def _text(value: str) -> str:
    """Return `value`, or raise ValueError where it cannot be written to a file (an argument that is not UTF-8)."""
    value.encode()
    return value


def _parsed_json(text: str) -> Any:
    try:
        return DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise Refused(f"it is not JSON: {error.msg} at character {error.pos + 1}") from None
    except ValueError as error:
        raise Refused(str(error)) from None


def _plain(value: Any) -> Any:
    """Return `value` if YAML and a checkpoint's manifest can hold it and give it back, or raise ValueError."""
    if isinstance(value, dict):
        return {name if isinstance(name, str) else _refuse(): _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise Refused(f"{value} is not finite")
    # An int of more digits than Python prints fails at str().
    return value if value is None or (isinstance(value, (bool, int, float)) and str(value)) else _refuse()


class Refused(ValueError):
    """A value does not fit; the message says why, where the type that the option takes does not say it."""


def _refuse() -> NoReturn:
    raise ValueError


def _described(annotation: Any) -> str:
    """Return what an option takes, in words."""
    if typing.get_origin(annotation) in UNIONS:
        return " or ".join("none" if t is type(None) else _described(t) for t in typing.get_args(annotation))
    if typing.get_origin(annotation) is Literal:
        *others, last = typing.get_args(annotation)
        return f"{', '.join(others)} or {last}" if others else last
    if typing.get_origin(annotation) is list:
        return "text, or a list of texts"
    if typing.get_origin(annotation) is dict:
        return "a mapping of plain, finite values (JSON on the command line)"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(annotation, "text")
