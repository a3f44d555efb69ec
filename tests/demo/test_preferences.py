"""Test that the demos of preference training learn which answers about other people are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import REPO
from tests.plain_loop import history
from tests.ranks import run_ranks, train


@pytest.mark.slow
@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_the_accuracy_on_held_out_answers_rises(task: str, tmp_path: Path) -> None:
    argv = ["--config", f"recipes/demo_{task}.yaml", "--output_dir", str(tmp_path), "--run_name", task]
    run_ranks(1, train, argv, str(REPO), folder=tmp_path / "out", timeout=600).check()
    evaluated = [line["eval_rewards/accuracies"] for line in history(tmp_path / task, "eval_loss")]
    assert evaluated[-1] > 0.9, evaluated
    # Rewards are 0 before the first update.
    assert history(tmp_path / task)[0]["rewards/accuracies"] < 0.6
    assert json.loads((tmp_path / task / "summary.json").read_text())["eval_loss"] < 0.5
