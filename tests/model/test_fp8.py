"""Products with frozen weights in FP8: their distance from 16 bit, which layers take them, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import nn

from tests.conftest import REPO
from tests.data.test_packing import KV, make
from tests.runtimes import cpu_runtime
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.model.forward.fp8 import FP8, FrozenFP8Linear, check_fp8, quantize_rows, use_fp8
from unsloth_ddp.model.loading.load import load_model, parameter_counts
from unsloth_ddp.utils.errors import UserError

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(dropout: float = 0.0, **config: Any) -> Any:
    torch.manual_seed(0)
    base = make("Qwen3", **{"hidden_size": 64, "intermediate_size": 96, **KV, **config})
    model = get_peft_model(base, LoraConfig(r=4, target_modules=TARGETS, lora_dropout=dropout))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.02)
    return model


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(((found - wanted).norm() / wanted.norm()).detach())


def test_rows_of_very_different_size_keep_their_digits() -> None:
    values = torch.randn(8, 64) * torch.logspace(-6, 6, 8)[:, None]
    rounded, factors = quantize_rows(values)
    assert rounded.dtype == FP8 and factors.shape == (8, 1)
    errors = ((rounded.float() * factors - values).norm(dim=1) / values.norm(dim=1)).tolist()
    # e4m3 has three bits after the point: at most 1/16 for a value, about 2.6 % for many.
    assert max(errors) < 0.04
    assert torch.equal(quantize_rows(torch.zeros(2, 16))[0].float(), torch.zeros(2, 16))


@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_multiplies_by_its_weight_in_both_directions(bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=bias).requires_grad_(False)
    frozen = FrozenFP8Linear(copy.deepcopy(linear))
    x = torch.randn(2, 5, 64, requires_grad=True)
    towards = torch.randn(2, 5, 48)
    wanted, found = linear(x), frozen(x)
    assert found.shape == wanted.shape
    assert 0.001 < relative(found, wanted) < 0.05
    (gradient,) = torch.autograd.grad(wanted, x, towards)
    (gradient_fp8,) = torch.autograd.grad(found, x, towards)
    assert 0.001 < relative(gradient_fp8, gradient) < 0.05
    # Exactly the products of what was rounded.
    rows, factors = quantize_rows(towards.reshape(-1, 48))
    exact = (rows.float() * factors) @ (frozen.transposed.float() * frozen.transposed_factors).t()
    assert relative(gradient_fp8.reshape(-1, 64), exact) < 1e-5


def test_every_frozen_layer_but_the_head_is_replaced_and_adapters_learn() -> None:
    plain, model = adapted(), adapted()
    counts = parameter_counts(plain)
    assert use_fp8(model) == 7 * plain.config.num_hidden_layers
    assert parameter_counts(model) == counts
    assert type(model.get_output_embeddings()) is nn.Linear
    ids = torch.randint(3, 60, (2, 16), generator=torch.Generator().manual_seed(1))
    gradients = []
    for one in (plain, model):
        one(input_ids=ids, labels=ids).loss.backward()
        gradients.append({n: p.grad for n, p in one.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, wanted in gradients[0].items():
        assert wanted is not None and gradients[1][name] is not None
        assert relative(gradients[1][name], wanted) < 0.15, name
    # What is saved is an ordinary adapter.
    saved = get_peft_model_state_dict(model)
    assert {k: v.dtype for k, v in saved.items()} == {k: v.dtype for k, v in get_peft_model_state_dict(plain).items()}


def test_layers_of_other_sizes_stay_and_a_model_without_any_is_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 32), nn.Linear(32, 16)).requires_grad_(False)
    model.get_output_embeddings = lambda: None  # type: ignore[assignment]
    assert use_fp8(model) == 1
    assert [type(layer).__name__ for layer in model] == ["Linear", "Linear", "FrozenFP8Linear"]
    with pytest.raises(UserError, match="finds no linear layer"):
        use_fp8(model)


def test_ddp_leaves_out_what_every_rank_has_rounded_alike() -> None:
    model = adapted()
    use_fp8(model)
    ignored = set(model._ddp_params_and_buffers_to_ignore)
    rounded = {n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.dtype == FP8}
    assert rounded and rounded < ignored
    assert ignored <= {n for n, _ in [*model.named_parameters(), *model.named_buffers()]}


# In a process of its own: importing Unsloth changes Transformers, and without a GPU it needs a variable.
UNSLOTH = """
import copy, os, types
import torch
from tests.model.test_fp8 import adapted
from unsloth_ddp.model.forward.fp8 import use_fp8
plain = adapted()
fused = copy.deepcopy(plain)
import unsloth.models.llama as llama
# As Unsloth leaves a model that it has loaded (patch_peft_model).
for layer in fused.model.model.layers:
    layer.self_attn.apply_qkv, layer.self_attn.apply_o = llama.apply_lora_qkv, llama.apply_lora_o
    layer.mlp.forward = types.MethodType(llama.apply_lora_mlp_swiglu, layer.mlp)
assert use_fp8(fused) == use_fp8(plain) > 0
x = torch.randn(2, 5, 64)
for ours, expected in zip(fused.model.model.layers, plain.model.model.layers, strict=True):
    assert torch.equal(ours.mlp(x), expected.mlp(x))
    q, k, v = ours.self_attn.apply_qkv(ours.self_attn, x)
    assert torch.equal(k, expected.self_attn.k_proj(x))
    assert torch.equal(ours.self_attn.apply_o(ours.self_attn, q), expected.self_attn.o_proj(q))
assert os.environ["UNSLOTH_FORCE_FUSED_LORA"] == "1" and not llama.logger.disabled
print("the same")
"""


@pytest.mark.slow
def test_adapters_of_a_model_that_unsloth_has_loaded_are_computed_beside_fp8_layers() -> None:
    environ = os.environ | {"UNSLOTH_ALLOW_CPU": "1", "UNSLOTH_FORCE_FUSED_LORA": "1"}
    done = subprocess.run([sys.executable, "-c", UNSLOTH], cwd=REPO, env=environ, capture_output=True, text=True)
    assert done.stdout.endswith("the same\n"), done.stderr
    assert "FSDP" not in done.stdout + done.stderr


def where(**facts: Any) -> Any:
    standard = {"device_type": "cuda", "precision": "bf16", "sharding": "none"}
    return SimpleNamespace(**standard | {"device_name": "GPU"} | facts)


@pytest.mark.parametrize(
    ("options", "facts", "capability", "words"),
    [
        ("--method qlora", {}, (9, 0), None),
        ("--method full", {}, (9, 0), "fp8 needs method lora or qlora, .* this run has method full"),
        ("", {"device_type": "cpu"}, (9, 0), "fp8 needs a GPU of compute capability 8.9 or later"),
        ("", {}, (8, 6), "fp8 needs a GPU of compute capability 8.9 or later"),
        ("", {"precision": "fp16"}, (9, 0), "fp8 needs precision bf16, and this run has .* precision fp16"),
        ("", {"sharding": "fsdp2"}, (9, 0), "fp8 needs whole weights .* sharding fsdp2"),
        ("", {}, (8, 9), None),
    ],
)
def test_it_is_refused_where_it_cannot_be_had(
    options: str,
    facts: dict[str, str],
    capability: tuple[int, int],
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    given = ["--model", str(REPO / "demo/model"), "--dataset", str(REPO / "demo/train.jsonl"), "--fp8"]
    settings = parse_settings([*given, *options.split()])
    if words is None:
        check_fp8(settings, where(**facts))
        return
    with pytest.raises(UserError, match=words):
        check_fp8(settings, where(**facts))


def test_qlora_rounds_what_four_bits_hold() -> None:
    import bitsandbytes

    given = ["--model", str(REPO / "demo/model"), "--dataset", str(REPO / "demo/train.jsonl"), "--method", "qlora"]
    packed, rounded = (
        load_model(parse_settings([*given, *more]), dataclasses.replace(cpu_runtime(), precision="bf16"))[0]
        for more in ([], ["--fp8"])
    )
    layers = {
        n: m for n, m in packed.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit) and "base_layer" in n
    }
    assert len(layers) == 7 * packed.config.num_hidden_layers
    found = dict(rounded.named_modules())
    for name, layer in layers.items():
        values = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).float()
        frozen = found[name]
        assert isinstance(frozen, FrozenFP8Linear)
        weight, factors = quantize_rows(values)
        assert torch.equal(frozen.weight.float(), weight.float()) and torch.equal(frozen.factors, factors)
    # Trained as with LoRA: PEFT would keep norms and head of a packed model in fp32.
    trained = {name for name, weight in rounded.named_parameters() if weight.requires_grad}
    assert trained == {name for name, weight in packed.named_parameters() if weight.requires_grad}
    assert {w.dtype for n, w in rounded.named_parameters() if "norm" in n} == {torch.bfloat16}
    assert not hasattr(rounded.config, "quantization_config")
