"""The exceptions that every rank raises alike and whose one sentence the main process prints, without a stack trace."""

from __future__ import annotations

from unsloth_ddp.redact import hide, one_line


class UserError(ValueError):
    """A mistake in settings, data or environment; its message names the value, the reason and the fix.

    The message may quote what the user gave, so it is made safe to print: one line, and no secret in it.
    """

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(hide(one_line(message)))


class RunError(UserError):
    """The run cannot go on, and not by the user's mistake; its message says what happened and what to do."""

    exit_code = 1
