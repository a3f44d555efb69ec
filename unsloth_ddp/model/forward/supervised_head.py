"""Compute the output head for supervised tokens only.

The head multiplies every token with the whole vocabulary, which is 15 % of all work of a 1.7B model and 8 % of an 8B
model; tokens that are not supervised do not need it. TRL's fused head leaves them out. Unsloth's fused loss computes
their logits and weights them with zero, so the kit passes it the last hidden states of supervised tokens only.
"""

import itertools
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unsloth_ddp.data.chat.labels import IGNORED, supervised_positions
from unsloth_ddp.model.modules import base_model, evaluation_mode, replaced, text_decoder
from unsloth_ddp.utils.errors import one_line

logger = logging.getLogger("unsloth_ddp")

# Relative tolerance between the two losses in 16 bit; misaligned labels would differ by far more.
TOLERANCE = 5e-3
# Config fields for caps on logits that TRL does not know (RecurrentGemma, xLSTM).
UNKNOWN_CAPS = ("logits_soft_cap", "output_logit_soft_cap")
# Maximum number of rows (packs) on which both losses are computed, and of rows that are searched for them.
ROWS, SEARCHED = 4, 256


class SupervisedHead:
    """Pass only the hidden states at given positions to a model's head, inside the block of `at`."""

    def __init__(self, model: Any) -> None:
        self.positions: Tensor | None = None
        text_decoder(model).register_forward_hook(self._select)

    def at(self, positions: Tensor | None) -> AbstractContextManager[None]:
        """Select `positions` inside the block, for one forward pass; None passes every position."""
        return replaced(self, "positions", positions)

    def _select(self, decoder: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if self.positions is None:
            return None
        hidden = output[0]
        selected = hidden.reshape(-1, hidden.shape[-1]).index_select(0, self.positions.flatten())[None]
        if isinstance(output, tuple):
            return selected, *output[1:]
        output.last_hidden_state = selected
        return output


def fits_fused_head(model: Any) -> bool:
    """Return whether TRL's fused head computes the same logits as this Transformers model.

    The fused head multiplies the last hidden states with the output embedding and applies known scalings. It ignores
    other layers in between, and caps on logits under names that it does not know.
    """
    base = base_model(model)
    if any(getattr(base.config.get_text_config(), name, None) for name in UNKNOWN_CAPS):
        return False
    if _is_read_as_a_shard(model):
        return False
    decoder_and_head = (base.base_model, base.get_output_embeddings())
    others = (child for child in base.children() if not any(child is part for part in decoder_and_head))
    return not any(True for child in others for _ in child.parameters())


def _is_read_as_a_shard(model: Any) -> bool:
    """Return whether TRL's fused head would read the head's weight before FSDP2 gathers it, and could not use it.

    TRL then gathers the weight itself. Of a trained weight each rank keeps its own gradient instead of the mean over
    ranks, and a weight in host memory takes the whole head to the CPU. Otherwise accelerate puts the head into one
    FSDP2 group with the last normalization, which gathers both. It finds that layer only without PEFT's wrapper. A tied
    head is gathered with the embedding.
    """
    base = base_model(model)
    weight = getattr(base.get_output_embeddings(), "weight", None)
    if not isinstance(weight, DTensor) or weight is base.get_input_embeddings().weight:
        return False
    if not weight.requires_grad and weight.device.type == weight.device_mesh.device_type:
        return False
    return base is not model or not any("Norm" in type(child).__name__ for child in base.base_model.children())


def head_with_equal_loss(
    model: Any,
    examples: Any,
    rows: int,
    collate: Callable[[list[Any]], dict[str, Any]],
    loss: Callable[[SupervisedHead, dict[str, Any]], Tensor],
) -> SupervisedHead | None:
    """Return a SupervisedHead of `model`; None if it saves nothing or would change the loss.

    Unsloth computes the loss in several places, and not all of them accept labels for selected positions, so the loss
    of a few rows is computed in both ways and compared.

    Args:
        examples: training rows (packs), by index.
        rows: number of rows in a micro-batch.
        collate: rows -> batch.
        loss: (head, batch) -> summed token losses with this head, as evaluation computes them.
    """
    units = _supervised_units(examples, min(ROWS, rows))
    batch = collate(units) if units else {"labels": torch.empty(1, 0)}
    positions = supervised_positions(batch["labels"])
    if not positions:
        return None
    head = SupervisedHead(model)
    try:
        with _keep_compiled_loss(), evaluation_mode(model), torch.no_grad():
            full, selected = loss(head, batch).double(), loss(head, batch | positions).double()
    except Exception as error:
        logger.warning("the head computes all tokens, because selecting supervised tokens failed: %s", one_line(error))
        return None
    if not (full > 0 and torch.isclose(selected, full, rtol=TOLERANCE)):
        logger.warning(
            "the head computes all tokens, because the loss would change from %s to %s", full.item(), selected.item()
        )
        return None
    return head


def _supervised_units(examples: Any, count: int) -> list[dict[str, Any]]:
    """Return the first rows (packs) with a supervised token; the loss of other rows is always 0."""
    searched = (examples[i] for i in range(min(SEARCHED, len(examples))))
    return list(itertools.islice((unit for unit in searched if (unit["labels"][1:] != IGNORED).any()), count))


def _keep_compiled_loss() -> AbstractContextManager[None]:
    """Restore what Unsloth notes of its compiled loss after the block: after a failed call it stops compiling it."""
    name, loss = "_FUSED_CE_COMPILE_SUPPORTED", sys.modules.get("unsloth_zoo.fused_losses.cross_entropy_loss")
    return nullcontext() if loss is None else replaced(loss, name, getattr(loss, name))
