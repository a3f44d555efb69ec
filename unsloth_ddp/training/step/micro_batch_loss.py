"""Compute the loss of one micro-batch, in the way that fits the model and the backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from torch import Tensor

from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.forward.supervised_head import SupervisedHead, head_with_equal_loss
from unsloth_ddp.training.step.loss import logits_to_step_loss


@dataclass(eq=False)
class MicroBatchLoss:
    """Sum the token losses of a micro-batch and divide them by the step's divisor (see loss.py).

    TRL's metrics per batch are not computed, because they wait for the device.

    Args:
        upstream: Unsloth's compute_loss, which prepares the inputs of some models and hands the divisor to its fused
            loss; None with the transformers backend.
        divides: whether the model takes the divisor; otherwise it would divide by its own count.
        fused_head: whether the model can use TRL's fused head, which never builds (batch, sequence, vocabulary) logits.
        forward_done: called after the model's forward pass, when DDP has prepared its backward pass.
    """

    upstream: Callable[..., Tensor] | None
    _: KW_ONLY
    divides: bool
    fused_head: bool
    forward_done: Callable[[], None]
    head: SupervisedHead | None = field(default=None, init=False)

    def choose_head(self, runner: MicroBatchRunner, examples: Any, rows: int) -> None:
        """Compute the output head on supervised tokens only, if the model takes the divisor and the loss stays the same.

        Args:
            runner: computes this loss of a batch.
            examples: training rows (packs), by index.
            rows: number of rows in a micro-batch.
        """
        if not self.divides:
            return

        def loss_with(head: SupervisedHead, batch: dict[str, Any]) -> Tensor:
            self.head = head
            try:
                return runner.loss_sum(runner.to_device(batch))
            finally:
                self.head = None

        self.head = head_with_equal_loss(runner.model, examples, rows, runner.collate, loss_with)

    def __call__(self, model: Any, inputs: dict[str, Tensor], divisor: Tensor) -> Tensor:
        """Return the loss, a 0-dim tensor."""
        inputs = {name: value for name, value in inputs.items() if name != "padded_batch"}
        if not self.divides:
            without_labels = {name: value for name, value in inputs.items() if name != "labels"}
            logits = model(**without_labels, use_cache=False).logits
            self.forward_done()
            return logits_to_step_loss(logits, inputs["labels"], divisor)
        if self.upstream is not None:
            positions = inputs.pop("supervised_positions", None)
            with self.head.at(positions) if self.head else nullcontext():
                return self.upstream(model, inputs, num_items_in_batch=divisor)
        extra: dict[str, Any] = {"fused_lm_head": True} if self.fused_head else {}
        return model(**inputs, use_cache=False, num_items_in_batch=divisor, **extra).loss
