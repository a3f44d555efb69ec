"""Split a micro-batch into parts that are computed one after the other."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from unsloth_ddp.data.arrow_rows import OF_TOKENS

Example = dict[str, Any]
# The key of a batch that holds the rows it was collated from (see KeepRows).
ROWS = "rows"


@dataclass(frozen=True)
class BatchRows:
    """The examples (rows or packs) of a batch, which libraries pass on as they are.

    Args:
        collate: examples -> batch.
        rows_an_example: 2 for the answers of a pair, else 1.
    """

    examples: list[Example]
    collate: Callable[[list[Example]], dict[str, Any]]
    rows_an_example: int = 1

    def batches(self, passes: int) -> list[dict[str, Any]]:
        """Return the batches of at most `passes` parts of the micro-batch, in host memory."""
        return [self.collate(part) for part in split_examples(self.examples, passes, self.rows_an_example)]

    @property
    def most_passes(self) -> int:
        """Return in how many parts the micro-batch can be split."""
        return sum(len(unpacked(example, self.rows_an_example)) for example in self.examples)


@dataclass
class KeepRows:
    """Collate examples into a batch that also holds the examples, so that it can be computed in parts."""

    collate: Callable[[list[Example]], dict[str, Any]]
    rows_an_example: int

    def __call__(self, examples: list[Example]) -> dict[str, Any]:
        return self.collate(examples) | {ROWS: BatchRows(examples, self.collate, self.rows_an_example)}


def split_examples(examples: list[Example], passes: int, rows_an_example: int = 1) -> list[list[Example]]:
    """Return the examples in at most `passes` parts of about as many tokens, in their order; packs are taken apart.

    Args:
        rows_an_example: rows that stay together: 2 for the answers of a pair, else 1.
    """
    rows = [row for example in examples for row in unpacked(example, rows_an_example)]
    if passes >= len(rows):
        return [[row] for row in rows]
    tokens = np.array([len(row["input_ids"]) for row in rows])
    middles = np.cumsum(tokens) - tokens / 2
    part = np.minimum(passes - 1, (middles * passes / tokens.sum()).astype(int))
    parts = [[row for row, number in zip(rows, part, strict=True) if number == index] for index in range(passes)]
    return [rows_of_part for rows_of_part in parts if rows_of_part]


def unpacked(example: Example, rows_an_example: int = 1) -> list[Example]:
    """Return the examples of a pack as packs of one example each; an example that is no pack as it is."""
    if "lengths" not in example:
        return [example]
    lengths = np.asarray(example["lengths"]).reshape(-1, rows_an_example)
    ends = np.cumsum(lengths.sum(axis=1))
    further = [name for name in example if name not in OF_TOKENS]
    single = []
    for index, (end, of_rows) in enumerate(zip(ends, lengths, strict=True)):
        tokens = slice(int(end - of_rows.sum()), int(end))
        row = {"input_ids": example["input_ids"][tokens], "labels": example["labels"][tokens], "lengths": of_rows}
        single.append(row | {name: example[name][index : index + 1] for name in further})
    return single
