"""Lay a micro-batch of packs out as one integer vector whose length does not depend on the rows.

Kernels that are compiled for one shape, or recorded in a CUDA graph, need the same number of tokens, rows and supervised
tokens in every micro-batch. Missing tokens are filled with rows of their own that nothing supervises, missing rows with
empty ones, and missing supervised tokens with positions whose label is ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unsloth_ddp.data.labels import IGNORED

# Matrix products are fastest with whole tiles.
TILE = 128
# Shares of a micro-batch's tokens that the head is computed for: the smallest that holds the supervised ones is taken.
HEAD_SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)
# Attention launches blocks for every row, also for empty ones: rows are filled up to the next of so many numbers.
ROW_SIZES = 8
# Numbers before the other parts: supervised tokens, and tokens of rows that are no filler.
COUNTS = 2


@dataclass(frozen=True)
class LaidOut:
    """A micro-batch in one vector, with the sizes that its parts follow from.

    Attributes:
        vector: int64, as FixedShape.lay_out makes it.
        rows: of the micro-batch, empty ones included.
        head: tokens that the head is computed for.
    """

    vector: Tensor
    rows: int
    head: int

    @property
    def sizes(self) -> tuple[int, int]:
        """The sizes; passes over micro-batches of the same sizes are alike."""
        return self.rows, self.head

    def to(self, *args: Any, **kwargs: Any) -> LaidOut:
        """Return it with the vector moved, as Tensor.to does; loaders call this."""
        return LaidOut(self.vector.to(*args, **kwargs), self.rows, self.head)

    def pin_memory(self, *args: Any) -> LaidOut:
        """Return it with the vector in pinned memory; DataLoader calls this."""
        return LaidOut(self.vector.pin_memory(*args), self.rows, self.head)


@dataclass(frozen=True)
class StepTensors:
    """The parts of a laid out micro-batch, all views of one vector.

    Attributes:
        supervised: 0-dim, supervised tokens.
        tokens: 0-dim, tokens without the fill and without filler rows, which have one token.
        input_ids: (sequences, tokens of a sequence); one sequence holds all packs, unless the shape says otherwise.
        position_ids: of the same shape; they restart at 0 in every row, and none is greater than those of the rows.
        boundaries: (rows + 1,), the first token of each row, and the number of tokens for empty rows.
        head_positions: (n,), the tokens that the head is computed for.
        head_labels: (n,), what follows each, or IGNORED.
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
    """The sizes that micro-batches are filled up to: tokens always, rows and supervised tokens to one of a few numbers.

    Args:
        tokens: of a micro-batch.
        rows: most of a micro-batch, those that fill it up included.
        longest: most tokens of a row.
        sequences: packs of a micro-batch where every pack is one row. Each is padded to `longest` and is a sequence of its
            own, so that attention needs no boundaries. 0 where packs hold more rows: they are one sequence.
    """

    tokens: int
    rows: int
    longest: int
    sequences: int = 0

    @classmethod
    def that_holds(cls, tokens: int, rows: int, longest: int) -> FixedShape:
        """Return the shape that holds micro-batches of up to so many tokens and rows, and their fill."""
        whole = math.ceil(tokens / TILE) * TILE
        return cls(whole, rows + math.ceil(whole / longest), longest)

    @classmethod
    def of_single_rows(cls, sequences: int, longest: int) -> FixedShape:
        """Return the shape of micro-batches of so many packs of one row each, of at most `longest` tokens."""
        length = math.ceil(longest / TILE) * TILE
        return cls(sequences * length, sequences, length, sequences)

    def head_size(self, supervised: int) -> int:
        """Return how many tokens the head is computed for where so many are supervised."""
        sizes = (math.ceil(self.tokens * share / TILE) * TILE for share in HEAD_SHARES)
        return next(size for size in sizes if size >= supervised)

    def row_size(self, rows: int) -> int:
        """Return how many rows a micro-batch of so many has with empty ones."""
        step = max(8, math.ceil(self.rows / ROW_SIZES))
        return math.ceil(rows / step) * step

    def lay_out(self, ids: np.ndarray, labels: np.ndarray, lengths: np.ndarray) -> LaidOut | None:
        """Return a micro-batch in this shape; None if it is larger.

        Args:
            ids: (tokens,), the rows one after the other.
            labels: (tokens,), IGNORED where a token is not supervised.
            lengths: (rows,), the tokens of each row.
        """
        room = self._room(lengths)
        if room is None:
            return None
        starts = np.cumsum(room) - room
        rows = self.sequences or self.row_size(len(room))
        boundaries = np.full(rows + 1, self.tokens)
        boundaries[: len(room)] = starts
        moved = starts[: len(lengths)] - (np.cumsum(lengths) - lengths)
        places = np.arange(len(ids)) + np.repeat(moved, lengths)
        padded = np.zeros((2, self.tokens), dtype=np.int64)
        padded[1] = IGNORED
        padded[:, places] = ids, labels
        following = np.append(padded[1, 1:], IGNORED)
        positions = np.flatnonzero(following != IGNORED)
        head = self.head_size(len(positions))
        missing = head - len(positions)
        parts = (
            [len(positions), lengths[lengths > 1].sum()],
            padded[0],
            # A model's table of positions may end with its longest row.
            np.minimum(np.arange(self.tokens) - np.repeat(starts, room), max(lengths.max() - 1, 1)),
            boundaries,
            np.append(positions, np.zeros(missing)),
            np.append(following[positions], np.full(missing, IGNORED)),
        )
        vector = np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])
        return LaidOut(torch.from_numpy(vector), rows, head)

    def _room(self, lengths: np.ndarray) -> np.ndarray | None:
        """Return the tokens that each row takes, rows that fill the micro-batch up included; None if it is larger."""
        if lengths.max() > self.longest:
            return None
        if self.sequences:
            return np.full(self.sequences, self.longest) if len(lengths) <= self.sequences else None
        fill = self.tokens - lengths.sum()
        if fill < 0:
            return None
        whole, rest = divmod(fill, self.longest)
        room = np.concatenate([lengths, np.full(whole, self.longest), np.full(int(rest > 0), rest)]).astype(np.int64)
        return room if len(room) <= self.rows else None

    def parts(self, laid_out: LaidOut) -> StepTensors:
        """Return the parts of a laid out micro-batch, on its device, without a copy."""
        sizes = [COUNTS, self.tokens, self.tokens, laid_out.rows + 1, laid_out.head, laid_out.head]
        counts, ids, positions, boundaries, picked, labels = laid_out.vector.split(sizes)
        by_sequence = (self.sequences or 1, -1)
        ids, positions = ids.view(by_sequence), positions.view(by_sequence)
        return StepTensors(counts[0], counts[1], ids, positions, boundaries, picked, labels)
