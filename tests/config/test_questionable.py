"""Settings that train without sense are named, and sensible ones are not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import REPO
from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.config.questionable import questionable_settings

RUN: dict[str, Any] = {
    "steps": 100,
    "steps_per_epoch": 50,
    "rows": 800,
    "rows_per_step": 16,
    "truncated": 0,
    "unsupervised": 0,
    "cut_answers": 0,
}


@pytest.mark.parametrize(
    ("given", "run", "said"),
    [
        ({"warmup_steps": 100}, {},
            "warmup_steps 100 is not below the 100 steps of the run, so learning_rate is never reached"),
        ({"method": "full"}, {},
            "learning_rate 0.0002 is high for method full with adamw_torch_fused; 1e-05 is usual."),
        ({"learning_rate": 2e-2}, {}, "learning_rate 0.02 is high for method lora"),
        ({"learning_rate": 1e-6}, {}, "learning_rate 1e-06 is low for method lora"),
        ({}, {"rows": 10, "steps_per_epoch": 1},
            "A step takes 16 rows, more than the 10 of the set, so an epoch is one step;"),
        ({}, {"truncated": 800},
            "max_length 2048 cuts 800 of 800 rows, so their ends are not learned; raise --max_length."),
        ({}, {"truncated": 400}, "max_length 2048 cuts 400 of 800 rows"),
        ({}, {"unsupervised": 1}, "Nothing is learned from 1 row without a supervised token; remove such rows."),
        ({}, {"truncated": 5, "unsupervised": 3, "cut_answers": 2},
         "Nothing is learned from 3 rows without a supervised token; max_length 2048 cuts off 2 answers, so raise it, "
         "or"),
        ({}, {"truncated": 5, "unsupervised": 3},
            "Nothing is learned from 3 rows without a supervised token; remove such rows."),
        ({}, {"steps": 3}, "The run has 3 optimizer steps, which is little to learn from; raise --num_train_epochs or"),
        ({"max_steps": 3}, {"steps": 3},
            "The run has 3 optimizer steps, which is little to learn from; raise --max_steps."),
        ({}, {"steps": 1}, "The run has 1 optimizer step, which"),
        ({"dataset": ["demo/train.jsonl"], "eval_dataset": [str(REPO / "demo/train.jsonl")]}, {},
         f"eval_dataset {REPO}/demo/train.jsonl is trained on too"),
        ({"dataset": ["me/chats"], "eval_dataset": ["me/chats"], "eval_dataset_split": "train"}, {},
            "eval_dataset me/chats is"),
    ],
)  # fmt: skip
def test_each_is_named_once(
    given: dict[str, Any], run: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPO)
    sentences = questionable_settings(Settings(**given), **{**RUN, **run})
    assert len(sentences) == 1 and sentences[0].startswith(said)


@pytest.mark.parametrize(
    ("given", "run"),
    [
        ({}, {}),
        ({"warmup_steps": 99}, {}),
        ({"warmup_steps": 0.5}, {}),
        ({"warmup_steps": 500, "lr_scheduler_type": "constant"}, {}),
        ({"learning_rate": 0.1, "optim": "sgd"}, {}),
        ({"method": "full", "learning_rate": 5e-5}, {}),
        ({}, {"rows": None, "steps_per_epoch": None}),
        ({}, {"truncated": 399}),
        ({}, {"steps": 10}),
        ({"dataset": ["demo/train.jsonl"], "eval_dataset": ["demo/eval.jsonl"]}, {}),
        ({"dataset": ["me/chats"], "eval_dataset": ["me/chats"]}, {}),
    ],
)
def test_sensible_settings_are_not(given: dict[str, Any], run: dict[str, Any]) -> None:
    assert questionable_settings(Settings(**given), **{**RUN, **run}) == []


@pytest.mark.parametrize("recipe", sorted((REPO / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipes_are_sensible(recipe: Any) -> None:
    settings = parse_settings(["--config", str(recipe), "--dataset", "rows.jsonl"])
    assert questionable_settings(settings, **RUN) == []
