"""Define the errors that are printed as one sentence without a traceback, and put errors of libraries into words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from unsloth_ddp.utils.redaction import hide, printable


class UserError(ValueError):
    """A mistake in settings, data or environment; its message names the value, the reason and the fix.

    The message may quote what the user gave, so it is made safe to print: one line, and no secret in it.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(hide(printable(message)))


class RunError(UserError):
    """The run cannot go on, and not by the user's mistake; its message says what happened and what to do."""

    exit_code = 1


def one_line(error: object, limit: int = 300) -> str:
    """Return an error's message without line breaks, cut to `most` characters, to stand inside a sentence."""
    return " ".join(str(error).split())[:limit]


def os_reason(error: OSError) -> str:
    """Return why a system call failed ("Permission denied"), without the error number and the path."""
    return one_line(error.strerror or error)


class Panic(ValueError):
    """A library in Rust panicked, mostly at a damaged file."""


@contextlib.contextmanager
def panics_raised() -> Iterator[None]:
    """Raise Panic for a panic within the block; PyO3 derives its exception from BaseException, which few catch."""
    try:
        yield
    except BaseException as error:
        # The class is of no module that can be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise Panic(f"a library in Rust panicked ({one_line(error)})") from None
