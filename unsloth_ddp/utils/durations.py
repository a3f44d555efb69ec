"""Read durations as people and Slurm write them."""

from __future__ import annotations

import re

from unsloth_ddp.utils.errors import UserError


def parse_duration(text: str) -> float:
    """Return the seconds of 3600, 90s, 90m, 2h, 1d, 1h30m, or Slurm's MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.

    Raises:
        UserError: `text` is none of them, or zero.
    """
    seconds = _parse_units(text.strip().lower())
    if seconds is None:
        seconds = _parse_slurm(text.strip())
    if not seconds:
        raise UserError(
            f"max_time is {text[:50]!r}, but it takes a time such as 3600 (seconds), 90m, 2h or 1-12:00:00."
        )
    return seconds


def _parse_units(text: str) -> float | None:
    if re.fullmatch(r"\d{1,10}(\.\d{1,6})?", text, re.ASCII):
        return float(text)
    number = r"(\d{1,9}(?:\.\d{1,6})?)"
    match = re.fullmatch(rf"(?:{number}d)?(?:{number}h)?(?:{number}m)?(?:{number}s)?", text, re.ASCII)
    if not text or not match:
        return None
    return sum(float(n) * unit for n, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True) if n)


def _parse_slurm(text: str) -> float | None:
    match = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?", text, re.ASCII)
    if not match or (match[1] is None and match[3] is None):
        return None
    days, first, second, third = (int(part or 0) for part in match.groups())
    if match[1] is None and match[4] is None:
        return first * 60 + second
    return ((days * 24 + first) * 60 + second) * 60 + third
