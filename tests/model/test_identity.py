"""Test that a changed model folder is another model, and that copies and unrelated files are not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL
from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.files import identity
from unsloth_ddp.model.files.identity import model_identity
from unsloth_ddp.utils.files.checksums import SAMPLE, STRIDE, sampled_checksum


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    return tmp_path / "model"


def facts(folder: Path) -> dict[str, str]:
    return model_identity(Settings(model=str(folder)))


def change_a_weight(folder: Path) -> None:
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)


def change_the_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))


def change_the_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (change_a_weight, "model_weights"),
        (change_the_config, "model_config"),
        (change_the_template, "model_tokenizer"),
    ],
)
def test_a_change_in_a_file_of_the_same_size_refuses_a_resume(change, part: str, folder: Path) -> None:
    before = facts(folder)
    change(folder)
    found = manifest.compare_runs(before, facts(folder))
    assert len(found.refused) == 1 and found.refused[0].startswith(
        f"{part} 1 file" if "tokenizer" not in part else part
    )
    assert found.instead == "put the earlier files of the model back"


def test_a_copy_and_other_files_are_the_same_model(folder: Path, tmp_path: Path) -> None:
    before = facts(folder)
    shutil.copytree(folder, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "model.safetensors", (1, 1))
    (tmp_path / "copy" / "README.md").write_text("x")
    (tmp_path / "copy" / "generation_config.json").write_text("{}")
    assert facts(tmp_path / "copy") == before
    assert set(before) == {"model_config", "model_tokenizer", "model_weights"}


def test_a_checkpoint_without_these_facts_is_not_refused(folder: Path) -> None:
    assert manifest.compare_runs({"model": "m"}, {"model": "m", **facts(folder)}).refused == []


def test_a_hub_model_is_identified_by_its_commit() -> None:
    assert model_identity(Settings(model="owner/name")) == {}
    one, two = ({"model_revision": letter * 40} for letter in "ab")
    found = manifest.compare_runs(one, two)
    assert len(found.refused) == 1
    assert found.instead == f"give --model_revision {'a' * 40} to read the same commit again"
    assert manifest.compare_runs({"model_revision": None}, two).refused == []


def test_large_weights_are_read_by_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "READ_COMPLETELY", 1000)
    before = facts(folder)
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[SAMPLE - 1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert facts(folder)["model_weights"] != before["model_weights"]


def test_every_tensor_over_ten_mebibytes_has_a_sample(tmp_path: Path) -> None:
    content = bytearray(3 * STRIDE)
    (tmp_path / "a").write_bytes(content)
    before = sampled_checksum(tmp_path / "a")
    content[STRIDE + 7 : 2 * STRIDE + 7] = b"\1" * STRIDE
    (tmp_path / "a").write_bytes(content)
    assert sampled_checksum(tmp_path / "a") != before
