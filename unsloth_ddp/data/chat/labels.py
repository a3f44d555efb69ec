"""Find the supervised tokens of a row or a batch from its labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# PyTorch's cross entropy ignores this label.
IGNORED = -100
# Matrix products are fastest with whole tiles, and the loss is compiled for more than one token.
MULTIPLE = 128
# Largest fraction of selected tokens; selecting needs a copy, which does not pay off for nearly all tokens.
MOST_SELECTED = 0.9


def selected_positions(supervised: int, tokens: int) -> int:
    """Return at how many of the tokens of a micro-batch logits are computed: tiles of supervised ones, or all."""
    tiled = max(1, -(-supervised // MULTIPLE)) * MULTIPLE
    return tokens if tiled > MOST_SELECTED * tokens else tiled


def first_supervised(labels: Sequence[int]) -> int | None:
    """Return the first supervised token that is predicted, which the first of a row is not; None if there is none."""
    return next((place for place, label in enumerate(labels) if label != IGNORED and place), None)


def supervise_from_same_token(rows: Sequence[tuple[list[int], list[int]]]) -> None:
    """Supervise both rows of a pair from the first token in which they differ or that either supervises.

    A token may join the end of the prompt to the beginning of one answer, and an answer may lack the tag that the
    generation prompt ends with. So the tokens before both answers are the same.

    Args:
        rows: input ids and labels of the two rows, which have the same text before their answers.
    """
    firsts = [first_supervised(labels) for _, labels in rows]
    begins = [first for first in firsts if first is not None]
    if len(begins) < len(rows):
        return
    (ids, _), (others, _) = rows
    same = min(begins)
    if ids[:same] != others[:same]:
        same = next(place for place in range(same) if ids[place] != others[place])
    for (row, labels), begin in zip(rows, begins, strict=True):
        labels[same:begin] = row[same:begin]


def supervised_positions(labels: Tensor) -> dict[str, Tensor]:
    """Return the positions that predict a supervised label, and these labels; empty if nearly all positions do.

    Args:
        labels: (rows, tokens), IGNORED where a token is not supervised.

    Returns:
        `supervised_positions`, indices into rows x tokens, and `shift_labels`, the label that follows each; both int64
        (1, n). n is padded to a multiple of MULTIPLE with positions whose label is IGNORED.
    """
    import torch

    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    positions = torch.nonzero(following != IGNORED).flatten()
    selected = selected_positions(len(positions), labels.numel())
    if selected == labels.numel():
        return {}
    missing = selected - len(positions)
    return {
        "supervised_positions": torch.nn.functional.pad(positions, (0, missing))[None],
        "shift_labels": torch.nn.functional.pad(following[positions], (0, missing), value=IGNORED)[None],
    }
