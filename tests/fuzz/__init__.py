"""Rubbish in: whatever stands in data, settings, manifests and model folders ends in one sentence, or works."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from unsloth_ddp.utils.errors import UserError

T = TypeVar("T")
# Some examples write files, which takes as long as the machine is busy.
few = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
LONGEST_SENTENCE = 2500
# Control characters, halves of characters, ends of lines and paragraphs.
UNPRINTABLE = {"Cc", "Cs", "Zl", "Zp"}


def refusal(work: Callable[[], object]) -> str:
    """The sentence with which `work` is refused; anything else it does fails the test."""
    with pytest.raises(UserError) as refused:
        work()
    return sentence(refused.value)


def result_or_sentence(work: Callable[[], T]) -> T | None:
    """What `work` comes to, or None where it is refused in one sentence."""
    try:
        return work()
    except UserError as refused:
        sentence(refused)
        return None


def sentence(refused: UserError) -> str:
    """The message, checked to be one line that is safe to print."""
    text = str(refused)
    assert text.strip() and not {unicodedata.category(letter) for letter in text} & UNPRINTABLE, repr(text)
    assert len(text) < LONGEST_SENTENCE
    text.encode()
    return text
