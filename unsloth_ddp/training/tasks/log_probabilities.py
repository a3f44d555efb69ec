"""Compute the log-probabilities of answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.model.forward.supervised_head import SupervisedHead

# What the model gets of a batch of padded rows, or of packs (see Flatten).
INPUTS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "shared_keys",
)


class AnswerLogProbabilities:
    """Compute the log-probability of the supervised tokens of each row, with logits for these tokens only."""

    def __init__(self, model: Any) -> None:
        self.head = SupervisedHead(model)

    def __call__(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Return log pi(y|x) of each row, float32 (rows,)."""
        # Where nearly all tokens are supervised, the batch names no positions (see supervised_positions).
        positions, targets = batch.get("supervised_positions"), batch.get("shift_labels")
        if positions is None:
            targets = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        with self.head.at(positions):
            logits = model(**inputs, use_cache=False).logits
        assert targets is not None
        token_log_probabilities = -cross_entropy(
            logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="none"
        )
        return sum_by_row(token_log_probabilities, batch, positions)


def sum_by_row(values: Tensor, batch: dict[str, Any], positions: Tensor | None = None) -> Tensor:
    """Return the summed values of each row's tokens, (rows,), without waiting for the device.

    Args:
        values: (n,), of the tokens at `positions`; of all tokens if that is None.
        positions: indices into rows x tokens, (1, n).
    """
    ids, lengths = batch["input_ids"], batch.get("row_lengths")
    if lengths is None:
        if positions is None:
            return values.view(ids.shape).sum(dim=1)
        return values.new_zeros(len(ids)).index_add(0, positions.flatten() // ids.shape[1], values)
    rows = torch.arange(len(lengths), device=ids.device).repeat_interleave(lengths, output_size=ids.numel())
    return values.new_zeros(len(lengths)).index_add(0, rows if positions is None else rows[positions.flatten()], values)


def answer_tokens(batch: dict[str, Any]) -> Tensor:
    """Return the supervised tokens of each row, int64 (rows,); the first token of a row is never predicted."""
    labels = batch["labels"]
    if "row_lengths" in batch:
        # The labels of first tokens are ignored in a pack.
        return sum_by_row((labels != IGNORED).flatten().long(), batch)
    return (labels[:, 1:] != IGNORED).sum(dim=1)
