"""Check the values of a row and name their types in error messages."""

import json
import math
import re
from typing import Any

from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.json import DECODER

DEEPEST = 50
# Matches an object or a list of objects as to_csv writes them.
PRINTED_BY_PYTHON = re.compile(r"\s*(\[\s*)?\{\s*'")


def as_list(value: Any, what: str) -> list[Any]:
    """Return a list, or the list in JSON text.

    Raises:
        UserError: the value is neither.
    """
    if isinstance(value, str):
        value = from_json(value, what)
    if not isinstance(value, list):
        raise UserError(f"{what} is {kind_of(value)}, not a list.")
    return value


def as_text(value: Any, what: str) -> str:
    """Return text that a tokenizer can take.

    Raises:
        UserError: the value is not text, or contains broken Unicode.
    """
    if not isinstance(value, str):
        raise UserError(f"{what} is {kind_of(value)}, not text; write it as text.")
    check_plain(value, what)
    return value


def from_json(text: str, what: str) -> Any:
    """Parse JSON text.

    Raises:
        UserError: the text is not JSON.
    """
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        if PRINTED_BY_PYTHON.match(text):
            raise UserError(
                f"{what} is a list or object as Python or NumPy prints it, which is not JSON; write the table again as "
                "JSONL or Parquet (to_json(..., orient='records', lines=True), to_parquet), which keep lists."
            ) from None
        why = "" if isinstance(error, (json.JSONDecodeError, RecursionError)) else f" ({error})"
        raise UserError(f"{what} is text that is not JSON{why}; fix or remove it.") from None


def check_plain(value: Any, what: str, depth: int = 0) -> None:
    """Refuse values that JSON or a tokenizer cannot take, such as dates, bytes, NaN and half surrogate pairs.

    Raises:
        UserError: naming `what`.
    """
    if depth > DEEPEST:
        raise UserError(f"{what} is nested over {DEEPEST} levels deep; fix or remove it.")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UserError(f"{what} holds broken Unicode (half a surrogate pair); fix or remove it.") from None
    elif isinstance(value, dict):
        for name, item in value.items():
            check_plain(name, what, depth + 1)
            check_plain(item, what, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_plain(item, what, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(
            f"{what} holds {value}, which is not a JSON value; make it a finite number or null, or remove it."
        )
    elif not isinstance(value, (bool, int, float, type(None))):
        raise UserError(f"{what} holds a {type(value).__name__}, which is not a JSON value; make it text or remove it.")


def is_missing(value: Any) -> bool:
    """Return whether a value is missing in a table: null, or pandas' NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_empty(value: Any) -> bool:
    """Return whether a value is null, or an empty text, list or object; 0 and false are not empty."""
    return value is None or value in ("", [], {})


def kind_of(value: Any) -> str:
    """Return the name of a value's JSON type."""
    names = {type(None): "missing", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


def quoted(value: Any) -> str:
    """Return text in quotes, or the name of any other value's type."""
    return repr(value[:100]) if isinstance(value, str) else kind_of(value)
