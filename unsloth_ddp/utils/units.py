"""Amounts as people write and read them: 25Gbps, 450GB/s, 80GB, 139GiB; 16.6 GiB, 12.3 ms, 25 Gbit/s."""

from __future__ import annotations

import re

from unsloth_ddp.utils.errors import UserError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
PREFIXES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
BANDWIDTH = re.compile(r"([\d.]+)\s*([kKmMgGtT]i?)?(bps|bit/s|bits/s|B/s|Bps)")
MEMORY = re.compile(r"([\d.]+)\s*([kmgt]i?)?B", re.IGNORECASE)


def parse_bandwidth(text: str) -> float:
    """Bytes a second; a small b is a bit, a capital B a byte.

    Raises:
        UserError: it is not a bandwidth above 0.
    """
    found = BANDWIDTH.fullmatch(text.strip())
    value = _number(found.group(1)) if found else 0.0
    if not found or not value:
        raise UserError(f"bandwidth {text!r} is no bandwidth above 0; write 25Gbps (bits) or 400GB/s (bytes).")
    bits = found.group(3).startswith("b")
    return value * PREFIXES[(found.group(2) or "").lower()] / (8 if bits else 1)


def parse_memory(text: str) -> float:
    """Bytes; GB is 10^9 of them, GiB 2^30.

    Raises:
        UserError: it is not an amount above 0.
    """
    found = MEMORY.fullmatch(text.strip())
    value = _number(found.group(1)) if found else 0.0
    if not found or not value:
        raise UserError(f"memory {text!r} is not an amount above 0; write 80GB or 139GiB.")
    return value * PREFIXES[(found.group(2) or "").lower()]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def shown_bytes(value: float) -> str:
    """With one digit, in the largest unit of which there is a whole one."""
    for unit, size in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:.0f} B"


def shown_seconds(value: float) -> str:
    """Microseconds up to days, in the largest unit of which there are two."""
    if value < 1:
        return f"{value * 1e6:,.0f} us" if value < 0.001 else f"{value * 1000:,.1f} ms"
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if value >= 2 * size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:.1f} s"


def shown_bandwidth(value: float) -> str:
    """Gbit/s of a bandwidth in bytes a second."""
    return f"{value * 8 / 1e9:,.6g} Gbit/s"
