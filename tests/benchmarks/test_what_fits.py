"""Test that docs/what-fits.md holds what its script computes."""

from __future__ import annotations

from typing import get_args

import pytest

from benchmarks.memory import what_fits
from unsloth_ddp.sizing.estimate import Method


@pytest.mark.parametrize("method", get_args(Method))
def test_the_first_lines_are_what_the_plan_computes(method: Method) -> None:
    line = what_fits.make_line("1.7B", method, what_fits.read_measured())
    assert line in what_fits.PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_the_page_is_what_the_script_writes() -> None:
    page = what_fits.PAGE.read_text(encoding="utf-8")
    assert what_fits.with_tables(page, what_fits.make_tables()) == page


def test_a_planned_figure_near_a_measured_one_is_marked() -> None:
    measured = what_fits.read_measured()
    assert measured["qwen3_1.7b", "full", "none", 1] == pytest.approx(28.3, abs=0.1)
    # While loading, FSDP2 takes more than while training.
    assert measured["qwen3_8b", "lora", "fsdp2", 2] == pytest.approx(23.2, abs=0.1)
    assert "1 DDP 29*" in what_fits.make_line("1.7B", "full", measured)
    assert "*" not in what_fits.make_line("1.7B", "full", {})
