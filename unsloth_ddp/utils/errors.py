"""The exceptions that every rank raises alike and whose one sentence the main process prints, without a stack trace."""

from __future__ import annotations

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


def one_line(error: object, most: int = 300) -> str:
    """Return an error's message without line breaks, cut to `most` characters, to stand inside a sentence."""
    return " ".join(str(error).split())[:most]


def os_reason(error: OSError) -> str:
    """Return why a system call failed ("Permission denied"), without the error number and the path."""
    return one_line(error.strerror or error)
