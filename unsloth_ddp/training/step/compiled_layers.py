"""Compile the layers of text decoder and tower where images keep micro-batches from being captured."""

from typing import Any

import torch
from torch import Tensor

from unsloth_ddp.model.forward.compile_options import compile_in_training
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.loading.stand_in import kind_of
from unsloth_ddp.model.modules import kept_random_numbers, text_decoder, training_mode, without_dropout
from unsloth_ddp.model.towers import image_tower
from unsloth_ddp.training.step.capture_check import check_pass

# Compilations of the same layer: for inputs with and without gradient, and of each kind of layer.
MOST_COMPILATIONS = 64


def compile_layers(runner: MicroBatchRunner, batch: dict[str, Any]) -> str | None:
    """Compile the layers for micro-batches of any size; return why they should not stay compiled, or None.

    That is if compiling fails, or the loss or gradients of `batch` differ. Gradients and random numbers are kept.

    Args:
        batch: a micro-batch of packs with images, on the device.
    """
    model = runner.model

    def compiled() -> Tensor:
        for layer in _layers(model):
            compile_in_training(layer)
        loss = runner.loss_sum(batch)
        loss.backward()
        return loss.detach()

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_COMPILATIONS)
    with training_mode(model), without_dropout(model), kept_random_numbers(runner.device):
        return check_pass(model, lambda: runner.loss_sum(batch), compiled)


def leave_uncompiled(model: Any) -> None:
    """Compute the layers as before."""
    for layer in _layers(model):
        layer._compiled_call_impl = None


def kinds_of_layers(model: Any) -> int:
    """Return the number of kinds of layers in text decoder and tower."""
    return len({kind_of(layer) for layer in _layers(model)})


def _layers(model: Any) -> list[Any]:
    tower = image_tower(model)
    return [*getattr(text_decoder(model), "layers", []), *(tower.blocks if tower else [])]
