"""Compute the log-probabilities of answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.model.forward.supervised_head import SupervisedHead


@dataclass(frozen=True)
class AnswerLogProbabilities:
    """Compute the log-probability of the supervised tokens of each row, with logits for these tokens only.

    Args:
        head: selects the positions at which the model computes logits.
    """

    head: SupervisedHead

    @classmethod
    def of(cls, model: Any) -> AnswerLogProbabilities:
        """Return what computes the log-probabilities of this model."""
        return cls(SupervisedHead(model))

    def __call__(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Return log pi(y|x) of each row, float32 (rows,)."""
        ids = batch["input_ids"]
        # Where nearly all tokens are supervised, the batch names no positions (see supervised_positions).
        positions, targets = batch.get("supervised_positions"), batch.get("shift_labels")
        if positions is None:
            targets = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()
        with self.head.at(positions):
            logits = model(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=False).logits
        assert targets is not None
        found = -cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="none")
        if positions is None:
            return found.view(ids.shape).sum(dim=1)
        rows = positions.flatten() // ids.shape[1]
        return found.new_zeros(len(ids)).index_add(0, rows, found)


def answer_tokens(labels: Tensor) -> Tensor:
    """Return the supervised tokens of each row, int64 (rows,); the first token of a row is never predicted."""
    return (labels[:, 1:] != IGNORED).sum(dim=1)
