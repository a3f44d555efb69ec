"""Parse memory as people write it (80GB, 139GiB), and print bytes and seconds."""

import re

from unsloth_ddp.utils.errors import UserError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
PREFIXES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
MEMORY = re.compile(r"(\d+\.?\d*|\.\d+)\s*([kmgt]i?)?B", re.IGNORECASE)


def parse_memory(option: str, text: str) -> float:
    """Return bytes; 1 GB is 10^9 bytes, 1 GiB 2^30.

    Raises:
        UserError: `text` is not an amount above 0.
    """
    amount = MEMORY.fullmatch(text.strip())
    size = float(amount[1]) * PREFIXES[(amount[2] or "").lower()] if amount else 0
    if not size:
        raise UserError(f"{option} {text!r} is not an amount above 0; write 80GB or 139GiB.")
    return size


def counted(number: int, thing: str) -> str:
    """Return a number of things, in the plural where it is not 1: `1 process`, `2 processes`, `3 rows`."""
    ending = "es" if thing.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{number:,} {thing}{'' if number == 1 else ending}"


def shown_bytes(value: float) -> str:
    """Return bytes with one decimal, in the largest binary unit that makes at least 1."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:.0f} B"


def shown_seconds(value: float) -> str:
    """Return a duration with one decimal, from microseconds to days, in the largest unit that makes at least 2."""
    if 0 < value < 1:
        return f"{value * 1e6:,.0f} us" if value < 0.001 else f"{value * 1000:,.1f} ms"
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if value >= 2 * size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:.1f} s"
