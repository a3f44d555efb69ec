"""Adapters multiplied by in 16 bit: the gradients that autocast gives, added to those of the weights."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.data.test_packing import KV, make
from tests.mixtures import make_mixture
from tests.training.test_captured_step import DEVICE, SHAPE, batches, gradients, model_of
from unsloth_ddp.model.forward.packed_forward import PackedForward
from unsloth_ddp.training.step.adapter_copies import AdapterCopies
from unsloth_ddp.training.step.captured_step import CapturedStep

AUTOCAST = functools.partial(torch.autocast, "cpu", torch.bfloat16)


def experts() -> Any:
    """Return a mixture whose experts have adapters: PEFT adds products of these to the weights."""
    model = make_mixture("qwen3_moe").bfloat16()
    model.set_attn_implementation("sdpa")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return adapted(model, target_modules=["q_proj"], target_parameters=names)


def adapted(model: Any, **options: Any) -> Any:
    """Return the model with an adapter that is not zero, in training mode."""
    model = get_peft_model(model, LoraConfig(r=4, task_type="CAUSAL_LM", **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.train()


def llama() -> Any:
    model = make("Llama", **KV)
    model.set_attn_implementation("sdpa")
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "every linear layer": lambda: model_of("lora"),
    "trained embeddings": lambda: adapted(llama(), target_modules="all-linear", modules_to_save=["embed_tokens"]),
    "another scale": lambda: adapted(llama(), target_modules="all-linear", use_rslora=True),
    "experts": experts,
}


def computed(kind: str, *, copies: bool, recompute: bool) -> tuple[list[float], torch.Tensor]:
    """Return the losses of three micro-batches in bf16, and their summed gradients."""
    model = MODELS[kind]()
    captured = CapturedStep(model, PackedForward(model, SHAPE, recompute=recompute), AUTOCAST, torch.bfloat16, DEVICE)
    assert captured.adapters.layers
    if not copies:
        captured.adapters = AdapterCopies(torch.nn.Module(), torch.bfloat16)
    names = list(model.state_dict())
    losses = [captured.run(batch, torch.ones(()))[0].item() for batch in batches()]
    assert list(model.state_dict()) == names
    assert all(copy.grad is None for copy in captured.adapters.copies), "their memory is not free"
    return losses, gradients(model)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_gradients_are_to_the_bit_those_of_autocast(kind: str, recompute: bool) -> None:
    losses, gradients = computed(kind, copies=True, recompute=recompute)
    expected, expected_gradients = computed(kind, copies=False, recompute=recompute)
    assert losses == expected
    assert (
        gradients.dtype == torch.float32
        and torch.equal(gradients, expected_gradients)
        and expected_gradients.norm() > 0
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_a_pass_multiplies_by_the_copies(recompute: bool) -> None:
    model = model_of("lora")
    forward = PackedForward(model, SHAPE, recompute=recompute)
    captured = CapturedStep(model, forward, AUTOCAST, torch.bfloat16, DEVICE)
    used = []
    for layer in captured.adapters.layers:
        layer.register_forward_pre_hook(lambda layer, inputs: used.append(layer.weight.dtype))
    captured.run(batches()[0], torch.ones(()))
    # Where layers are computed again, too.
    assert used == [torch.bfloat16] * len(captured.adapters.layers) * (1 + recompute)


def test_the_copies_follow_the_weights() -> None:
    model = model_of("lora")
    copies = AdapterCopies(model, torch.bfloat16)
    for weight in copies.weights:
        weight.grad = torch.zeros_like(weight)
        weight.data += 1
    with copies.in_place():
        inside = [layer.weight for layer in copies.layers]
    for copy, weight, layer in zip(inside, copies.weights, copies.layers, strict=True):
        assert copy.dtype == torch.bfloat16 and torch.equal(copy, weight.bfloat16()) and layer.weight is weight


def test_the_weights_are_back_after_a_failure_and_gradients_as_they_were() -> None:
    model = model_of("lora")
    copies = AdapterCopies(model, torch.bfloat16)
    for weight in copies.weights:
        weight.grad = torch.ones_like(weight)
    with contextlib.suppress(ValueError), copies.in_place():
        copies.layers[0].weight.sum().backward()
        raise ValueError
    assert all(layer.weight is weight for layer, weight in zip(copies.layers, copies.weights, strict=True))
    with copies.in_place():
        # Nothing of the failed pass is left to add.
        pass
    assert all(bool((weight.grad == 1).all()) for weight in copies.weights)


@pytest.mark.parametrize(("method", "dtype"), [("full", torch.bfloat16), ("lora", torch.float32)])
def test_other_weights_and_those_of_the_same_dtype_have_no_copies(method: str, dtype: torch.dtype) -> None:
    copies = AdapterCopies(model_of(method), dtype)
    assert not copies.layers
    with copies.in_place():
        pass


def test_only_trained_matrices_of_adapters_are_copied() -> None:
    model = model_of("lora")
    frozen = next(p for name, p in model.named_parameters() if "lora_A" in name).requires_grad_(False)
    copied = {id(weight) for weight in AdapterCopies(model, torch.bfloat16).weights}
    trained_ids = {id(p) for name, p in model.named_parameters() if ".lora_" in name and p is not frozen}
    assert copied == trained_ids


def test_a_layer_of_another_class_under_such_a_name_is_not_copied() -> None:
    # Autocast does not convert the weight of an embedding, say.
    layer = torch.nn.ModuleDict({"lora_A": torch.nn.ModuleDict({"default": torch.nn.Embedding(4, 4)})})
    assert not AdapterCopies(torch.nn.ModuleDict({"q_proj": layer}), torch.bfloat16).layers
