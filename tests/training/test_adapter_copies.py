"""Adapters multiplied by in 16 bit: the gradients that autocast gives, added to those of the weights."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch

from tests.training.test_captured_step import DEVICE, SHAPE, batches, gradients, model_of
from unsloth_ddp.model.packed_forward import PackedForward
from unsloth_ddp.training.adapter_copies import AdapterCopies
from unsloth_ddp.training.captured_step import CapturedStep

AUTOCAST = functools.partial(torch.autocast, "cpu", torch.bfloat16)


def computed(model: Any, *, copies: bool) -> tuple[list[float], torch.Tensor]:
    """Return the losses of three micro-batches in bf16, and their summed gradients."""
    captured = CapturedStep(model, PackedForward(model, SHAPE), AUTOCAST, torch.bfloat16, DEVICE)
    assert captured.adapters.layers
    if not copies:
        captured.adapters = AdapterCopies(torch.nn.Module(), torch.bfloat16)
    losses = [captured.run(batch, torch.ones(()))[0].item() for batch in batches()]
    return losses, gradients(model)


def test_losses_and_gradients_are_to_the_bit_those_of_autocast() -> None:
    losses, found = computed(model_of("lora"), copies=True)
    expected, wanted = computed(model_of("lora"), copies=False)
    assert losses == expected
    assert found.dtype == torch.float32 and torch.equal(found, wanted) and wanted.norm() > 0


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
    wanted = {id(p) for name, p in model.named_parameters() if ".lora_" in name and p is not frozen}
    assert copied == wanted
