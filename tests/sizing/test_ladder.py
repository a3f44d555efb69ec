"""The ladder is a pure function of facts, and every choice takes its first rung that fits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from unsloth_ddp.sizing.ladder import LadderFacts, Rung, below, choose, ladder
from unsloth_ddp.training.step.first_rung import rungs_from

ALL, BOTH = ("none", "torch", "unsloth"), ("none", "torch")


def facts(captured: bool = True, tokens_a_row: int = 2048, kinds: tuple[str, ...] = ALL) -> LadderFacts:
    sizes = (1, 2, 4, 8, 16)
    return LadderFacts(
        kinds, sizes, BOTH if captured else (), (1, 2, 4) if captured else (), lambda rows: rows * tokens_a_row
    )


def test_rungs_go_from_the_fastest_to_the_one_that_needs_least():
    rungs = ladder(facts(kinds=BOTH))
    assert [(r.captured, r.kind, r.rows) for r in rungs] == [
        *[(True, kind, rows) for kind in BOTH for rows in (4, 2, 1)],
        *[(False, kind, rows) for kind in BOTH for rows in (16, 8, 4)],
        # Too few tokens to keep a GPU busy: the most first, then the cheaper kind.
        *[(False, kind, rows) for rows in (2, 1) for kind in BOTH],
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_first_rung_that_fits_and_asks_seldom(seed: int):
    drawn = random.Random(seed)
    of_run = facts(captured=seed % 2 == 0, tokens_a_row=drawn.choice([200, 1100, 2048, 9000]))
    rungs = ladder(of_run)
    room = drawn.uniform(0.2, 20)
    needs = {"none": 1.0, "torch": 0.3, "unsloth": 0.2}
    tried: list[Rung] = []

    def fits(rung: Rung) -> bool:
        tried.append(rung)
        return rung.rows * needs[rung.kind] * (0.7 if rung.captured else 1) <= room

    fitting = choose(rungs, fits, of_run.tokens)
    assert len(tried) == len(set(tried)) <= 12
    assert fitting == next(
        (rung for rung in rungs if rung.rows * needs[rung.kind] * (0.7 if rung.captured else 1) <= room), None
    )


@pytest.mark.parametrize(
    ("began", "captured", "lower"),
    [
        (
            Rung(True, "none", 4),
            True,
            ["CUDA graphs and torch", "unsloth", "unsloth/2", "unsloth/4", "unsloth/8", "unsloth/16"],
        ),
        (Rung(False, "none", 4), False, ["torch", "unsloth", "unsloth/2", "unsloth/4", "unsloth/8", "unsloth/16"]),
        (Rung(False, "unsloth", 4), False, ["unsloth/2", "unsloth/4", "unsloth/8", "unsloth/16"]),
        (Rung(False, "unsloth", 4, 4), False, ["unsloth/8", "unsloth/16"]),
    ],
)
def test_a_step_goes_down_by_kind_and_then_by_passes(began: Rung, captured: bool, lower: list[str]):
    shown = [
        f"{'CUDA graphs and ' * rung.captured}{rung.kind}{f'/{rung.passes}' * (rung.passes > 1)}"
        for rung in below(began, facts(captured), most_rows=10)
    ]
    assert shown == lower


def test_a_captured_step_without_another_kind_goes_back_to_the_backends_pass():
    of_run = LadderFacts(BOTH, (1,), BOTH, (1,), lambda rows: rows)
    assert below(Rung(True, "torch", 1), of_run, most_rows=1) == [Rung(False, "torch", 1)]
    only = LadderFacts(("none",), (1,), ("none",), (1,), lambda rows: rows)
    assert below(Rung(True, "none", 1), only, 2) == [Rung(False, "none", 1), Rung(False, "none", 1, 2)]


RESUMED = {"gradient_checkpointing": "torch", "per_device_train_batch_size": 4}


@pytest.mark.parametrize(
    ("resumed", "last", "first"),
    [
        ({}, None, Rung(True, "none", 4)),
        (RESUMED, None, Rung(False, "torch", 4)),
        (RESUMED | {"cuda_graphs": "on"}, None, Rung(True, "torch", 4)),
        (RESUMED | {"passes": 2}, None, Rung(False, "torch", 4, 2)),
        # Memory ran out, and no rank could repeat the step.
        ({}, Rung(False, "none", 16), Rung(False, "none", 8)),
        ({}, Rung(False, "torch", 1), Rung(False, "unsloth", 1)),
        (RESUMED, Rung(False, "torch", 4), Rung(False, "unsloth", 4)),
    ],
)
def test_a_run_begins_where_it_was_or_below_what_ran_out_of_memory(resumed: Any, last: Rung | None, first: Rung):
    of_run = facts()
    assert rungs_from(ladder(of_run), of_run, resumed, last)[0] == first
