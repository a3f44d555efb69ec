"""Read token ids and labels of rows and packs directly from Arrow's memory.

The datasets library builds Python objects for each row, which took 24 ms of a step of 0.33 s (profile_auto.json).
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import datasets
import numpy as np
import pyarrow as pa

from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.data.order.packing import Packing

# The columns of a row; what else an example has is computed by its task.
ROW_KEYS = ("input_ids", "labels", "parts", "desirable")
IMAGE_KEYS = ("images", "rendered", "pixels")
# What says how the tokens of an example or of a pack make rows.
OF_TOKENS = ("input_ids", "labels", "parts", "lengths")


class ListColumn:
    """Return the rows of a list column of integers as arrays, without a copy; do not write to them."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        assert not column.null_count, "a row is missing"
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self.offsets = [chunk.offsets.to_numpy() for chunk in chunks]
        self.values = [chunk.values.to_numpy() for chunk in chunks]
        self.starts = [0, *accumulate(len(chunk) for chunk in chunks)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, row: int) -> np.ndarray:
        """Return the integers of one row."""
        if not 0 <= row < len(self):
            raise IndexError(f"there is no row {row}, only {len(self)}")
        chunk = bisect_right(self.starts, row) - 1
        offsets, row = self.offsets[chunk], row - self.starts[chunk]
        return self.values[chunk][offsets[row] : offsets[row + 1]]


class ArrowRows:
    """Map-style dataset of `input_ids` and `labels`, each (tokens,), of a tokenized set on disk.

    Pairs have `parts` too: the tokens of their two rows; labelled answers have these and `desirable`. Rows of a run
    with images have `images`, `rendered` and `pixels` (see chat.tokenize.EncodedRow).

    Args:
        added: further values of each row by name, each (rows, ...).
    """

    def __init__(self, tokenized: datasets.Dataset, added: dict[str, np.ndarray] | None = None) -> None:
        assert tokenized._indices is None, "the rows are a selection, and the table holds more"
        names = [name for name in ROW_KEYS if name in tokenized.column_names]
        self.columns = {name: ListColumn(tokenized.data.column(name)) for name in names}
        self.added = {} if added is None else added
        self.texts = {n: tokenized.data.column(n) for n in IMAGE_KEYS if n in tokenized.column_names}

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def members(self, index: int) -> list[int]:
        """Return the row, as PackedRows returns those of a pack."""
        return [index]

    def __getitem__(self, row: int) -> dict[str, Any]:
        row_values = {name: column[row] for name, column in self.columns.items()}
        row_values |= {name: column[row].as_py() for name, column in self.texts.items()}
        return row_values | {name: values[row] for name, values in self.added.items()}


@dataclass
class PackedRows:
    """Join rows to packs: a map-style dataset of the concatenated ids and labels of rows, and the lengths of the rows.

    The two rows of a pair, or of a labelled answer, follow each other.
    """

    rows: ArrowRows
    packing: Packing

    def __len__(self) -> int:
        return len(self.packing) + 1

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """Return a pack as `join_rows` makes it; the last index is the filler."""
        return join_rows([self.rows[member] for member in self.members(index)])

    def members(self, index: int) -> list[int]:
        """Return the rows of a pack."""
        return [len(self.rows) - 1] if index == len(self.packing) else self.packing.members(index).tolist()


def join_rows(examples: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenate examples into a pack: `input_ids`, `labels` (tokens,), `lengths` (rows,), others (examples, ...).

    What says which images the rows have is a list with a value for each row. An example is one row, or `parts` says how
    many tokens each of its two rows has. The label of each row's first token is ignored, as in an unpacked row, because
    no token of the row predicts it.
    """
    lengths = np.concatenate([example.get("parts", [len(example["input_ids"])]) for example in examples]).astype(
        np.int64
    )
    labels = np.concatenate([example["labels"] for example in examples])
    labels[np.cumsum(lengths) - lengths] = IGNORED
    further: dict[str, Any] = {n: [example[n] for example in examples] for n in examples[0] if n not in OF_TOKENS}
    further = {name: values if name in IMAGE_KEYS else np.stack(values) for name, values in further.items()}
    ids = np.concatenate([example["input_ids"] for example in examples])
    return {"input_ids": ids, "labels": labels, "lengths": lengths, **further}


def split_rows(example: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return the rows of an example or a pack, with what each has of images; an example of one row as it is."""
    lengths = example.get("lengths", example.get("parts"))
    if lengths is None:
        return [example]
    borders = np.cumsum(lengths)[:-1]
    values = {name: np.split(example[name], borders) for name in ("input_ids", "labels")}
    values |= {name: list(example[name]) for name in IMAGE_KEYS if name in example}
    return [dict(zip(values, of_row, strict=True)) for of_row in zip(*values.values(), strict=True)]
