"""Numbers of things, in the singular and the plural."""

from __future__ import annotations

import pytest

from unsloth_ddp.utils.units import counted


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
