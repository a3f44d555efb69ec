"""Test that a changed model folder is another model, and that copies and unrelated files are not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL, REPO
from tests.ranks import run_ranks
from tests.runtimes import cpu_runtime
from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.images.processing import load_processing
from unsloth_ddp.distributed.ranks import ranks_from_environment
from unsloth_ddp.distributed.runtime import started
from unsloth_ddp.model.files import identity
from unsloth_ddp.model.files.identity import model_identity, opened_files
from unsloth_ddp.model.loading.load import load_tokenizer
from unsloth_ddp.model.loading.reference_model import load_reference
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.checksums import SAMPLE, STRIDE, sampled_checksum


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(DEMO_MODEL, tmp_path / "model")
    return tmp_path / "model"


def facts(folder: Path) -> dict[str, str]:
    return model_identity(Settings(model=str(folder)))


def change_a_weight(folder: Path, name: str = "model.safetensors") -> None:
    weights = bytearray((folder / name).read_bytes())
    weights[-1] ^= 1
    (folder / name).write_bytes(weights)


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


# ---- what loading opened ----


def load_again(folder: Path, before: dict[str, str]) -> dict[str, str]:
    """Return the files of an image-text model that loading opens, and those that it opened before."""
    settings = Settings(model=str(folder))
    load_tokenizer(settings)
    load_processing(settings)
    return opened_files(settings, cpu_runtime(), before)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda folder: None, ""),
        (lambda folder: (folder / "README.md").write_text("x"), ""),
        (lambda folder: (folder / "generation_config.json").write_text("{}"), ""),
        (lambda folder: (folder / "processor_config.json").open("a").write(" "), "model/processor_config.json 1,2"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "model/chat_template.jinja 421 bytes"),
        (lambda folder: (folder / "special_tokens_map.json").write_text("{}"), "model/special_tokens_map.json none -> "
            "2"),
    ],
)  # fmt: skip
def test_a_resume_is_refused_if_a_file_that_loading_opens_changed(
    change: Callable[[Path], object], refused: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(REPO / "demo/vision_model", tmp_path / "model")
    before = load_again(folder, {})
    # Loaded here without the model, whose generation config it would open too.
    assert before["model/generation_config.json"] == "not read" and "model/model.safetensors" not in before
    change(folder)
    found = manifest.compare_runs({"files": before}, {"files": load_again(folder, before)})
    assert [entry[: len(refused)] for entry in found.refused] == ([refused] if refused else [])


def test_a_checkpoint_without_opened_files_is_not_refused_and_one_with_hostile_names_reads_none_of_them(
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(REPO / "demo/vision_model", tmp_path / "model")
    hostile = {"model/../../etc/passwd": "1", "model//etc/passwd": "2", "elsewhere/x": "3", f"model/{'x' * 300}": "4"}
    now = load_again(folder, hostile)
    assert {now.get(name) for name in hostile} == {None, "none"}
    for before in ({}, {"files": None}, {"files": ["model/config.json"]}):
        assert manifest.compare_runs(before, {"files": now}).refused == []


def say_refusal_of_reference(folder: str) -> None:
    """Load the reference as each of two nodes that have adapters of their own."""
    ranks = ranks_from_environment()
    with started(Settings(use_cpu=True), ranks) as runtime:
        runtime.backend = "transformers"
        for case in ("same", "weights", "config"):
            adapter = Path(folder, case, f"node_{ranks.rank}")
            settings = Settings(model=str(DEMO_MODEL), task="dpo", reference_model=str(adapter), use_cpu=True)
            try:
                load_reference(settings, runtime, 8, None)
                print(f"{case}: loaded")
            except UserError as error:
                print(f"{case}: {error}")


def test_a_reference_adapter_of_other_files_on_another_node_is_refused_on_every_rank(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(DEMO_MODEL), LoraConfig(target_modules="all-linear"))
    for case in ("same", "weights", "config"):
        for node in range(2):
            model.save_pretrained(tmp_path / case / f"node_{node}")
    change_a_weight(tmp_path / "weights" / "node_1", "adapter_model.safetensors")
    (tmp_path / "config" / "node_1" / "adapter_config.json").open("a").write(" ")
    nodes = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    made = run_ranks(2, say_refusal_of_reference, str(tmp_path), folder=tmp_path / "out", environ=nodes).check()
    for output in made.outputs:
        assert "same: loaded" in output
        assert "weights: reference_model/adapter_model.safetensors on rank 1" in output
        assert "config: reference_model/adapter_config.json on rank 1" in output
