"""Every option answers every question of its declaration."""

from __future__ import annotations

import dataclasses
import typing

import pytest

from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.config.declare import Bounds, Option, option
from unsloth_ddp.config.options import OPTIONS, TYPES, Settings, options_with
from unsloth_ddp.utils.errors import UserError


def test_an_option_without_an_answer_for_a_resume_cannot_be_declared() -> None:
    option(1, "A number.", on_resume="allow")
    with pytest.raises(TypeError, match="on_resume"):
        option(1, "A number.")


@pytest.mark.parametrize("name", OPTIONS)
def test_every_declaration_is_complete(name: str) -> None:
    declared = OPTIONS[name]
    kinds = {TYPES[name], *typing.get_args(TYPES[name])}
    bounds = (declared.above, declared.at_least, declared.at_most, declared.below)
    if kinds & {int, float}:
        assert declared.above is not None or declared.at_least is not None, "a number without a lower bound"
    else:
        assert bounds == (None,) * 4, "bounds of something that is not a number"
    assert declared.help.endswith((".", ")")), declared.help
    assert declared.on_resume in ("refuse", "keep", "report", "allow")
    assert not (declared.resolved and declared.on_resume == "allow"), "a resolved value that nothing compares"
    assert not (declared.words and not declared.path)
    declared.check(name, getattr(Settings(), name))


def test_a_declaration_that_no_one_reads_is_none() -> None:
    assert {f.name for f in dataclasses.fields(Option)} == {
        "help", "on_resume", "resolved", "new_run", "above", "at_least", "at_most", "below", "path", "words", "bare",
    }  # fmt: skip


def test_a_change_of_every_guarded_option_is_refused_or_reported_on_resume() -> None:
    for name, declared in OPTIONS.items():
        found = manifest.compare_runs({name: 1}, {name: 2})
        assert bool(found.refused) == (declared.on_resume in ("refuse", "keep")), name
        assert bool(found.reported) == (declared.on_resume == "report"), name
        assert bool(found.impossible) == (declared.on_resume == "keep"), name


def test_options_are_found_by_their_declaration() -> None:
    assert options_with(path="written") == ("output_dir",)
    assert "max_time" in options_with(new_run=False)
    assert options_with(on_resume="refuse", resolved=True) == (
        "backend", "precision", "packing", "shuffle_buffer", "global_batch_size",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bounds", "value", "said"),
    [
        ({"above": 0}, 0, "x is 0, but it has to be above 0."),
        ({"at_least": 0}, -0.5, "x is -0.5, but it has to be 0 or above."),
        ({"at_most": 1_000}, 1_001, "x is 1001, but it has to be 1,000 or below."),
        ({"below": 1}, 1.0, "x is 1.0, but it has to be below 1."),
    ],
)
def test_a_number_out_of_bounds_is_refused(bounds: dict[str, float], value: float, said: str) -> None:
    declared = Bounds(**bounds)
    with pytest.raises(UserError) as refused:
        declared.check("x", value)
    assert str(refused.value) == said
    for exempt in (None, "auto", 0.25):
        declared.check("x", exempt)
