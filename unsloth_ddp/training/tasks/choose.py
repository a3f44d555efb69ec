"""Return the task that the settings name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.supervised_head import SupervisedHead, fits_fused_head
from unsloth_ddp.training.tasks.kto import KtoTask
from unsloth_ddp.training.tasks.pairs import PairTask
from unsloth_ddp.training.tasks.task import Task
from unsloth_ddp.training.tasks.text import ImageTask, TextTask


def make_task(
    settings: Settings,
    runtime: Runtime,
    model: Any,
    data: TrainingData,
    upstream: Callable[..., Tensor],
    *,
    divides: bool,
) -> Task:
    """Return the task.

    Args:
        upstream: the backend's compute_loss.
        divides: whether the model takes the divisor of its loss.
    """
    if settings.task == "kto":
        return KtoTask.of(settings, runtime, model, data)
    if settings.trains_preferences:
        return PairTask.of(settings, runtime, model, data)
    if data.train.processing is not None and runtime.backend == "transformers":
        return ImageTask(None, divides=False, fused_head=False, head=SupervisedHead(model))
    return TextTask(
        upstream if runtime.backend == "unsloth" else None,
        divides=divides,
        fused_head=runtime.device_type == "cuda" and fits_fused_head(model),
    )
