"""A run and plan compute the same bytes for a sharded model: a run from its weights, plan from the counts of its shape."""

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
from unsloth_ddp.sizing.sharded_bytes import ShardedLayout, held_bytes
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


@pytest.mark.parametrize("sharding", ["zero2", "zero3", "fsdp2"])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize(("shape_name", "parts"), [("qwen3_0.6b", 2), ("qwen3_8b", 8)])
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
        weights = [dataclasses.replace(one, stored=one.whole // parts) for one in read.weights]
        read = dataclasses.replace(read, weights=weights)
    layout = ShardedLayout(sharding, "none", parts, 2, 4, settings.optim)
    held = held_bytes(read, layout, sum(one.stored for one in read.weights))
    work = Workload(0, 2, 4, settings.optim, "torch", parts)
    planned = estimate_memory(read_model_shape(settings), method, sharding, work)
    assert planned.passing - planned.activations == pytest.approx(held, rel=0.02)
