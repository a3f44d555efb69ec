"""Check on the GPU that micro-batches replayed as CUDA graphs give the same loss and gradients."""

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.compile_options import drop_compiled_code, uncompiled
from unsloth_ddp.model.modules import kept_gradients, kept_random_numbers
from unsloth_ddp.model.packing import varlen
from unsloth_ddp.model.packing.obstacles import stateful_layer
from unsloth_ddp.sizing.graphs import obstacle_on_gpus
from unsloth_ddp.training.step.captured_step import CapturedStep
from unsloth_ddp.utils.errors import one_line
from unsloth_ddp.utils.known_errors import is_out_of_memory

logger = logging.getLogger("unsloth_ddp")


class Tolerances(NamedTuple):
    """Allowed differences between two ways to compute a pass, relative to the loss and to the norm of the gradients."""

    loss: float
    gradients: float


# A replayed pass and the backend's round to 16 bit in different orders.
TOLERANCES = Tolerances(5e-3, 5e-2)
# With --fp8 a different order changes which values are rounded up. On H200s gradients of random weights differed by
# 5.4e-2 (1.7B) and 1.1e-1 (8B) of their norm (benchmarks/results/speed/cuda_graphs_two_gpus.json), and the loss of the
# 8B with a row of 8192 tokens by 5.4e-3 and 5.7e-3, with two kernels for attention
# (benchmarks/results/speed/fp8_joint.json).
FP8_TOLERANCES = Tolerances(2e-2, 0.25)
OUT_OF_MEMORY = "trying it took more memory than there is"


def obstacle_to_capture(settings: Settings, runtime: Runtime, data: TrainingData, model: Any) -> str | None:
    """Return why a run cannot replay micro-batches as CUDA graphs, in a few words; None if it can."""
    if runtime.device_type != "cuda":
        return "a CPU has no CUDA graphs"
    if data.train.packing is None:
        return f"rows are padded ({data.packing.reason}), so micro-batches differ in shape"
    if runtime.backend == "unsloth" and os.environ.get("UNSLOTH_BLOCK_CUDAGRAPHS") == "1":
        return "UNSLOTH_BLOCK_CUDAGRAPHS=1 lets Unsloth capture the layers itself"
    obstacle = obstacle_on_gpus(
        settings,
        packed=data.train.packing is not None,
        precision=runtime.precision,
        sharding=runtime.sharding,
        processes=runtime.ranks.world_size,
        images=data.train.processing is not None,
    )
    if obstacle is None and not varlen.is_available():
        return "this torch has no varlen_attn for grouped heads and windows"
    if obstacle is None and (stateful := stateful_layer(model)):
        # Their kernels read the boundaries on the host.
        return f"the kernels of {stateful} layers cannot be captured with rows of other lengths"
    return obstacle


def draws_random_numbers(captured: CapturedStep, batch: dict[str, Any]) -> tuple[bool, str | None]:
    """Return whether the model draws random numbers in its current mode, and the reason if that cannot be determined.

    Args:
        batch: padded to the captured shape ("padded_batch"), on the device or in host memory.
    """
    try:
        step = captured.shape.parts(batch["padded_batch"].to(captured.device))
        with captured.autocast(), uncompiled():
            return captured.forward.draws_random_numbers(step), None
    except Exception as error:
        return False, _failed(error)


def check_capture(
    captured: CapturedStep,
    batch: dict[str, Any],
    ordinary: Callable[[dict[str, Any]], Tensor],
    allowed: Tolerances = TOLERANCES,
) -> str | None:
    """Return why a captured pass is not used, in a few words: it fails, or its loss or gradients differ; None if used.

    Gradients are left as they were. The model must not draw random numbers, which would differ between the passes.

    Args:
        batch: padded to the captured shape ("padded_batch"), on the device.
        ordinary: batch -> summed token losses as the backend computes them, with their autograd graph.
    """
    divisor = torch.ones((), device=captured.device)
    return check_pass(captured.model, lambda: ordinary(batch), lambda: captured.run(batch, divisor)[0], allowed)


def check_pass(
    model: Any, ordinary: Callable[[], Tensor], other: Callable[[], Tensor], allowed: Tolerances = TOLERANCES
) -> str | None:
    """Return why another way to compute the gradients of a micro-batch is not used, as check_capture does.

    Args:
        ordinary: returns the loss with its autograd graph.
        other: returns the loss after the backward pass.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        with kept_gradients(trained):
            with uncompiled():
                expected = ordinary()
                expected.backward()
            # Kept without a copy, because in full fine-tuning gradients are as large as the model.
            gradients = [p.grad for p in trained]
            for p in trained:
                p.grad = None
            drop_compiled_code(model)
            return _difference(expected, other(), gradients, trained, allowed)
    except Exception as error:
        return _failed(error)


def capture_sizes(captured: CapturedStep, example: dict[str, np.ndarray]) -> str | None:
    """Capture a micro-batch of every number of tokens that has none, so that layers are compiled before step 1.

    Gradients and random numbers are left as they were.

    Args:
        example: the shortest pack.

    Returns:
        why it failed, in a few words, or None.
    """
    parts = (example["input_ids"], example["labels"], example["lengths"])
    divisor = torch.ones((), device=captured.device)
    try:
        with kept_random_numbers(captured.device), kept_gradients(captured.trained):
            for tokens in captured.shape.token_sizes:
                if not captured.has_size(tokens):
                    captured.run({"padded_batch": captured.shape.pad(*parts, at_least=tokens)}, divisor)
        return None
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> str:
    logger.warning("a trial of a faster step failed: %s", error, exc_info=True)
    cause = error.__cause__ or error
    if isinstance(cause, RuntimeError) and is_out_of_memory(cause):
        return OUT_OF_MEMORY
    return f"trying it failed: {one_line(error, 120)}"


def _difference(
    expected: Tensor, loss: Tensor, gradients: list[Tensor | None], trained: list[Any], allowed: Tolerances
) -> str | None:
    off = abs(loss.item() - expected.item()) / max(abs(expected.item()), 1e-6)
    if not off <= allowed.loss:
        return f"its loss would differ by {off:.1e}"
    squares = torch.zeros(2, dtype=torch.float64, device=loss.device)
    for p, gradient in zip(trained, gradients, strict=True):
        # A batch without an image gives the weights of a tower none.
        expected_gradient, faster_gradient = (
            torch.zeros_like(p) if grad is None else grad for grad in (gradient, p.grad)
        )
        difference = faster_gradient.float() - expected_gradient.float()
        squares += torch.stack([difference.square().sum().double(), expected_gradient.float().square().sum().double()])
    far, whole = squares.sqrt().tolist()
    logger.info("a faster step differs by %.1e in its loss and %.1e in its gradients", off, far / max(whole, 1e-12))
    if not far <= allowed.gradients * max(whole, 1e-12):
        return f"its gradients would differ by {far / max(whole, 1e-12):.1e}"
    return None
