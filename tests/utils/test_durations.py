"""Durations in every notation that --max_time takes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsloth_ddp.distributed.signals import parse_duration
from unsloth_ddp.utils.errors import UserError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("3600", 3600), ("1.5", 1.5), ("90s", 90), ("90m", 5400), ("2h", 7200), ("1d", 86400), ("1h30m", 5400),
        (" 2H ", 7200), ("0.5h", 1800), ("05:30", 330), ("01:00:00", 3600), ("1-12", 129600), ("1-12:30", 131400),
        ("2-00:00:01", 172801), ("90:00", 5400),
    ],
)  # fmt: skip
def test_a_duration_in_every_notation(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "0m", "-5", "1h 30", "5x", "1:2:3:4", "nan", "inf", "1e3", "h", "-"])
def test_what_is_no_duration_is_refused_with_the_value(text):
    with pytest.raises(UserError, match="it takes a time such as"):
        parse_duration(text)


@given(st.text() | st.from_regex(r"[0-9dhms:.\- ]{0,12}", fullmatch=True))
def test_any_text_is_a_positive_time_or_refused(text):
    try:
        seconds = parse_duration(text)
    except UserError:
        return
    assert seconds > 0 and math.isfinite(seconds)
