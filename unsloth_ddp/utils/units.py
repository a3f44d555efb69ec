"""Parse amounts as people write them (25Gbps, 450GB/s, 80GB, 139GiB), and print bytes and seconds."""

import re

from unsloth_ddp.utils.errors import UserError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
PREFIXES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
BANDWIDTH = re.compile(r"(\d+\.?\d*|\.\d+)\s*([kKmMgGtT]i?)?(bps|bit/s|bits/s|B/s|Bps)")
MEMORY = re.compile(r"(\d+\.?\d*|\.\d+)\s*([kmgt]i?)?B", re.IGNORECASE)


def parse_bandwidth(option: str, text: str) -> float:
    """Return the bytes per second that an option gives; a lower-case b is a bit, an upper-case B a byte.

    Raises:
        UserError: `text` is not a bandwidth above 0.
    """
    found = BANDWIDTH.fullmatch(text.strip())
    if not found or not (value := _amount(found)):
        raise UserError(f"{option} {text!r} is not a bandwidth above 0; write 25Gbps (bits) or 400GB/s (bytes).")
    return value / (8 if found[3].startswith("b") else 1)


def parse_memory(option: str, text: str) -> float:
    """Return bytes; 1 GB is 10^9 bytes, 1 GiB 2^30.

    Raises:
        UserError: `text` is not an amount above 0.
    """
    found = MEMORY.fullmatch(text.strip())
    if not found or not (value := _amount(found)):
        raise UserError(f"{option} {text!r} is not an amount above 0; write 80GB or 139GiB.")
    return value


def _amount(found: re.Match[str]) -> float:
    return float(found[1]) * PREFIXES[(found[2] or "").lower()]


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
