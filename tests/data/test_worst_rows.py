"""Test which rows make the micro-batch that is the worst of a run in every respect."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest

from unsloth_ddp.data.dataset import Counts, TokenizedRows
from unsloth_ddp.data.order.packing import best_fit
from unsloth_ddp.data.order.worst_rows import largest, supervise, worst_micro_batch


@pytest.mark.parametrize("packed", [False, True])
def test_rows_still_to_come_are_tried_at_their_longest(packed):
    columns = {name: [[1, 2], [3, 4, 5], [6], [0]] for name in ("input_ids", "labels")}
    packing = best_fit(np.array([2, 3, 1]), 3) if packed else None
    rows = TokenizedRows(datasets.Dataset.from_dict(columns).with_format("numpy"), Counts(rows=3), packing)
    assert sorted(len(unit["input_ids"]) for unit in largest(rows, 2, max_length=7)) == ([3, 3] if packed else [2, 3])
    units = largest(dataclasses.replace(rows, streamed=True), 2, max_length=7)
    assert [len(unit["labels"]) for unit in units] == [7, 7]
    assert [unit["lengths"].tolist() for unit in units if packed] == [[7], [7]] * packed


def test_rows_with_the_most_pixels_are_tried_beside_the_longest():
    columns = {"input_ids": [[1], [2, 2], [3] * 9, [4] * 5, [0]], "pixels": [900, 10, 0, 700, 0]}
    columns["labels"] = columns["input_ids"]
    processing: Any = SimpleNamespace(work=lambda pixels: pixels)
    table = datasets.Dataset.from_dict(columns).with_format("numpy")
    rows = TokenizedRows(table, Counts(rows=4), processing=processing)
    assert [[len(unit["input_ids"]) for unit in largest(rows, size, 99)] for size in (1, 2, 3)] == [
        [1], [9, 1], [9, 1, 5],
    ]  # fmt: skip


def test_packs_with_the_most_tokens_and_pixels_are_tried():
    columns = {"input_ids": [[1], [2, 2], [3] * 9, [4] * 5, [0]], "pixels": [900, 10, 0, 700, 0]}
    columns |= {"images": [["a"], ["b"], [], ["c"], []], "rendered": [""] * 5, "labels": columns["input_ids"]}
    processing: Any = SimpleNamespace(work=lambda pixels: pixels // 100)
    packing = best_fit(np.array([1, 2, 9, 5]), 9)
    rows = TokenizedRows(
        datasets.Dataset.from_dict(columns).with_format("numpy"), Counts(rows=4), packing, processing=processing
    )
    assert rows.work_of_images().tolist() == [0, 7 + 0 + 9, 0]
    assert [unit["images"] for unit in largest(rows, 2, 12)] == [[["a"], ["b"], ["c"]], [[]]]
    streamed = largest(dataclasses.replace(rows, streamed=True), 2, 12)
    assert [unit["images"] for unit in streamed] == [[["a"], ["b"], ["c"]]] * 2
    assert [unit["lengths"].tolist() for unit in streamed] == [[1, 2, 9]] * 2
    assert [len(unit["labels"]) for unit in streamed] == [12, 12]


@pytest.mark.parametrize(
    ("packed", "size", "supervised"),
    # Rows of 4, 3 and 2 tokens with 0, 3 and 2 supervised ones; two packs, the first row alone and the others together.
    [(False, 1, 3), (False, 2, 5), (False, 3, 5), (True, 1, 5), (True, 2, 5)],
)
def test_as_many_tokens_are_supervised_as_in_any_rows(packed: bool, size: int, supervised: int) -> None:
    ids, labels = [[1, 2, 3, 4], [5, 6, 7], [8, 9], [0]], [[-100] * 4, [5, 6, 7], [8, 9], [-100]]
    columns = {"input_ids": ids, "labels": labels, "supervised": [0, 3, 2, 0]}
    table = datasets.Dataset.from_dict(columns).with_format("numpy")
    rows = TokenizedRows(table, Counts(rows=3), best_fit(np.array([4, 3, 2]), 5) if packed else None)
    examples = worst_micro_batch(rows, size, 5)
    assert sum(int((example["labels"] != -100).sum()) for example in examples) == supervised


def test_the_last_tokens_are_supervised_first() -> None:
    example = {"input_ids": np.arange(1, 5), "labels": np.array([-100, -100, 3, -100])}
    assert [row["labels"].tolist() for row in supervise([example] * 2, 4)] == [[-100, 2, 3, 4], [-100, -100, 3, -100]]
    assert example["labels"].tolist() == [-100, -100, 3, -100]
