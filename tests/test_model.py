"""What is refused of a model before or while it is loaded, and the names of the modules that get an adapter."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.conftest import DEMO_MODEL
from unsloth_ddp.errors import UserError
from unsloth_ddp.model import check_module_names, load_model, load_tokenizer
from unsloth_ddp.model_check import check_folder
from unsloth_ddp.options import Settings
from unsloth_ddp.plan.shape import model_shape
from unsloth_ddp.runtime import Ranks, Runtime


@pytest.fixture(scope="module")
def model() -> Any:
    """A Llama without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
        )


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"lora_target_modules": ["q_proj", "v_proj"], "lora_modules_to_save": ["embed_tokens", "lm_head"]},
        {"lora_target_modules": ["self_attn.q_proj", "model.layers.0.mlp.up_proj"]},
        {"lora_modules_to_save": ["model.embed_tokens"]},
    ],
)
def test_names_of_modules_are_taken(given: dict[str, list[str]], model: Any) -> None:
    check_module_names(Settings(model="m", **given), model)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"lora_modules_to_save": ["nosuch"]},
            "lora_modules_to_save nosuch is no module of m; it has down_proj, embed_tokens, gate_proj, input_layernorm, ",
        ),
        ({"lora_target_modules": ["q_proj", "v_prj"]}, "lora_target_modules v_prj is no module of m; did you mean v_proj?"),
        ({"lora_target_modules": ["proj"]}, "lora_target_modules proj is no module of m; did you mean "),
        ({"lora_target_modules": ["q_proj,v_proj"]}, "q_proj,v_proj is no module of m; separate names by spaces (q_proj v_proj)."),
        ({"lora_target_modules": [".*_proj"]}, "lora_target_modules .*_proj is no module of m; did you mean "),
        ({"lora_target_modules": ["all-linear", "q_proj"]}, "all-linear is no module of m; all-linear stands alone, "),
        ({"lora_modules_to_save": ["all-linear"]}, "all-linear is no module of m; all-linear stands alone, "),
    ],
)  # fmt: skip
def test_other_names_are_refused_with_what_is_near(given: dict[str, list[str]], sentence: str, model: Any) -> None:
    with pytest.raises(UserError) as refused:
        check_module_names(Settings(model="m", **given), model)
    assert sentence in str(refused.value)


def test_the_names_are_looked_at_when_a_model_is_loaded() -> None:
    settings = Settings(model=str(DEMO_MODEL), lora_modules_to_save=["nosuch"])
    with pytest.raises(UserError, match="lora_modules_to_save nosuch is no module of"):
        load_model(settings, Runtime(Ranks(), "transformers", "cpu", "fp32", "CPU"))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "pytorch_model.bin"])
def test_a_git_lfs_pointer_is_called_what_it_is(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(DEMO_MODEL, folder)
    if name.endswith("bin"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1192135096\n")
    with pytest.raises(UserError, match=rf"{name} is a Git LFS pointer, not the file itself; run git lfs pull in"):
        check_folder(folder, safetensors_only=False)


@pytest.mark.parametrize("load", [load_tokenizer, model_shape])
def test_without_a_network_it_is_said_how_to_bring_the_model(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"What helps: download it once where there is a network \(hf download NAME\)"):
        load(Settings(model="nobody/no-such-model"))
