"""Find the supervised tokens of a batch from its labels."""

from __future__ import annotations

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
    found = max(1, -(-supervised // MULTIPLE)) * MULTIPLE
    return tokens if found > MOST_SELECTED * tokens else found


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
