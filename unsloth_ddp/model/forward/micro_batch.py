"""Compute the loss of rows outside the training loop, as a step does."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor


@dataclass(frozen=True)
class MicroBatchRunner:
    """Compute the loss of rows outside the training loop as a step does: collated, on the device, in autocast.

    Args:
        loss: (model, batch, divisor) -> 0-dim tensor.
        collate: rows or packs -> batch.
        autocast: the trainer's.
    """

    model: Any
    device: torch.device
    loss: Callable[[Any, dict[str, Tensor], Tensor], Tensor]
    collate: Callable[[list[Any]], dict[str, Any]]
    autocast: Callable[[], AbstractContextManager[Any]]

    def batch_of(self, rows: list[Any]) -> dict[str, Any]:
        """Return the collated rows on the device."""
        return self.to_device(self.collate(rows))

    def to_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with its tensors on the device."""
        return send_to_device(batch, self.device)

    def loss_sum(self, batch: dict[str, Any]) -> Tensor:
        """Return the summed token losses of a batch on the device."""
        with self.autocast():
            return self.loss(self.model, batch, torch.ones((), device=self.device))
