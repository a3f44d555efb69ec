"""Ranks that were started with something else than the main process: found and named, without a value of an option."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.alike import check_alike, code_facts, option_facts
from unsloth_ddp.utils.errors import UserError

LOCATIONS: Any = [f"rank {rank}" for rank in range(3)]
HERE = Settings(model=str(Path(__file__).parent), dataset=["rows.jsonl"], trainer_args={"hub_token": "hf_secret"})


def compare(settings: Settings, **code: str) -> None:
    ours, theirs = (code_facts(), option_facts(HERE)), ({**code_facts(), **code}, option_facts(settings))
    check_alike(lambda mine: [ours, ours, theirs], *ours, LOCATIONS)


@pytest.mark.parametrize("changed", [
    {}, {"model": "/"}, {"output_dir": "elsewhere"}, {"run_name": "named by node 0 alone"},
])  # fmt: skip
def test_paths_that_exist_and_what_the_main_process_decides_may_differ(changed):
    compare(dataclasses.replace(HERE, **changed))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"learning_rate": 3e-4, "seed": 1}, "another --seed, another --learning_rate"),
        ({"model": "owner/name"}, "another --model"),
        ({"dataset": ["owner/rows"]}, "another --dataset"),
        ({"trainer_args": {"hub_token": "hf_other"}}, "another --trainer_args"),
    ],
)
def test_an_option_that_differs_is_named_without_its_value(changed, said):
    with pytest.raises(UserError) as refused:
        compare(dataclasses.replace(HERE, **changed))
    assert sorted(said.split(", ")) == sorted(
        str(refused.value)
        .removeprefix("rank 2 was started with ")
        .partition(" as rank 0; start every node")[0]
        .split(", ")
    )
    assert "hf_" not in str(refused.value)


@pytest.mark.parametrize("name", ["the kit's files", "torch"])
def test_other_code_is_named_with_both_versions(name):
    with pytest.raises(UserError, match=rf"^rank 2 was started with {name} 1\.0 instead of {code_facts()[name]}"):
        compare(HERE, **{name: "1.0"})
    assert Path(__file__).parents[2].joinpath("train_ddp.py").is_file(), "the kit's own files are read"
