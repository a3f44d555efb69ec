"""Say what a task has to define; the trainer, its step, resuming and reports know no more of it."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner


class Task(Protocol):
    """Compute the losses of a kind of training data.

    The loss of an optimizer step is a mean over units, such as supervised tokens, of all ranks and micro-batches.
    """

    def units(self, batch: dict[str, Any]) -> Tensor:
        """Return the number of units in a micro-batch: 0-dim int64, on its device, without waiting for the device."""

    def loss(self, model: Any, batch: dict[str, Any], divisor: Tensor) -> Tensor:
        """Return the summed losses of the units in a micro-batch divided by `divisor`, 0-dim."""

    @property
    def head_chooses(self) -> bool:
        """Return whether a batch has to name its supervised tokens (see model/forward/supervised_head.py)."""

    def tuned(self, runner: MicroBatchRunner, examples: Any, rows: int) -> Task:
        """Return the task in the form that computes the same losses faster on this model, if there is one.

        Args:
            runner: computes the loss of this task outside of the training loop.
            examples: training rows (packs), by index.
            rows: number of rows in a micro-batch.
        """
