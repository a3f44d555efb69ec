"""Compute the prompt of a pair once: its second row leaves it out, and attends to that of its first row."""

import numpy as np

from unsloth_ddp.data.chat.labels import IGNORED


def repeated_prompts(ids: np.ndarray, labels: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return how many tokens at the start of each row repeat those of the row before, int (rows,); 0 for first rows of pairs.

    Only tokens that neither row is trained on count. The last of them is not left out, as it predicts the answer's first token.

    Args:
        ids, labels: int (tokens,), of the rows of pairs, one after the other.
        lengths: int (rows,).
    """
    starts = np.cumsum(lengths) - lengths
    repeated = np.zeros_like(lengths)
    for row in range(1, len(lengths), 2):
        most = int(min(lengths[row - 1], lengths[row]))
        first, second = (slice(start, start + most) for start in starts[row - 1 : row + 1])
        same = (ids[first] == ids[second]) & (labels[first] == IGNORED) & (labels[second] == IGNORED)
        repeated[row] = max(0, (most if same.all() else int(np.argmin(same))) - 1)
    return repeated


def keep_prompts_once(lengths: np.ndarray, repeated: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which tokens are kept, bool (tokens,), and which of these has the key of each token, int (tokens,).

    Args:
        lengths: int (rows,), of whole rows.
        repeated: int (rows,), from `repeated_prompts`.
    """
    starts = np.cumsum(lengths) - lengths
    token = np.arange(lengths.sum())
    position = token - np.repeat(starts, lengths)
    kept = position >= np.repeat(repeated, lengths)
    in_row_before = np.repeat(np.roll(starts, 1), lengths) + position
    return kept, (np.cumsum(kept) - 1)[np.where(kept, token, in_row_before)]
