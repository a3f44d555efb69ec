"""Rows read straight from Arrow are those that datasets gives."""

from __future__ import annotations

import datasets
import numpy as np
import pytest

from unsloth_ddp.data.arrow_rows import ArrowRows
from unsloth_ddp.data.dataset import TOKEN_FEATURES


def part(first: int, lengths: list[int]) -> datasets.Dataset:
    ids = [list(range(first + i, first + i + n)) for i, n in enumerate(lengths)]
    columns = {
        "input_ids": ids,
        "labels": [[-100, *row[1:]] for row in ids],
        "overlong": [False] * len(ids),
        "supervised": [0] * len(ids),
    }
    return datasets.Dataset.from_dict(columns, features=TOKEN_FEATURES)


def test_every_row_of_several_chunks_is_found():
    rows = datasets.concatenate_datasets([part(0, [3, 1, 5]), part(100, [2]), part(200, [4, 4])])
    # A slice begins within a chunk.
    for table in (rows, datasets.Dataset(rows.data.slice(1, 4))):
        found, expected = ArrowRows(table), table.with_format("numpy")
        assert len(found) == len(expected)
        for index in range(len(found)):
            for name in ("input_ids", "labels"):
                assert found[index][name].dtype == np.int32
                np.testing.assert_array_equal(found[index][name], expected[index][name])


@pytest.mark.parametrize("index", [6, -1])
def test_there_is_no_other_row(index):
    rows = ArrowRows(datasets.concatenate_datasets([part(0, [3, 1, 5]), part(9, [2, 2, 2])]))
    with pytest.raises(IndexError, match=f"no row {index}, only 6"):
        rows[index]


def test_a_row_cannot_be_changed_by_mistake():
    with pytest.raises(ValueError, match="read-only"):
        ArrowRows(part(0, [3]))[0]["input_ids"][0] = 1
