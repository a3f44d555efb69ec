"""Test what a rank holds of a sharded model: a run counts it from its weights, plan the same bytes from its shape."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from peft import get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.common.models import make_config
from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.adapter.lora import lora_config
from unsloth_ddp.model.loading.stand_in import layers_of
from unsloth_ddp.sizing.count import read_model_shape
from unsloth_ddp.sizing.estimate import Workload, estimate_memory
from unsloth_ddp.sizing.sharded_bytes import ZERO_BUCKET, ShardedLayout, ShardedModel, Weight, held_bytes
from unsloth_ddp.sizing.sharded_trial import read_weights


def loaded(settings: Settings, config: Any) -> Any:
    """Return the model of a run without its weights: 16-bit frozen weights, fp32 trained ones."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.tie_weights()
    model.to("meta")
    if settings.method == "full":
        return model.float()
    adapted = get_peft_model(model, lora_config(settings, model), low_cpu_mem_usage=True)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


# Each method with each sharding is tried on one of two shapes, and slowly on the other.
CASES = [
    pytest.param(*shape, method, sharding, marks=() if i == 0 and (j + k) % 2 else pytest.mark.slow)
    for i, shape in enumerate((("qwen3_0.6b", 2), ("qwen3_8b", 8)))
    for j, method in enumerate(("lora", "full"))
    for k, sharding in enumerate(("zero2", "zero3", "fsdp2"))
]


@pytest.mark.parametrize(("shape_name", "parts", "method", "sharding"), CASES)
def test_plan_and_a_run_count_the_same_bytes(
    shape_name: str, parts: int, method: Any, sharding: Any, tmp_path: Path
) -> None:
    config = make_config(shape_name)
    config.save_pretrained(tmp_path)
    settings = Settings(model=str(tmp_path), dataset=["d"], method=method)
    model = loaded(settings, config)
    read = read_weights(model, layers_of(model), 2, torch.device("meta"))
    if sharding == "zero3":
        # DeepSpeed replaces every weight by a part of it, in 16 bit.
        weights = [dataclasses.replace(weight, stored=weight.whole // parts) for weight in read.weights]
        read = dataclasses.replace(read, weights=weights)
    layout = ShardedLayout(sharding, "none", parts, 2, 4, settings.optim)
    counted = held_bytes(read, layout, sum(weight.stored for weight in read.weights))
    work = Workload(0, 2, 4, settings.optim, "torch", parts)
    planned = estimate_memory(read_model_shape(settings), method, sharding, work)
    assert planned.passing - planned.activations == pytest.approx(counted, rel=0.02)


def bytes_held(sharding: Any, split: bool = False, trained: bool = True, **options: Any) -> int:
    """Bytes of a model of 100 head, 100 embedding and two layers of 40 numbers each, in 16 bit, on four ranks."""

    def weight(numbers: int, embedding: bool = False, adapter: bool = False) -> Weight:
        number = 4 if adapter or (split and trained) else 2
        stored = numbers * number // (4 if split else 1)
        return Weight(stored, numbers * 2, number, numbers if trained or adapter else 0, embedding)

    head, embedding, layers = weight(100), weight(100, embedding=True), [weight(40), weight(40)]
    adapter = [] if trained else [weight(8, adapter=True)]
    weights = [head, embedding, *layers, *adapter]
    model = ShardedModel(weights, [layers[0]], [head], [head, embedding, *adapter], split)
    layout = {"offload": "none", "parts": 4, "precision": 2, "master": 4, "optimizer": "adamw_torch"} | options
    return held_bytes(model, ShardedLayout(sharding, **layout), allocated=sum(w.stored for w in weights) + 1000)


def test_what_fsdp2_holds():
    # The weights, their gradients and two states in fp32, a quarter of each; the head, its gradient in 16 bit and in
    # fp32.
    assert bytes_held("fsdp2", split=True) == 1000 + 280 * 16 // 4 + 200 + 100 * 6
    # Loaded whole, the same is left, but what is outside the layers is gathered as one.
    assert bytes_held("fsdp2") == bytes_held("fsdp2", split=True)
    assert bytes_held("fsdp2", optimizer="sgd") == bytes_held("fsdp2") - 280 * 8 // 4
    # Of an adapter of 8 numbers; the weights are frozen in 16 bit.
    assert bytes_held("fsdp2", split=True, trained=False) == 1000 + 560 // 4 + 8 * 16 // 4 + 2 * 200
    assert bytes_held("fsdp2", trained=False) == 1000 + 560 // 4 + 8 * 16 // 4 + 416 + 2 * 80


def test_what_zero_holds():
    bucket = int(ZERO_BUCKET * 2)
    # fp32 gradients, states and copies are split over four ranks; ZeRO-2 holds the weights in 16 bit.
    assert bytes_held("zero2") == 1000 + bucket + 280 * 4 + 560 + 280 * 16 // 4
    assert bytes_held("zero2", trained=False) == 1000 + bucket + 8 * 4 + 576 + 8 * 16 // 4
    assert bytes_held("zero2", offload="optimizer") == 1000 + bucket + 280 * 4 + 560 + 280 * 4 // 4 + 100 * 2
    # Each quarter stays, and a small model is gathered as a whole, as ZeRO-3 keeps a billion numbers.
    expected = 1000 + bucket + 8 * 4 + 8 * 16 // 4 + (560 + 32) // 4 + 576
    assert bytes_held("zero3", split=True, trained=False) == expected
