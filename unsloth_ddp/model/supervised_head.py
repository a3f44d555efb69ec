"""The output head over supervised tokens only.

The head multiplies every token with a whole vocabulary, for 15 % of all the work of a 1.7B model and 8 % of an 8B one;
tokens that are not learned need none of it. TRL's fused head leaves them out. Unsloth's fused loss computes them and
counts them as nothing, so here the last hidden states of the others are all that it is given.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from unsloth_ddp.data.labels import IGNORED, supervised_positions
from unsloth_ddp.utils.errors import one_line

logger = logging.getLogger("unsloth_ddp")

# Relative, of one loss in 16 bit computed in two ways; labels that went to other tokens would be off by far more.
ROUNDING = 5e-3
# Limits of logits as RecurrentGemma and xLSTM call them.
UNKNOWN_CAPS = ("logits_soft_cap", "output_logit_soft_cap")
# Rows (packs) of which both losses are computed, at most, and among how many they are looked for.
ROWS, LOOKED_AT = 4, 256


class SupervisedHead:
    """Gives the head of a model the hidden states at some positions alone, while `at` is entered.

    Args:
        model: a causal language model of Transformers, in PEFT's wrapper or not.
    """

    def __init__(self, model: Any) -> None:
        self.positions: Tensor | None = None
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._hook = base.get_decoder().register_forward_hook(self._select)

    @contextmanager
    def at(self, positions: Tensor | None) -> Iterator[None]:
        """For one forward pass; None gives the head everything."""
        self.positions = positions
        try:
            yield
        finally:
            self.positions = None

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
    """Whether TRL's fused head makes the logits of this model of Transformers.

    It multiplies the last hidden states with the output embedding, and knows some scalings; other layers in between, and
    caps of other names, it would leave out of the loss.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if any(getattr(base.config.get_text_config(), name, None) for name in UNKNOWN_CAPS):
        return False
    known = (base.base_model, base.get_output_embeddings())
    others = (child for child in base.children() if not any(child is one for one in known))
    return not any(True for child in others for _ in child.parameters())


def head_with_equal_loss(
    model: Any,
    examples: Any,
    rows: int,
    collate: Callable[[list[Any]], dict[str, Any]],
    loss: Callable[[SupervisedHead, dict[str, Any]], Tensor],
) -> SupervisedHead | None:
    """Return a head of `model` that chooses supervised tokens; None where that saves nothing or changes the loss.

    Unsloth computes the loss in several places, and not all of them take labels for chosen positions, so the loss of
    some rows is computed in both ways.

    Args:
        examples: training rows (packs), by index.
        rows: in a micro-batch.
        collate: rows -> batch.
        loss: (head, batch) -> summed token losses with this head, as evaluation computes them.
    """
    units = _supervised_units(examples, min(ROWS, rows))
    batch = collate(units) if units else {"labels": torch.empty(1, 0)}
    chosen = supervised_positions(batch["labels"])
    if not chosen:
        return None
    head = SupervisedHead(model)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), _compiled_loss_kept():
            whole, selected = loss(head, batch).double(), loss(head, batch | chosen).double()
    except Exception as error:
        logger.warning("the head computes all tokens, since choosing some failed: %s", one_line(error))
        return None
    finally:
        model.train(was_training)
    if not (whole > 0 and torch.isclose(selected, whole, rtol=ROUNDING)):
        logger.warning(
            "the head computes all tokens: a loss of %s, %s over those chosen", whole.item(), selected.item()
        )
        return None
    return head


def _supervised_units(examples: Any, count: int) -> list[dict[str, Any]]:
    """The first rows (packs) of which anything is learned: over others the loss is 0, whatever is computed."""
    seen = (examples[i] for i in range(min(LOOKED_AT, len(examples))))
    return list(itertools.islice((one for one in seen if (one["labels"][1:] != IGNORED).any()), count))


@contextmanager
def _compiled_loss_kept() -> Iterator[None]:
    """Unsloth's fused loss gives up its compiled form for good when its first call fails, as one of ours may."""
    loss = sys.modules.get("unsloth_zoo.fused_losses.cross_entropy_loss")
    before = getattr(loss, "_FUSED_CE_COMPILE_SUPPORTED", None)
    try:
        yield
    except Exception:
        if loss is not None:
            loss._FUSED_CE_COMPILE_SUPPORTED = before  # type: ignore[attr-defined]
        raise
