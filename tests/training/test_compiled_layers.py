"""Test when layers are compiled in place of capturing the step, and that a trial decides."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tiny_vision import save_vision
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.towers import image_tower
from unsloth_ddp.sizing.graphs import IMAGES_DIFFER, may_compile_layers
from unsloth_ddp.training.step.compiled_layers import compile_layers, kinds_of_layers, leave_uncompiled


@pytest.fixture
def model(tmp_path):
    return save_vision("qwen3_vl", tmp_path)


def runner_of(model: Any) -> MicroBatchRunner:
    def loss(model: Any, batch: dict[str, Any], divisor: torch.Tensor) -> torch.Tensor:
        tower = model.model.visual
        patches = tower.blocks[0](batch["patches"], cu_seqlens=batch["ends"], position_embeddings=batch["rotary"])
        return (model(input_ids=batch["input_ids"]).logits.square().mean() + patches.square().mean()) / divisor

    return MicroBatchRunner(model, torch.device("cpu"), loss, lambda rows: {}, nullcontext)


def batch_of(model: Any) -> dict[str, Any]:
    size = model.config.vision_config.hidden_size
    head = size // model.config.vision_config.num_heads
    return {
        "input_ids": torch.arange(5, 12)[None],
        "patches": torch.ones(4, size),
        "ends": torch.tensor([0, 4], dtype=torch.int32),
        "rotary": (torch.ones(4, head), torch.zeros(4, head)),
    }


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_layers_of_decoder_and_tower_are_compiled_unless_a_trial_differs(model, scale, monkeypatch) -> None:
    compiled: list[str] = []

    def compile(call: Any, *, dynamic: bool, options: Any) -> Any:
        def run(*arguments: Any, **named: Any) -> Any:
            compiled.append(type(call.__self__).__name__)
            return call(*arguments, **named) * scale

        return run

    monkeypatch.setattr(torch, "compile", compile)
    runner, batch = runner_of(model), batch_of(model)
    obstacle = compile_layers(runner, batch)
    assert set(compiled) == {"Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"}
    assert kinds_of_layers(model) == 2
    assert all(p.grad is None for p in model.parameters())
    assert (obstacle is None) == (scale == 1.0), obstacle
    compiled.clear()
    # Evaluation has rows of other kinds, and generation one token at a time.
    runner.loss_sum(batch)
    assert not model.training and not compiled
    model.train()
    runner.loss_sum(batch)
    assert compiled
    leave_uncompiled(model)
    compiled.clear()
    runner.loss_sum(batch)
    assert not compiled and len(image_tower(model).blocks) > 0


def test_layers_that_cannot_be_compiled_are_told(model, monkeypatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fail)
    assert compile_layers(runner_of(model), batch_of(model)) == "trying it failed: no compiler"


def test_only_long_runs_that_images_keep_from_graphs_compile_their_layers() -> None:
    train: Any = SimpleNamespace(streamed=False, packing=object(), units=10)
    plan = BatchPlan(8, 1, 1)
    long = Settings(max_steps=200)

    def may(settings: Settings = long, against: str = IMAGES_DIFFER, rows: Any = train, **where: Any) -> bool:
        facts = {"precision": "bf16", "sharding": "none", "kinds": 2} | where
        return may_compile_layers(settings, rows, plan, against, **facts)

    assert may()
    assert not may(dataclasses.replace(long, max_steps=199))
    assert not may(dataclasses.replace(long, cuda_graphs="off"))
    assert not may(against="rows are padded")
    assert not may(rows=SimpleNamespace(streamed=False, packing=None, units=10))
    assert not may(kinds=3)
    assert not may(precision="fp32") and not may(sharding="fsdp2")
