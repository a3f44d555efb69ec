"""Test when DeepSpeed is told to release a block's weights, with a stand-in for its engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from unsloth_ddp.training.step.zero3_release import release_after_each_block


def recomputed_model() -> Any:
    """Return a Llama of three layers that recomputes them in the backward pass."""
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    model: Any = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return model


def loss_of(model: Any) -> torch.Tensor:
    """Return the loss of a row of eight tokens."""
    ids = torch.arange(8)[None]
    return model(input_ids=ids, labels=ids).loss


def test_weights_are_released_before_each_block_is_recomputed_and_at_no_other_time() -> None:
    events: list[str] = []
    model = recomputed_model()
    for index, layer in enumerate(model.model.layers):
        # In the place of DeepSpeed's hooks, which were registered before and gather the weights.
        layer.register_forward_pre_hook(lambda *_, index=index: events.append(f"gather {index}"))
    offload = SimpleNamespace(release_backward_leftovers=lambda: events.append("release"))
    engine = SimpleNamespace(module=model, optimizer=SimpleNamespace(parameter_offload=offload))
    release_after_each_block(engine)
    loss = loss_of(model)
    assert events == ["gather 0", "gather 1", "gather 2"]
    events.clear()
    loss.backward()
    assert events == ["release", "gather 2", "release", "gather 1", "release", "gather 0"]


def test_another_version_of_deepspeed_without_the_method_trains_on() -> None:
    model = recomputed_model()
    release_after_each_block(SimpleNamespace(module=model, optimizer=SimpleNamespace(parameter_offload=object())))
    loss_of(model).backward()
    assert model.lm_head.weight.grad is not None
