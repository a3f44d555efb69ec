"""Compute the loss of text with decoder and output head apart, so that all logits never exist at once.

Classes for images and text have no fused head in TRL, and a vocabulary of 262,000 tokens makes the logits of a row of
2,048 tokens larger than a small model.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.model.forward.head_loss import Logits, head_loss
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.modules import base_model, evaluation_mode, text_decoder
from unsloth_ddp.utils.errors import one_line

logger = logging.getLogger("unsloth_ddp")

# Logits that exist at once: 256 tokens of a vocabulary of 262,144. With the copies in fp32 they take about a GiB.
LOGITS_AT_ONCE = 2**26
# Relative tolerance between the two losses in 16 bit, as for the head on supervised tokens.
TOLERANCE = 5e-3


@dataclass(frozen=True, eq=False)
class DecoderLoss:
    """Compute the summed token losses of a text model whose output head is a plain frozen matrix.

    Args:
        decoder: returns the last hidden states.
        weight: of the head, (vocabulary, hidden size).
        logits: what the model does to the products.
    """

    decoder: Any
    weight: Tensor
    logits: Logits

    def __call__(self, batch: dict[str, Any]) -> Tensor:
        """Return the summed token losses of a batch, 0-dim float32.

        Args:
            batch: the model's inputs with `labels`, and with `supervised_positions` and `shift_labels` if known.
        """
        inputs = dict(batch)
        labels = inputs.pop("labels")
        positions, targets = inputs.pop("supervised_positions", None), inputs.pop("shift_labels", None)
        hidden = self.decoder(**inputs, use_cache=False)[0]
        if positions is None:
            selected, targets = hidden[..., :-1, :].flatten(0, -2), labels[..., 1:].flatten()
        else:
            selected = hidden.reshape(-1, hidden.shape[-1]).index_select(0, positions.flatten())
            targets = targets.flatten()
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        chunk = max(1, LOGITS_AT_ONCE // self.weight.shape[0])
        return head_loss(selected, self.weight, targets, dtype, self.logits, chunk=chunk)


def decoder_loss_of(model: Any) -> DecoderLoss | None:
    """Return the loss of a model by its decoder and its head; None if the head is not a plain frozen matrix."""
    base = base_model(model)
    head = base.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.bias is not None or head.weight.requires_grad:
        return None
    return DecoderLoss(text_decoder(model), head.weight, Logits.of(base.config.get_text_config()))


def decoder_loss_if_equal(runner: MicroBatchRunner, examples: Any, searched: int = 64) -> DecoderLoss | None:
    """Return the loss by decoder and head if it is that of the model on a short row; None if it is not, or fails.

    Args:
        runner: computes the loss of the model as it is.
        examples: training rows (packs), by index.
        searched: first rows that the shortest one with a supervised token is taken from.
    """
    computed = decoder_loss_of(runner.model)
    first = [examples[index] for index in range(min(searched, len(examples)))]
    supervised = [example for example in first if (example["labels"][1:] != IGNORED).any()]
    if computed is None or not supervised:
        return None
    batch = runner.batch_of([min(supervised, key=lambda example: len(example["input_ids"]))])
    try:
        with evaluation_mode(runner.model), torch.no_grad():
            expected = runner.loss_sum(batch).double()
            with runner.autocast():
                apart = computed(batch).double()
    except Exception as error:
        logger.warning("the head computes all logits at once, because calling the decoder failed: %s", one_line(error))
        return None
    if torch.isclose(apart, expected, rtol=TOLERANCE):
        return computed
    logger.warning(
        "the head computes all logits at once: the loss would change from %s to %s", expected.item(), apart.item()
    )
    return None
