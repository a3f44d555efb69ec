"""Token ids and labels of a row, straight from Arrow's memory.

datasets builds Python objects on the way to each row, which took 24 ms of a step of 0.33 s (profile_auto.json).
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import datasets
import numpy as np
import pyarrow as pa


class Lists:
    """The lists of a column of integers as arrays, none of them copied; they must not be written to."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        assert not column.null_count, "a row is missing"
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self.offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        self.values = [chunk.values.to_numpy() for chunk in chunks]
        self.starts = [0, *accumulate(len(chunk) for chunk in chunks)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, row: int) -> np.ndarray:
        """The integers of one row."""
        if not 0 <= row < len(self):
            raise IndexError(f"there is no row {row}, only {len(self)}")
        chunk = bisect_right(self.starts, row) - 1
        offsets, row = self.offsets[chunk], row - self.starts[chunk]
        return self.values[chunk][offsets[row] : offsets[row + 1]]


class ArrowRows:
    """A map-style dataset of `input_ids` and `labels`, each (tokens,), of a tokenized set on the disk."""

    def __init__(self, tokenized: datasets.Dataset) -> None:
        assert tokenized._indices is None, "the rows are a selection, and the table holds more"
        self.input_ids = Lists(tokenized.data.column("input_ids"))
        self.labels = Lists(tokenized.data.column("labels"))

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        return {"input_ids": self.input_ids[row], "labels": self.labels[row]}
