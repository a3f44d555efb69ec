"""trainer_state.json with any values: resumed only with those that a run writes, otherwise skipped in one sentence."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState

from tests.fuzz import few
from unsloth_ddp.checkpoints.manifest import Damaged, Manifest
from unsloth_ddp.checkpoints.trainer_state import check_trainer_state
from unsloth_ddp.training.callbacks import SavedTotals

OF_NINE = Manifest(3, {"steps": 9})


def written(folder: Path) -> dict[str, Any]:
    """The state that Transformers writes at step 3, with what the kit's callback keeps in it, in a streamed run."""
    saved = SavedTotals(
        {"loss_sum": math.nan, "supervised_tokens": 5, "tokens": 7}, [[0.5, 1.0, 2.0], [math.nan, 0.0, 0.0]]
    )
    saved.stream = {"epoch": 0, "row": 4, "seen": None, "used": 1}
    state = TrainerState(
        global_step=3, epoch=1.5, max_steps=9, log_history=[{"loss": math.nan, "step": 2, "ranks": [[1.0]]}],
        best_metric=math.inf, best_global_step=2, best_model_checkpoint="checkpoint-2",
        stateful_callbacks=[TrainerControl(), saved],
    )  # fmt: skip
    state.save_to_json(str(folder / "trainer_state.json"))
    return json.loads((folder / "trainer_state.json").read_text())


def problem(folder: Path, state: Any, manifest: Manifest = OF_NINE) -> str | None:
    (folder / "trainer_state.json").write_text(state if isinstance(state, str) else json.dumps(state))
    try:
        check_trainer_state(folder, manifest)
    except Damaged as damage:
        return str(damage)
    return None


def test_what_a_run_writes_is_accepted(tmp_path: Path) -> None:
    state = written(tmp_path)
    assert problem(tmp_path, state) is None
    assert problem(tmp_path, state, Manifest(3, {})) is None
    # Earlier releases kept less.
    del state["stateful_callbacks"]["SavedTotals"]["args"]["stream"], state["best_global_step"]
    assert problem(tmp_path, state) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"global_step": 10**18}, "global_step in trainer_state.json is 1000000000000000000 and not 3"),
        ({"global_step": 2}, "global_step in trainer_state.json is 2 and not 3"),
        ({"global_step": 3.0}, "global_step in trainer_state.json has a value that no run writes"),
        ({"epoch": math.nan}, "epoch in"),
        ({"max_steps": "9"}, "max_steps in"),
        ({"eval_steps": [1]}, "eval_steps in"),
        ({"log_history": [["loss", 1]]}, "log_history in"),
        ({"best_model_checkpoint": 5}, "best_model_checkpoint in"),
        ({"stateful_callbacks": {"SavedTotals": {"args": {}}}}, "stateful_callbacks in"),
        ({"stateful_callbacks": {"SavedTotals": {"args": {"pending": [[1, 2]]}, "attributes": {}}}}, "SavedTotals in"),
        ({"stateful_callbacks": {"SavedTotals": {"args": {"totals": {"tokens": 1.5}}, "attributes": {}}}},
            "SavedTotals "
            "in"),
        ({"stateful_callbacks": {"SavedTotals": {"args": {"x": 1}, "attributes": {}}}}, "SavedTotals in"),
        ({"one_more": 1}, "one_more in"),
    ],
)  # fmt: skip
def test_what_no_run_writes_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    assert str(problem(tmp_path, {**written(tmp_path), **change})).startswith(said)


def test_a_file_that_is_no_state_and_a_manifest_beyond_its_run_are_damage(tmp_path: Path) -> None:
    assert problem(tmp_path, "[" * 100_000) == problem(tmp_path, "{") == "trainer_state.json is not JSON"
    assert problem(tmp_path, "[]") == "trainer_state.json holds no mapping"
    forged = {**written(tmp_path), "global_step": 10**18}
    assert problem(tmp_path, forged, Manifest(10**18, {"steps": 9})) == (
        "its manifest has step 1,000,000,000,000,000,000 of a run of 9"
    )


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner), max_leaves=5
)


@few
@given(st.data())
def test_any_value_is_skipped_or_makes_the_state_of_a_run(tmp_path: Path, data: st.DataObject) -> None:
    state = copy.deepcopy(written(tmp_path))
    place: Any = state
    while isinstance(place, dict) and place:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or not place[key] or data.draw(st.booleans()):
            place[key] = data.draw(VALUES)
            break
        place = place[key]
    if problem(tmp_path, state) is None:
        made = TrainerState.load_from_json(str(tmp_path / "trainer_state.json"))
        made.compute_steps(type("Args", (), {"logging_steps": 1, "eval_steps": 1, "save_steps": 1}), 9)
        if "SavedTotals" in made.stateful_callbacks:
            SavedTotals(**made.stateful_callbacks["SavedTotals"]["args"])  # type: ignore[call-overload]
