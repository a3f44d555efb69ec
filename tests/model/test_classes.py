"""A model is loaded in the class that the Hub names, and other kinds of models are refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.tiny_models import tiny_config
from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.loading.classes import check_attends_backwards, class_name, model_class
from unsloth_ddp.utils.errors import UserError


def config_of(model_type: str, *named: str, **changed: Any) -> Any:
    """Return a tiny config that names classes as a checkpoint does."""
    config = tiny_config(model_type)
    config.update({"architectures": list(named) or None, **changed})
    return config


@pytest.mark.parametrize(
    ("model_type", "named", "auto"),
    [
        ("qwen3", "Qwen3ForCausalLM", "AutoModelForCausalLM"),
        ("qwen3_5", "Qwen3_5ForConditionalGeneration", "AutoModelForImageTextToText"),
        ("mistral3", "Mistral3ForConditionalGeneration", "AutoModelForImageTextToText"),
        ("gemma3_text", "Gemma3ForCausalLM", "AutoModelForCausalLM"),
        # Transformers has this image-text class under both.
        ("gemma4", "Gemma4ForConditionalGeneration", "AutoModelForCausalLM"),
        # A fine-tuned model of somebody's own class.
        ("llama", "MyLlamaForCausalLM", "AutoModelForCausalLM"),
    ],
)
def test_the_class_is_the_one_that_the_config_names(model_type: str, named: str, auto: str) -> None:
    config = config_of(model_type, named)
    assert model_class(config, Settings(model="m")).__name__ == auto
    assert named.startswith("My") or class_name(config, Settings(model="m")) == named


@pytest.mark.parametrize(
    ("model_type", "named", "changed"),
    [
        ("t5", "T5ForConditionalGeneration", {}),
        ("llama", "LlamaForSequenceClassification", {}),
        ("bert", "BertForMaskedLM", {}),
        ("bert", "BertForPreTraining", {"is_decoder": True}),
        ("bert", "BertLMHeadModel", {"is_decoder": False}),
        ("whisper", "WhisperForConditionalGeneration", {}),
        ("wav2vec2", "Wav2Vec2ForCTC", {}),
        ("vit", "ViTModel", {}),
    ],
)
def test_other_kinds_are_refused(model_type: str, named: str, changed: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"is a {named}, and this kit trains causal language models and image-text"):
        model_class(config_of(model_type, named, **changed), Settings(model="m"))


def test_an_older_name_of_a_class_is_taken() -> None:
    config = transformers.CONFIG_MAPPING["ernie4_5_vl_moe"]()
    config.architectures = ["Ernie4_5_VL_MoeForConditionalGeneration"]
    assert class_name(config, Settings(model="m")) == "Ernie4_5_VLMoeForConditionalGeneration"


def test_a_class_that_takes_a_second_sequence_is_refused() -> None:
    """The config of a diffusion model says nothing of its encoder; the arguments of its class do."""
    config = transformers.CONFIG_MAPPING["diffusion_gemma"]()
    config.architectures = ["DiffusionGemmaForBlockDiffusion"]
    with pytest.raises(UserError, match="which have one sequence"):
        model_class(config, Settings(model="m"))


def test_own_code_is_loaded_as_its_config_says_only_if_it_is_trusted() -> None:
    config = transformers.PretrainedConfig(
        architectures=["OtherForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}
    )
    assert model_class(config, Settings(model="m", trust_remote_code=True)).__name__ == "AutoModelForCausalLM"
    with pytest.raises(UserError, match="--trust_remote_code if its own code defines one"):
        model_class(config, Settings(model="m"))


def test_layers_that_stay_in_fp32_are_checked_as_they_train() -> None:
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.bfloat16)
    # DeepSeek V4 has such layers.
    model.get_decoder().layers[0].input_layernorm.register_forward_hook(lambda layer, given, out: out.float())
    ids = torch.arange(4)[None]
    with pytest.raises(RuntimeError, match="dtype"):
        model(ids)
    check_attends_backwards(Settings(model="m"), model)


def test_a_model_that_attends_to_later_tokens_is_refused(tmp_path: Path) -> None:
    settings = Settings(model=str(tmp_path), dataset=["d"])
    torch.manual_seed(0)
    for is_decoder in (True, False):
        config = config_of("bert", "BertLMHeadModel", is_decoder=is_decoder)
        model = transformers.BertLMHeadModel(config).train()
        if is_decoder:
            check_attends_backwards(settings, model)
        else:
            with pytest.raises(UserError, match="attends to later tokens"):
                check_attends_backwards(settings, model)
        assert model.training
