"""Test which parts of a mixture of experts get an adapter, and that PEFT alone reads and merges it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.mixtures import MIXTURES, make_mixture, save_mixture
from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.adapter.experts import describe_experts, names_in_layers
from unsloth_ddp.model.adapter.lora import check_module_names, lora_config, target_modules, target_parameters
from unsloth_ddp.utils.errors import UserError

EXPERTS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]


def settings(**given: Any) -> Settings:
    return Settings(model="m", lora_r=2, lora_alpha=4, **given)


def adapted(given: Settings, model: Any) -> Any:
    check_module_names(given, model)
    return get_peft_model(model, lora_config(given, model))


def trained(model: Any) -> set[str]:
    """The modules of the first layer with an adapter."""
    names = (name for name, p in model.named_parameters() if p.requires_grad and ".layers.0." in name)
    return {name.partition(".layers.0.")[2].partition(".lora_")[0] for name in names}


@pytest.mark.parametrize("kind", MIXTURES)
def test_all_linear_leaves_experts_and_router_alone_and_says_so(kind: str) -> None:
    model = adapted(settings(lora_dropout=0.1), make_mixture(kind))
    assert trained(model) == {f"self_attn.{name}" for name in ATTENTION}
    assert describe_experts(model) == "left as they are; --lora_target_parameters all-experts adapts them"


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize(
    "given",
    [
        {"lora_target_parameters": ["all-experts"]},
        {"lora_target_parameters": EXPERTS},
        # As guides have it, and the layers' names before Transformers stacked them.
        {"lora_target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]},
    ],
)
def test_experts_are_adapted_when_asked_for(kind: str, given: dict[str, list[str]]) -> None:
    model = adapted(settings(**given), make_mixture(kind))
    experts = {"mlp.experts", "mlp.experts.base_layer"}
    assert trained(model) == {*(f"self_attn.{name}" for name in ATTENTION), *experts}
    assert "adapted (mlp.experts.down_proj, mlp.experts.gate_up_proj); the balancing" in str(describe_experts(model))
    # One adapter of rank r for every expert of both tensors.
    count = 8 if kind == "qwen3_moe" else 4
    ranks = [p.shape[0] for name, p in model.named_parameters() if "experts" in name and "lora_A" in name]
    assert ranks == [2 * count] * 4


def test_some_experts_tensors_and_a_router_can_be_named() -> None:
    model = make_mixture("qwen3_moe")
    given = settings(lora_target_modules=["q_proj"], lora_target_parameters=["experts.down_proj", "mlp.gate.weight"])
    assert trained(adapted(given, model)) == {"self_attn.q_proj", "mlp.experts", "mlp.gate"}


def test_what_unsloth_is_given_is_what_peft_is_given() -> None:
    model = make_mixture("qwen3_moe")
    for given in (settings(), settings(lora_target_modules=["q_proj", "up_proj"])):
        config = lora_config(given, model)
        assert config.target_modules == set(target_modules(given, model))
        assert (config.target_parameters or []) == target_parameters(given, model)
    assert target_parameters(given, model) == ["mlp.experts.gate_up_proj"]


def test_a_dense_model_is_adapted_as_before() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=8))
    config = lora_config(settings(), model)
    assert (config.target_modules, config.target_parameters) == (set(target_modules(settings(), model)), None)
    assert target_modules(settings(), model) == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ]
    assert describe_experts(model) is None
    # A kernel of a convolution has three dimensions, too.
    model.conv = torch.nn.Conv1d(2, 2, 2, device="meta")
    model.config.num_experts = 4
    assert names_in_layers(model) == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"lora_target_parameters": ["all-experts"], "lora_dropout": 0.1},
         "lora_dropout 0.1 cannot be combined with an adapter on mlp.experts.down_proj, mlp.experts.gate_up_proj: PEFT "
         "adds"),
        ({"lora_target_modules": ["up_proj"], "lora_dropout": 0.1}, "give --lora_dropout 0, or leave these out."),
        ({"lora_target_parameters": ["experts.w1"]},
         "experts.w1 is not a parameter of m of 2 or 3 dimensions outside linear layers; its experts are in "
         "mlp.experts.down_proj, "),
        ({"lora_target_parameters": ["all-experts", "x"]}, "all-experts is not a parameter of m of 2"),
        ({"lora_target_parameters": ["q_proj.weight"]}, "lora_target_modules names linear layers."),
        ({"lora_target_parameters": ["input_layernorm.weight"]}, "input_layernorm.weight is not a parameter of m of 2 "
            "or 3 dimensions"),
    ],
)  # fmt: skip
def test_what_cannot_be_adapted_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        adapted(settings(**given), make_mixture("qwen3_moe"))
    assert sentence in str(refused.value)


def test_a_model_without_experts_is_named(tiny_model: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with pytest.raises(
        UserError, match=r"all-experts is not a parameter of m .*; it has no experts in stacked tensors"
    ):
        check_module_names(settings(lora_target_parameters=["all-experts"]), model)


@pytest.mark.parametrize("kind", MIXTURES)
def test_plain_peft_reads_and_merges_an_adapter_on_experts(kind: str, tmp_path: Path) -> None:
    base = save_mixture(kind, tmp_path / "base")
    model = adapted(settings(lora_target_parameters=["all-experts"]), AutoModelForCausalLM.from_pretrained(base))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(24)[None]
    with torch.no_grad():
        expected, plain = model(ids).logits, AutoModelForCausalLM.from_pretrained(base)(ids).logits
        read = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
        assert torch.equal(read(ids).logits, expected)
        read.merge_and_unload().save_pretrained(tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-4)
    assert (plain - expected).abs().max() > 0.1
