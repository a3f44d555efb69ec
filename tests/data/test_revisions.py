"""Test that branches and tags of the Hub become commits, once and alike on every rank, with stand-ins for the Hub."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources import revisions
from unsloth_ddp.data.sources.revisions import dataset_revisions, ignored_hub_options, pin_revisions
from unsloth_ddp.data.sources.rows import read_rows
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import UserError

CPU = cpu_runtime()
COMMITS = {
    ("o/model", None): "a" * 40,
    ("o/model", "v1"): "b" * 40,
    ("o/rows", None): "c" * 40,
    ("o/more", "v2"): "d" * 40,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str | None]]:
    """Answer from COMMITS, as the Hub does; record what it is asked for."""
    found: list[tuple[str, str | None]] = []

    def repo_info(self: Any, name: str, *, repo_type: str, revision: str | None, timeout: float) -> Any:
        found.append((name, revision))
        if (name, revision) not in COMMITS:
            raise ConnectionError("no network")
        return SimpleNamespace(sha=COMMITS[name, revision])

    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", repo_info)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return found


def pinned(runtime: Runtime = CPU, **options: Any) -> tuple[str | None, list[str]]:
    settings = Settings(**{"model": "o/model", "dataset": ["o/rows"], **options})
    settings = pin_revisions(settings, runtime)
    return settings.model_revision, settings.dataset_revision


def test_branches_and_tags_become_commits(asked: list[Any]) -> None:
    assert pinned() == ("a" * 40, ["c" * 40])
    assert pinned(model_revision="v1", dataset=["o/more"], dataset_revision=["v2"]) == ("b" * 40, ["d" * 40])


def test_the_reference_model_has_a_commit_of_its_own(asked: list[Any]) -> None:
    settings = Settings(model="o/other", task="dpo", reference_model="o/model", reference_model_revision="v1")
    assert pin_revisions(settings, CPU).reference_model_revision == "b" * 40


def test_a_commit_and_local_files_are_not_asked_for(asked: list[Any], tmp_path: Path) -> None:
    commit = "e" * 40
    assert pinned(model_revision=commit, dataset=["rows.jsonl"]) == (commit, [])
    assert pinned(model=str(tmp_path), dataset=["./a.parquet"]) == (None, [])
    assert asked == []


def test_a_dataset_named_twice_has_one_revision(asked: list[Any]) -> None:
    assert pinned(eval_dataset=["o/rows"])[1] == ["c" * 40]
    assert asked.count(("o/rows", None)) == 1


def test_without_an_answer_things_stay_as_given(asked: list[Any], tmp_path: Path) -> None:
    assert pinned(model="o/other", model_revision="v9", dataset=["o/x", "o/rows"]) == ("v9", [])
    reference = tmp_path / "models--o--other" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_text("f" * 40)
    assert pinned(model="o/other", dataset=["a.jsonl"]) == ("f" * 40, []), "the cache knows the commit"


def test_a_repository_that_unsloth_may_replace_is_not_pinned(asked: list[Any]) -> None:
    unsloth = Runtime(Ranks(), "unsloth", "cuda", "bf16", "H200")
    assert pinned(unsloth, method="qlora")[0] is None
    assert pinned(unsloth, method="lora")[0] == "a" * 40


def test_each_hub_dataset_needs_a_revision() -> None:
    settings = Settings(model="m", dataset=["o/rows", "a.jsonl"], eval_dataset=["o/more"], dataset_revision=["v1"])
    with pytest.raises(
        UserError, match=r"dataset_revision has 1 values \(v1\), but .* name 2 Hub datasets \(o/rows, o/m"
    ):
        dataset_revisions(settings)
    both = dataclasses.replace(settings, dataset_revision=["v1", "v2"])
    assert dataset_revisions(both) == {"o/rows": "v1", "o/more": "v2"}


def test_rows_are_read_at_the_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def load_dataset(name: str, config: str | None, **options: Any) -> list[dict[str, str]]:
        seen.update(options)
        return [{"text": "a"}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    assert len(list(read_rows("o/rows", "train", None, "v1"))) == 1
    assert seen["revision"] == "v1"
    assert revisions.COMMIT.fullmatch("v1") is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "o/model", "model_revision": "v1", "dataset": ["o/rows"], "dataset_split": "validation"}, []),
        ({"model": ".", "model_revision": "v1", "dataset": ["o/rows"]}, ["model_revision v1 is ignored: the model is"]),
        ({"model": "o/model", "dataset": ["a.jsonl"], "dataset_split": "test"}, ["dataset_split test is ignored"]),
        ({"model": "o/model", "dataset": ["a.jsonl", "o/rows"], "dataset_split": "test", "dataset_config": "en"}, []),
        (
            {
                "model": "o/m",
                "dataset": ["a.jsonl"],
                "eval_dataset": ["b.csv"],
                "eval_dataset_split": "dev",
                "dataset_config": "en",
            },
            [
                "eval_dataset_split dev is ignored: the evaluation dataset",
                "dataset_config en is ignored: the dataset is on",
            ],
        ),
        ({"model": "o/model", "dataset": ["o/rows"], "eval_dataset_split": "dev"}, []),
    ],
)
def test_what_selects_from_the_hub_is_said_to_be_ignored_elsewhere(given: dict[str, Any], said: list[str]) -> None:
    found = ignored_hub_options(Settings(**given))
    assert len(found) == len(said)
    assert all(sentence.startswith(start) for sentence, start in zip(found, said, strict=True)), found
