"""Labels of tokens: which are supervised, and where."""

from __future__ import annotations

import torch
from torch import Tensor

# What PyTorch's cross entropy leaves out.
IGNORED = -100
# Matrix products are fastest with whole tiles, and the loss is compiled for sequences longer than one token.
MULTIPLE = 128
# Choosing tokens costs a copy, which has to be worth it.
WORTH_IT = 0.9


def supervised_positions(labels: Tensor) -> dict[str, Tensor]:
    """Where the tokens are from which a label is predicted, and the labels; empty where nearly all tokens are.

    Args:
        labels: (rows, tokens), IGNORED where a token is not supervised.

    Returns:
        `supervised_positions`, indices into rows x tokens, and `shift_labels`, the label that follows each; both int64
        (1, n), with n made a multiple of MULTIPLE by positions whose label is IGNORED.
    """
    following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    positions = torch.nonzero(following != IGNORED).flatten()
    missing = -len(positions) % MULTIPLE or (0 if len(positions) else MULTIPLE)
    if len(positions) + missing > WORTH_IT * labels.numel():
        return {}
    return {
        "supervised_positions": torch.nn.functional.pad(positions, (0, missing))[None],
        "shift_labels": torch.nn.functional.pad(following[positions], (0, missing), value=IGNORED)[None],
    }
