"""Train on images and text with Transformers: as on text, with logits of the supervised tokens only.

The losses of image-text classes are left aside: not all of them divide by what they are given, and TRL's fused head calls the
text decoder, which images do not reach.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Self

from torch import Tensor
from torch.nn.functional import cross_entropy

from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.training.tasks.text import TextTask, logits_to_step_loss


class ImageTask(TextTask):
    """Sum the token losses of a micro-batch that may hold images, and divide them by the step's divisor.

    What a batch has beside tokens and labels goes to the model as it is (data/images/processing.py).
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
