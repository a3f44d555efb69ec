"""The names of the modules that an adapter is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from unsloth_ddp.errors import UserError
from unsloth_ddp.model import check_module_names
from unsloth_ddp.options import Settings


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
