"""Micro-batches of packs in one shape: nothing of the rows is lost, and what is added does not count."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.data.order.collate import Collate, Flatten, PadRight
from unsloth_ddp.data.order.fixed_shape import TILE, FixedShape, head_size, smaller_sizes

SHAPE = FixedShape.that_holds(tokens=300, rows=12, longest=100)


def rows_of(lengths: list[int], share: float = 0.3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    ids = random.integers(3, 64, sum(lengths))
    labels = np.where(random.random(len(ids)) < share, ids, IGNORED)
    # A row's first token is predicted by none.
    labels[np.cumsum([0, *lengths[:-1]])] = IGNORED
    return ids, labels, np.array(lengths)


def pack_of(lengths: list[int]) -> dict[str, np.ndarray]:
    """Rows of these lengths, as a data set gives them packed."""
    return dict(zip(("input_ids", "labels", "lengths"), rows_of(lengths), strict=True))


@pytest.mark.parametrize("lengths", [[100, 100, 100], [7], [1, 1], [40, 60, 3, 1, 90]])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_rows_keep_their_tokens_positions_and_labels(lengths: list[int], share: float) -> None:
    ids, labels, array = rows_of(lengths, share)
    padded_batch = SHAPE.pad(ids, labels, array)
    assert padded_batch is not None
    step = SHAPE.parts(padded_batch)
    total, ends = sum(lengths), np.cumsum(lengths)
    assert step.input_ids.shape == step.position_ids.shape == (1, SHAPE.tokens) and SHAPE.tokens % TILE == 0
    assert step.input_ids[0, :total].tolist() == ids.tolist()
    boundaries = step.boundaries.tolist()
    assert len(boundaries) == padded_batch.rows + 1 and boundaries[: len(lengths) + 1] == [0, *ends.tolist()]
    assert boundaries == sorted(boundaries) and boundaries[-1] == SHAPE.tokens
    assert max(np.diff(boundaries)) <= SHAPE.longest
    # A position restarts exactly at a boundary.
    starts = torch.nonzero(step.position_ids[0] == 0).flatten().tolist()
    assert starts == sorted(set(boundaries[:-1]) - {SHAPE.tokens})
    positions = np.concatenate([np.arange(length) for length in lengths])
    assert step.position_ids[0, :total].tolist() == positions.tolist()
    pairs = [
        (at, label)
        for at, label in zip(step.head_positions.tolist(), step.head_labels.tolist(), strict=True)
        if label != IGNORED
    ]
    assert pairs == [(at, int(labels[at + 1])) for at in range(total - 1) if labels[at + 1] != IGNORED]
    assert int(step.supervised) == len(pairs)
    assert int(step.tokens) == sum(length for length in lengths if length > 1)


@pytest.mark.parametrize("lengths", [[100, 90, 1], [7], [128, 128, 128]])
def test_single_rows_are_sequences_of_their_own(lengths: list[int]) -> None:
    shape = FixedShape.of_single_rows(3, 100)
    assert (shape.tokens, shape.longest) == (3 * TILE, TILE)
    ids, labels, array = rows_of(lengths)
    padded_batch = shape.pad(ids, labels, array)
    assert padded_batch is not None
    step = shape.parts(padded_batch)
    assert step.input_ids.shape == (3, TILE)
    first, wanted = 0, []
    for sequence, length in enumerate(lengths):
        own, own_labels = (one[first : first + length].tolist() for one in (ids, labels))
        assert step.input_ids[sequence].tolist() == own + [0] * (TILE - length)
        wanted += [(sequence * TILE + at - 1, label) for at, label in enumerate(own_labels) if label != IGNORED]
        first += length
    assert step.position_ids.tolist() == [[min(at, max(lengths) - 1) for at in range(TILE)]] * 3
    found = zip(step.head_positions.tolist(), step.head_labels.tolist(), strict=True)
    assert [pair for pair in found if pair[1] != IGNORED] == wanted
    assert int(step.supervised) == len(wanted)
    assert int(step.tokens) == sum(length for length in lengths if length > 1)


@pytest.mark.parametrize("shape", [SHAPE, FixedShape.of_single_rows(3, 100)])
def test_fill_has_no_position_that_no_row_has(shape: FixedShape) -> None:
    """Models with a table of positions have no others."""
    for lengths, last in (([90, 60], 89), ([1, 1], 1)):
        padded_batch = shape.pad(*rows_of(lengths))
        assert padded_batch is not None
        assert int(shape.parts(padded_batch).position_ids.max()) == last


@pytest.mark.parametrize(
    ("lengths", "tokens"), [([20, 30], 128), ([100, 28], 128), ([100, 29], 384), ([100, 100, 100], 384)]
)
def test_a_micro_batch_is_padded_to_the_smallest_size_that_holds_it(lengths: list[int], tokens: int) -> None:
    shape = dataclasses.replace(SHAPE, smaller=(128,))
    ids, labels, array = rows_of(lengths)
    padded_batch = shape.pad(ids, labels, array)
    assert padded_batch is not None and padded_batch.tokens == padded_batch.sizes[0] == tokens
    assert shape.padded(array[None]).tolist() == [tokens]
    step = shape.parts(padded_batch)
    assert step.input_ids.shape == (1, tokens) and step.input_ids[0, : len(ids)].tolist() == ids.tolist()
    assert step.boundaries.max() == tokens and int(step.supervised) == int((labels != IGNORED).sum())
    whole = shape.pad(ids, labels, array, at_least=384)
    assert whole is not None and whole.tokens == 384


def test_the_head_is_computed_for_a_part_of_the_padded_tokens() -> None:
    shape = dataclasses.replace(FixedShape.that_holds(tokens=8192, rows=8, longest=8192), smaller=(2048,))
    lengths = ([900], [3000])
    found = [shape.pad(*rows_of(of, share=0.1)) for of in lengths]
    # One sixteenth of 2048 tokens, and of 8192.
    assert [one and (one.tokens, one.head) for one in found] == [(2048, 128), (8192, 512)]


def test_single_rows_are_padded_to_the_smallest_length_that_holds_the_longest() -> None:
    shape = dataclasses.replace(FixedShape.of_single_rows(2, 300), smaller=(256, 512))
    found = [shape.pad(*rows_of(lengths)) for lengths in ([100, 90], [100, 129], [300, 1], [385, 1])]
    assert [one and shape.parts(one).input_ids.shape for one in found] == [(2, 128), (2, 256), (2, 384), None]


def test_smaller_sizes_are_chosen_where_they_save_much() -> None:
    full = np.full(100, 8192)
    assert smaller_sizes(full, 8192, 10**6) == ()
    # Nine of ten micro-batches take 2048 tokens.
    most = np.repeat([2048, 8192], [90, 10])
    assert smaller_sizes(most, 8192, 10**6) == (2048,)
    assert smaller_sizes(most, 8192, 80) == ()
    three = np.repeat([1024, 4096, 8192], [40, 40, 20])
    assert smaller_sizes(three, 8192, 10**6) == (1024, 4096)
    # A third one would be compiled as well, though it would save more than a tenth.
    four = np.repeat([1024, 4096, 8192, 16384], [40, 20, 20, 20])
    assert smaller_sizes(four, 16384, 10**6) == (1024, 8192)
    # A second size would save less than a tenth.
    assert smaller_sizes(np.repeat([1024, 1152, 8192], [40, 40, 20]), 8192, 10**6) == (1152,)


def test_sizes_of_many_different_micro_batches_save_about_what_the_best_would() -> None:
    needed = 128 * np.random.default_rng(0).integers(8, 512, 4096)
    sizes = (*smaller_sizes(needed, 65536, 10**6), 65536)
    assert len(sizes) == 3
    array = np.array(sizes)
    # Three sizes for evenly spread numbers: one sixth is padding at best.
    assert array[np.searchsorted(array, needed)].mean() < 1.38 * needed.mean()


def test_more_or_longer_single_rows_than_the_shape_has_are_not_padded() -> None:
    shape = FixedShape.of_single_rows(3, 100)
    for lengths in ([5] * 4, [129]):
        assert shape.pad(*rows_of(lengths)) is None


def test_a_micro_batch_that_is_larger_than_the_shape_is_not_padded() -> None:
    for lengths in ([101], [100, 100, 100, 100], [2] * 20):
        assert SHAPE.pad(*rows_of(lengths)) is None


def test_there_are_few_sizes() -> None:
    heads = {count: head_size(count, SHAPE.tokens) for count in range(SHAPE.tokens + 1)}
    assert all(size >= count and size % TILE == 0 for count, size in heads.items()) and len(set(heads.values())) <= 8
    many = FixedShape.that_holds(tokens=8192, rows=1000, longest=2048)
    rows = {count: many.row_size(count) for count in range(1, many.rows + 1)}
    assert all(size >= count for count, size in rows.items()) and len(set(rows.values())) <= 8


def test_a_padded_micro_batch_moves_with_its_sizes() -> None:
    padded_batch = SHAPE.pad(*rows_of([40, 20]))
    assert padded_batch is not None
    moved = padded_batch.to("meta")
    assert moved.sizes == padded_batch.sizes and moved.vector.is_meta


def test_batches_carry_the_vector_only_where_they_fit() -> None:
    pack = pack_of([40, 20])
    collate = Collate(PadRight(0), Flatten("positions"))
    assert "padded_batch" not in collate([pack])
    collate.pad_to_shape(SHAPE)
    batch = collate([pack, pack])
    assert int(SHAPE.parts(batch["padded_batch"]).tokens) == 120
    assert "padded_batch" not in collate([pack] * 7)
    del pack["lengths"]
    assert "padded_batch" not in collate([pack])
