"""Pad a micro-batch of packs to a fixed shape, stored as one integer vector.

Kernels that are compiled for one shape, or captured in a CUDA graph, need the same number of tokens, rows and
supervised tokens in every micro-batch. Tokens are padded with additional unsupervised rows, rows with empty rows, and
supervised tokens with positions whose label is ignored.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unsloth_ddp.data.chat.labels import IGNORED

if TYPE_CHECKING:
    # The arithmetic of sizes works without torch.
    from torch import Tensor

# Matrix products are fastest with whole tiles.
TILE = 128
# Fractions of a micro-batch's tokens for which the head is computed: the smallest that covers the supervised tokens is
# used.
HEAD_SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)
# The number of rows is padded to one of this many sizes, because attention launches blocks for empty rows too.
ROW_SIZES = 8
# Counts at the start of the vector: supervised tokens, and tokens without padding and filler rows.
COUNTS = 2


@dataclass(frozen=True)
class PaddedBatch:
    """A micro-batch padded to a fixed shape, in one vector, with the sizes that determine its parts.

    Attributes:
        vector: int64, as returned by FixedShape.pad.
        tokens: number of tokens, including padding.
        rows: number of rows, including empty ones.
        head: number of tokens for which the head is computed.
    """

    vector: Tensor
    tokens: int
    rows: int
    head: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(tokens, rows, head); micro-batches of the same sizes can share a CUDA graph."""
        return self.tokens, self.rows, self.head

    def to(self, *args: Any, **kwargs: Any) -> PaddedBatch:
        """Return a copy with the vector moved, as Tensor.to does; data loaders call this."""
        return dataclasses.replace(self, vector=self.vector.to(*args, **kwargs))

    def pin_memory(self, *args: Any) -> PaddedBatch:
        """Return a copy with the vector in pinned memory; DataLoader calls this."""
        return dataclasses.replace(self, vector=self.vector.pin_memory(*args))


@dataclass(frozen=True)
class StepTensors:
    """The parts of a padded micro-batch, all views of one vector.

    Attributes:
        supervised: 0-dim, number of supervised tokens.
        tokens: 0-dim, number of tokens without padding and without filler rows, which have one token.
        input_ids: (sequences, sequence length); one sequence with all packs if FixedShape.sequences is 0.
        position_ids: (sequences, sequence length); they restart at 0 in every row, and padding has none
            beyond those of the rows.
        boundaries: (rows + 1,), the index of each row's first token; for empty rows the number of tokens.
        head_positions: (n,), the tokens for which the head is computed.
        head_labels: (n,), the label that follows each, or IGNORED.
    """

    supervised: Tensor
    tokens: Tensor
    input_ids: Tensor
    position_ids: Tensor
    boundaries: Tensor
    head_positions: Tensor
    head_labels: Tensor


@dataclass(frozen=True)
class FixedShape:
    """The shape that micro-batches are padded to: one of a few numbers of tokens, of rows, and of head tokens.

    Args:
        tokens: maximum number of tokens of a padded micro-batch.
        rows: maximum number of rows, including padding rows.
        longest: maximum number of tokens of a row.
        sequences: number of packs if every pack is one row. Each is then a sequence of its own, padded to the same
            length, so that attention needs no row boundaries. 0 if packs hold several rows; they are joined to one
            sequence.
        smaller: further numbers of tokens, ascending; a micro-batch is padded to the smallest number that holds it.
    """

    tokens: int
    rows: int
    longest: int
    sequences: int = 0
    smaller: tuple[int, ...] = ()

    @classmethod
    def that_holds(cls, tokens: int, rows: int, longest: int) -> FixedShape:
        """Return the shape for micro-batches of up to `tokens` and `rows`, with room for padding rows."""
        whole = math.ceil(tokens / TILE) * TILE
        return cls(whole, rows + math.ceil(whole / longest), longest)

    @classmethod
    def of_single_rows(cls, sequences: int, longest: int) -> FixedShape:
        """Return the shape for micro-batches of `sequences` packs of one row each, of at most `longest` tokens."""
        length = math.ceil(longest / TILE) * TILE
        return cls(sequences * length, sequences, length, sequences)

    @property
    def token_sizes(self) -> tuple[int, ...]:
        """The numbers of tokens that micro-batches are padded to, ascending."""
        return *self.smaller, self.tokens

    def needed(self, lengths: np.ndarray) -> np.ndarray:
        """Return the tokens that micro-batches take in whole tiles, int (micro-batches,).

        Args:
            lengths: int (micro-batches, packs or rows), their tokens.
        """
        each = self.sequences or 1
        tokens = lengths.max(axis=1) if self.sequences else lengths.sum(axis=1)
        return np.ceil(tokens / TILE).astype(np.int64) * TILE * each

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """Return the tokens that micro-batches of at most `tokens` tokens are padded to; see `needed`."""
        sizes = np.array(self.token_sizes)
        return sizes[np.searchsorted(sizes, self.needed(lengths))]

    def row_size(self, rows: int) -> int:
        """Return the number of rows that a micro-batch of `rows` rows is padded to."""
        step = max(8, math.ceil(self.rows / ROW_SIZES))
        return math.ceil(rows / step) * step

    def pad(self, ids: np.ndarray, labels: np.ndarray, lengths: np.ndarray, *, at_least: int = 0) -> PaddedBatch | None:
        """Return a micro-batch padded to this shape; None if it is larger.

        Args:
            ids: (tokens,), the concatenated rows.
            labels: (tokens,), IGNORED where a token is not supervised.
            lengths: (rows,), the tokens of each row.
            at_least: tokens of the padded micro-batch, at least.
        """
        import torch

        needed = max(int(self.needed(lengths[None])[0]), at_least)
        tokens = next((size for size in self.token_sizes if size >= needed), 0)
        room = self._room(lengths, tokens)
        if room is None:
            return None
        starts = np.cumsum(room) - room
        rows = self.sequences or self.row_size(len(room))
        boundaries = np.full(rows + 1, tokens)
        boundaries[: len(room)] = starts
        moved = starts[: len(lengths)] - (np.cumsum(lengths) - lengths)
        places = np.arange(len(ids)) + np.repeat(moved, lengths)
        padded = np.zeros((2, tokens), dtype=np.int64)
        padded[1] = IGNORED
        padded[:, places] = ids, labels
        following = np.append(padded[1, 1:], IGNORED)
        positions = np.flatnonzero(following != IGNORED)
        head = head_size(len(positions), tokens)
        missing = head - len(positions)
        parts = (
            [len(positions), lengths[lengths > 1].sum()],
            padded[0],
            # A model's table of positions may end with its longest row.
            np.minimum(np.arange(tokens) - np.repeat(starts, room), max(lengths.max() - 1, 1)),
            boundaries,
            np.append(positions, np.zeros(missing)),
            np.append(following[positions], np.full(missing, IGNORED)),
        )
        vector = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
        return PaddedBatch(torch.from_numpy(vector), tokens, rows, head)

    def _room(self, lengths: np.ndarray, tokens: int) -> np.ndarray | None:
        """Return the padded length of each row, including padding rows; None if the micro-batch is larger."""
        if not tokens or lengths.max() > self.longest:
            return None
        if self.sequences:
            return np.full(self.sequences, tokens // self.sequences) if len(lengths) <= self.sequences else None
        fill = tokens - lengths.sum()
        whole, rest = divmod(fill, self.longest)
        room = np.concatenate([lengths, np.full(whole, self.longest), np.full(int(rest > 0), rest)]).astype(np.int64)
        return room if len(room) <= self.rows else None

    def parts(self, padded_batch: PaddedBatch) -> StepTensors:
        """Return the parts of a padded micro-batch, as views on its device."""
        tokens, rows, head = padded_batch.sizes
        sizes = [COUNTS, tokens, tokens, rows + 1, head, head]
        counts, ids, positions, boundaries, picked, labels = padded_batch.vector.split(sizes)
        by_sequence = (self.sequences or 1, -1)
        ids, positions = ids.view(by_sequence), positions.view(by_sequence)
        return StepTensors(counts[0], counts[1], ids, positions, boundaries, picked, labels)


def head_size(supervised: int, tokens: int) -> int:
    """Return for how many of `tokens` tokens the head is computed if `supervised` tokens are supervised."""
    sizes = (math.ceil(tokens * share / TILE) * TILE for share in HEAD_SHARES)
    return next(size for size in sizes if size >= supervised)


# Two sizes more than one save most of what is padded.
MOST_SMALLER = 2
# A further size must save this part of the padded tokens,
LEAST_SAVED = 0.1
# and in the whole run about as many tokens as a GPU computes while layers are compiled for it.
TOKENS_OF_COMPILING = 500_000
# Sizes that are compared.
CANDIDATES = 64


def smaller_sizes(needed: np.ndarray, largest: int, micro_batches: int) -> tuple[int, ...]:
    """Return the numbers of tokens besides `largest` that micro-batches should be padded to, ascending.

    Args:
        needed: int (n,), tokens of a sample of the micro-batches; see FixedShape.needed.
        largest: tokens of the largest micro-batch.
        micro_batches: of the run, on one process.
    """
    candidates = np.unique(needed[needed < largest])
    if len(candidates) > CANDIDATES:
        candidates = candidates[np.linspace(0, len(candidates) - 1, CANDIDATES).astype(int)]
    chosen: tuple[int, ...] = ()
    cost = float(largest)
    for count in range(1, MOST_SMALLER + 1):
        options = list(itertools.combinations(candidates.tolist(), count))
        if not options:
            break
        padded = [np.array((*option, largest)) for option in options]
        costs = [float(sizes[np.searchsorted(sizes, needed)].mean()) for sizes in padded]
        best = int(np.argmin(costs))
        saved = cost - costs[best]
        if saved < LEAST_SAVED * cost or saved * micro_batches < TOKENS_OF_COMPILING:
            break
        cost, chosen = costs[best], options[best]
    return chosen
