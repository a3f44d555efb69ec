"""Amounts in units, read and shown, and numbers of things in the singular and the plural."""

from __future__ import annotations

import pytest

from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.units import counted, parse_memory, shown_bytes, shown_seconds


@pytest.mark.parametrize(
    ("number", "thing", "shown"),
    [
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
        (1, "pack", "1 pack"),
        (0, "row", "0 rows"),
        (1200, "training row", "1,200 training rows"),
        (1, "launch", "1 launch"),
        (6, "launch", "6 launches"),
    ],
)
def test_one_thing_stands_in_the_singular(number, thing, shown):
    assert counted(number, thing) == shown


def test_decimal_and_binary_units_are_told_apart():
    assert parse_memory("--gpu_memory", "80GB") == 80e9
    assert parse_memory("--gpu_memory", "139GiB") == 139 * 2**30
    for text in ("80", "0GB", "1.2.3GB", "-1GB"):
        with pytest.raises(UserError, match="write 80GB"):
            parse_memory("--gpu_memory", text)


def test_amounts_are_shown_in_units_of_their_size():
    assert [shown_bytes(b) for b in (0, 1536, 174_587_904, 3 * 2**30, 2**50)] == [
        "0 B", "1.5 KiB", "166.5 MiB", "3.0 GiB", "1,024.0 TiB",
    ]  # fmt: skip
    assert [shown_seconds(s) for s in (0.0, 0.00005, 0.0123, 30.0, 600.0, 36_000.0, 864_000.0)] == [
        "0.0 s", "50 us", "12.3 ms", "30.0 s", "10.0 min", "10.0 h", "10.0 days",
    ]  # fmt: skip
