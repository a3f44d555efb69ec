"""Explain an error of a library below: look it up in the table, and print its cause and fix under the traceback.

The original error is always printed too. Only the lines of a traceback that carry messages are searched, so that a
file name or a source line in a stack frame never matches.
"""

import re
import sys
import traceback

from unsloth_ddp.utils.error_table import KNOWN_ERRORS, KnownError
from unsloth_ddp.utils.errors import one_line
from unsloth_ddp.utils.redaction import hide

_COMPILED = [(re.compile(error.pattern), error) for error in KNOWN_ERRORS]


def find_known_error(text: str) -> KnownError | None:
    """Return the first known error that matches `text`, a message or a whole traceback."""
    message_text = messages(text)
    return next((error for pattern, error in _COMPILED if pattern.search(message_text)), None)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU ran out of memory, whichever library raised the error."""
    known_error = find_known_error(f"{type(error).__name__}: {error}")
    return known_error is not None and known_error.name == "GPU out of memory"


def without_address(error: object) -> str:
    """Return an error's message on one line, without the Hub address that Transformers makes of any name."""
    return re.sub(r" You can inspect the repository content at \S+?( \.|\.(?= |$)|$)", "", one_line(error, 1000))


def messages(text: str) -> str:
    """Return the messages of a traceback on one line, without its frames."""
    lines = text.splitlines()
    if any(line.startswith("Traceback (most recent call last)") for line in lines):
        lines = [line for line in lines if line and not line.startswith((" ", "\t", "Traceback"))]
    return " ".join(" ".join(lines).split())


def explain(text: str) -> str:
    """Return two lines with cause and fix to print under an error; an empty string if the error is not known."""
    row = find_known_error(text)
    return "" if row is None else f"  cause: {row.cause}\n  what helps: {row.fix}\n"


def report(error: Exception, *, explained: bool = True) -> None:
    """Print the traceback of an error as Python would, with secrets hidden, and its cause and fix if it is known."""
    text = hide("".join(traceback.format_exception(error)))
    print(text + (explain(text) if explained else ""), end="", file=sys.stderr, flush=True)
