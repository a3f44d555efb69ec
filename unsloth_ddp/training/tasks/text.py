"""Train on text, with images too: the unit is a supervised token, the loss its cross entropy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.model.forward.decoder_loss import DecoderLoss, decoder_loss_if_equal
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.forward.supervised_head import SupervisedHead, head_with_equal_loss
from unsloth_ddp.training.tasks.task import Task


@dataclass(frozen=True, eq=False)
class TextTask(Task):
    """Sum the token losses of a micro-batch and divide them by the step's divisor (see divisor.py).

    TRL's metrics per batch are not computed, because they wait for the device.

    Args:
        upstream: Unsloth's compute_loss, which prepares the inputs of some models and hands the divisor to its fused
            loss; None with the transformers backend.
        divides: whether the model takes the divisor; otherwise it would divide by its own count.
        fused_head: whether the model can use TRL's fused head, which never builds (batch, sequence, vocabulary) logits.
        head: computes the output head for supervised tokens only, if the loss stays the same (see tuned).
        apart: computes the loss by decoder and head, without all logits at once (see tuned).
    """

    upstream: Callable[..., Tensor] | None
    _: KW_ONLY
    divides: bool
    fused_head: bool
    head: SupervisedHead | None = None
    apart: DecoderLoss | None = None
    columns = ("loss_sum", "supervised_tokens")

    def units(self, batch: dict[str, Any]) -> Tensor:
        """Return the number of supervised tokens."""
        return supervised_tokens(batch["labels"])

    def measure(self, model: Any, batch: dict[str, Any], divisor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and the summed token losses and supervised tokens, float64 (2,)."""
        loss = self.loss(model, batch, divisor)
        return loss, torch.stack([(loss.detach() * divisor).double(), self.units(batch).double()])

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the token mean of the loss."""
        tokens = sums["supervised_tokens"]
        return {"loss": sums["loss_sum"] / tokens} if tokens else {}

    def loss(self, model: Any, batch: dict[str, Any], divisor: Tensor) -> Tensor:
        """Return the summed token losses / divisor, 0-dim."""
        inputs = {name: value for name, value in batch.items() if name != "padded_batch"}
        if self.apart is not None:
            return self.apart(inputs) / divisor
        if not self.divides:
            labels = inputs.pop("labels")
            return logits_to_step_loss(model(**inputs, use_cache=False).logits, labels, divisor)
        if self.upstream is not None:
            positions = inputs.pop("supervised_positions", None)
            with self.head.at(positions) if self.head else nullcontext():
                return self.upstream(model, inputs, num_items_in_batch=divisor)
        extra: dict[str, Any] = {"fused_lm_head": True} if self.fused_head else {}
        return model(**inputs, use_cache=False, num_items_in_batch=divisor, **extra).loss

    @property
    def head_chooses(self) -> bool:
        """Return whether a batch has to name its supervised tokens."""
        return self.head is not None or self.apart is not None

    def tuned(self, runner: MicroBatchRunner, examples: Any, rows: int) -> Self:
        """Return the task with its output head on supervised tokens only, if the loss stays.

        Without a fused head it computes the decoder and the head apart, else the model has to take the divisor.
        """
        if self.upstream is None:
            if self.divides and self.fused_head:
                return self
            return dataclasses.replace(self, apart=decoder_loss_if_equal(runner, examples))
        if not self.divides:
            return self

        def loss_with(head: SupervisedHead, batch: dict[str, Any]) -> Tensor:
            tried = dataclasses.replace(runner, loss=dataclasses.replace(self, head=head).loss)
            return tried.loss_sum(tried.to_device(batch))

        return dataclasses.replace(
            self, head=head_with_equal_loss(runner.model, examples, rows, runner.collate, loss_with)
        )


class ImageTask(TextTask):
    """Train on images and text with Transformers: as on text, with logits of the supervised tokens only.

    The losses of image-text classes are left aside: not all of them divide by what they are given, and TRL's fused head
    calls the text decoder, which images do not reach. What a batch has beside tokens and labels goes to the model as it
    is (data/images/processing.py).
    """

    # Only the logits of supervised tokens are computed.
    head_chooses = True

    def tuned(self, runner: MicroBatchRunner, examples: Any, rows: int) -> Self:
        """Return the task as it is."""
        return self

    def loss(self, model: Any, batch: dict[str, Any], divisor: Tensor) -> Tensor:
        """Return the summed token losses / divisor, 0-dim."""
        inputs = dict(batch)
        labels = inputs.pop("labels")
        # Where nearly all tokens are supervised, the batch names no positions.
        positions, targets = inputs.pop("supervised_positions", None), inputs.pop("shift_labels", None)
        with self.head.at(positions) if self.head else nullcontext():
            logits = model(**inputs, use_cache=False).logits
        if targets is None:
            return logits_to_step_loss(logits, labels, divisor)
        predicted = logits.flatten(0, -2).float()
        return cross_entropy(predicted, targets.flatten(), ignore_index=IGNORED, reduction="sum") / divisor


def supervised_tokens(labels: Tensor) -> Tensor:
    """Count the next-token predictions that `labels` (batch, sequence) supervise; position 0 is never predicted.

    Returns a 0-dim int64 tensor on the device of `labels`, without waiting for the device.
    """
    return (labels[..., 1:] != IGNORED).sum()


def logits_to_step_loss(logits: Tensor, labels: Tensor, divisor: Tensor) -> Tensor:
    """Return summed token losses / divisor from logits (batch, sequence, vocabulary) of a model that takes no divisor.

    The model's own mean cannot be converted to a sum: for a micro-batch without supervised tokens it is 0 / 0, and its
    gradient is NaN even if the loss is replaced by 0.
    """
    predicted = logits[..., :-1, :].flatten(0, -2).float()
    targets = labels[..., 1:].flatten().to(logits.device)
    return cross_entropy(predicted, targets, ignore_index=IGNORED, reduction="sum") / divisor
