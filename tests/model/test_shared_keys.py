"""Layers that take keys and values of earlier layers: which kinds keep gradients, and what a failed pass leaves."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.gradient_checkpointing import GradientCheckpointing
from unsloth_ddp.utils.errors import UserError


def gemma4() -> Any:
    torch.manual_seed(0)
    config = Gemma4TextConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, global_head_dim=16, vocab_size=64, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8,
        num_kv_shared_layers=2, sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    return Gemma4ForCausalLM(config).train()


def checkpointing_of(model: Any, backend: Any, kind: Any = "auto") -> GradientCheckpointing:
    settings = Settings(model="m", dataset=["d"], gradient_checkpointing=kind)
    return GradientCheckpointing(model, Runtime(Ranks(), backend, "cuda", "bf16", "H200", "none"), settings)


def test_reentrant_checkpointing_is_not_used_where_it_loses_gradients() -> None:
    model = gemma4()
    ids = torch.arange(24)[None] % 64

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    whole, transformers = gradients(), checkpointing_of(model, "transformers")
    assert transformers.kinds == ("none", "torch")
    transformers.use("torch")
    assert all(torch.equal(one, other) for one, other in zip(whole, gradients(), strict=True))
    # What Unsloth does to these models.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    assert not all(torch.allclose(one, other) for one, other in zip(whole, gradients(), strict=True))
    assert checkpointing_of(model, "unsloth").kinds == ("none",)
    with pytest.raises(UserError, match="would lose gradients of model m, whose layers take the keys and values"):
        checkpointing_of(model, "unsloth", "torch")


def test_a_failed_pass_keeps_no_inputs_of_layers_alive() -> None:
    model, inputs = gemma4(), []
    checkpointing = checkpointing_of(model, "transformers")
    checkpointing.use("torch")

    def note(layer: Any, given: Any) -> None:
        inputs.append(weakref.ref(given[0]))
        # Memory runs out where a layer is recomputed.
        if len(inputs) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    for layer in model.model.layers:
        layer.register_forward_pre_hook(note)

    def fail() -> None:
        try:
            model(input_ids=torch.arange(9)[None], labels=torch.arange(9)[None], use_cache=False).loss.backward()
        except torch.OutOfMemoryError:
            return
        pytest.fail("memory did not run out")

    fail()
    gc.collect()
    assert any(ref() is not None for ref in inputs), "Transformers frees them by itself now"
    checkpointing.forget_failed_pass()
    gc.collect()
    assert all(ref() is None for ref in inputs)
