"""Test that a reference model is refused if its probabilities cannot be compared, and that its files identify it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.conftest import save_llama
from tests.runtimes import cpu_runtime
from unsloth_ddp.checkpoints.identity import run_identity
from unsloth_ddp.checkpoints.manifest import compare_runs
from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.files.check import base_of_reference, check_reference
from unsloth_ddp.model.loading.reference_model import check_reference_tokens
from unsloth_ddp.utils.errors import UserError

CPU = cpu_runtime()


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "other")


def with_reference(model: Path, reference: Path) -> Settings:
    return Settings(model=str(model), task="dpo", reference_model=str(reference))


def test_a_model_with_the_same_tokens_is_taken(tiny_model: Path, other: Path) -> None:
    settings = with_reference(tiny_model, other)
    check_reference(settings, "transformers")
    check_reference_tokens(settings, CPU, AutoTokenizer.from_pretrained(tiny_model))


def test_other_tokens_are_refused(tiny_model: Path, other: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.add_tokens(["<more>"])
    with pytest.raises(
        UserError, match=r"has other tokens than model .*; '<more>' is None and \d+\), so .* same tokenizer.$"
    ):
        check_reference_tokens(with_reference(tiny_model, other), CPU, tokenizer)


@pytest.mark.parametrize(
    ("base", "reason"),
    [
        ("", "is an adapter whose adapter_config.json does not name its base model"),
        ("missing/folder/of", "reference_model: the base of .*, model missing/folder/of: there is no such"),
        (None, "The adapter in .* is damaged: adapter_model.safetensors cannot be read"),
    ],
)  # fmt: skip
def test_an_adapter_needs_its_base_and_its_weights(
    tiny_model: Path, tmp_path: Path, base: str | None, reason: str
) -> None:
    named = {"base_model_name_or_path": str(tiny_model) if base is None else base}
    (tmp_path / "adapter_config.json").write_text(json.dumps(named))
    with pytest.raises(UserError, match=reason):
        check_reference(with_reference(tiny_model, tmp_path))


def test_an_adapter_is_loaded_on_its_base_with_the_commit_of_the_model(tiny_model: Path, tmp_path: Path) -> None:
    settings = dataclasses.replace(with_reference(tiny_model, tmp_path), model="owner/base", model_revision="abc")
    for base, revision in (("owner/base", "abc"), ("owner/other", "def")):
        named = {"base_model_name_or_path": base, "revision": "def"}
        (tmp_path / "adapter_config.json").write_text(json.dumps(named))
        found = base_of_reference(settings)
        assert found and (found.model, found.model_revision) == (base, revision)


def test_a_folder_without_weights_is_refused(tiny_model: Path, other: Path) -> None:
    (other / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds no weights"):
        check_reference(with_reference(tiny_model, other))


def test_changed_files_of_the_reference_are_refused_at_a_resume(tiny_model: Path, other: Path) -> None:
    settings = with_reference(tiny_model, other)
    before = run_identity(settings, CPU)
    assert not compare_runs(before, run_identity(settings, CPU)).refused
    shutil.rmtree(other)
    # The same sizes with other values.
    save_llama(other, initializer_range=0.03)
    found = compare_runs(before, run_identity(settings, CPU))
    assert [change.split()[0] for change in found.refused] == ["reference_model_config", "reference_model_weights"]
    assert found.instead == "put the earlier files of the model back"
    no_reference = run_identity(Settings(model=str(tiny_model), task="dpo"), CPU)
    assert any(change.startswith("reference_model ") for change in compare_runs(before, no_reference).refused)
