"""Test that nothing of DeepSpeed's stays in 16 bit, with a stand-in for what gathers weights on GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tests.data.test_packing import KV, make
from unsloth_ddp.training.step.deepspeed_precision import (
    gather_fp32_weights,
    name_fp32_in_config,
    reduce_in_fp32,
    replace_weights,
    tie_again,
)


def test_gradients_are_added_and_sent_in_fp32() -> None:
    config: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    reduce_in_fp32(config)
    assert config["communication_data_type"] == "fp32" and config["data_types"] == {"grad_accum_dtype": "fp32"}


def test_an_own_config_of_deepspeed_wins() -> None:
    config = {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}
    reduce_in_fp32(config)
    assert config == {"communication_data_type": "bf16", "data_types": {"grad_accum_dtype": "bf16"}}


class Tied(torch.nn.Module):
    """An embedding that is the head too, a trained and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.trained, self.frozen = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)


def test_the_saved_weights_are_those_of_the_optimizer() -> None:
    torch.manual_seed(0)
    model = Tied()
    masters = {id(parameter): parameter.detach().clone() + 1e-4 for parameter in model.parameters()}
    model.bfloat16()
    masters = {id(p): m for p, m in zip(model.parameters(), masters.values(), strict=True)}
    gathered: list[int] = []

    def full_weight(parameter: torch.nn.Parameter) -> torch.Tensor:
        gathered.append(id(parameter))
        return masters[id(parameter)]

    weights = gather_fp32_weights(model.named_parameters(), full_weight, keep=True)
    assert set(weights) == {"embed.weight", "trained.weight", "trained.bias"}
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    replace_weights(saved, dict(model.named_parameters(remove_duplicate=False)), weights)
    for name in ("embed.weight", "head.weight", "trained.weight"):
        assert saved[name].dtype == torch.float32
    assert torch.equal(saved["head.weight"], masters[id(model.embed.weight)])
    assert saved["frozen.weight"].dtype == torch.bfloat16
    # Every rank gathers every weight, in one order, also where it keeps none.
    first, gathered[:] = list(gathered), []
    assert gather_fp32_weights(model.named_parameters(), full_weight, keep=False) == {}
    assert gathered == first


def test_a_tied_weight_is_saved_once(tmp_path: Path) -> None:
    model = make("Llama", **KV, tie_word_embeddings=True)
    copies = {name: value.clone() for name, value in model.state_dict().items()}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= copies.keys()
    tie_again(copies, dict(model.named_parameters(remove_duplicate=False)))
    model.save_pretrained(tmp_path, state_dict=copies)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == dict(model.named_parameters()).keys()
        for name, parameter in model.named_parameters():
            assert torch.equal(file.get_tensor(name), parameter)


def test_the_config_names_the_dtype_of_the_weights(tmp_path: Path) -> None:
    name_fp32_in_config(tmp_path)
    assert list(tmp_path.iterdir()) == [], "an adapter has no config"
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16", "model_type": "llama"}')
    name_fp32_in_config(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"dtype": "float32", "model_type": "llama"}
