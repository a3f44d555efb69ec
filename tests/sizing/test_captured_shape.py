"""Test what keeps micro-batches from being captured, and the shape that they are padded to."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.fixed_shape import FixedShape
from unsloth_ddp.sizing import graphs
from unsloth_ddp.sizing.graphs import (
    dealt,
    obstacle_on_gpus,
    shape_for,
    shape_of_run,
    too_short_to_compile,
    why_not_captured,
    why_too_short,
)


def packs_of(tokens: list[int], rows_a_pack: int = 1) -> Any:
    """Return packs of so many tokens, and the filler."""
    packing = SimpleNamespace(starts=np.arange(len(tokens) + 1) * rows_a_pack, longest=max(tokens))
    return SimpleNamespace(streamed=False, packing=packing, units=len(tokens), lengths=lambda: np.array([*tokens, 1]))


@pytest.mark.parametrize(
    ("changed", "obstacle"),
    [
        ({}, None),
        ({"packed": False}, "rows are padded, so micro-batches differ in shape"),
        ({"images": True}, "images differ in number and size, and so micro-batches in shape"),
        ({"sharding": "zero2"}, "sharding zero2 reduces gradients during the backward pass"),
        ({"sharding": "fsdp2"}, "sharding fsdp2 gathers weights in every layer"),
        ({"precision": "fp16"}, "precision fp16 is not bf16"),
    ],
)
def test_what_cannot_be_captured_has_a_reason(changed: dict[str, Any], obstacle: str | None) -> None:
    where: dict[str, Any] = {"packed": True, "precision": "bf16", "sharding": "none", "processes": 2}
    assert obstacle_on_gpus(Settings(), **where | changed) == obstacle


def chats(options: dict[str, Any], tokens: int = 2000) -> tuple[Settings, Any, BatchPlan]:
    """Return a run of 400 packs, four of which are a micro-batch and eight a step."""
    settings = Settings(model="m", dataset=["d"], max_length=2048, **options)
    return settings, packs_of([tokens] * 400, 7), BatchPlan(4, 2, 1)


@pytest.mark.parametrize(
    ("options", "streamed", "expected_obstacle"),
    [
        ({"num_train_epochs": 2}, False, None),
        ({"num_train_epochs": 1.9}, False, "a run of 95 micro-batches is too short for compiling to pay"),
        ({"max_steps": 50}, True, None),
        ({"max_steps": 49}, True, "a run of 98 micro-batches is too short for compiling to pay"),
        # A stream that its rows end.
        ({}, True, None),
        ({"cuda_graphs": "on", "max_steps": 1}, False, None),
        ({"cuda_graphs": "off"}, False, "as set"),
        # Unsloth compiles whole layers.
        ({"method": "full"}, False, "micro-batches of 16,000 tokens keep the GPU busy without CUDA graphs"),
        ({"method": "full"}, True, None),
        ({"method": "full", "per_device_train_batch_size": 4}, False, None),
    ],
)
def test_long_runs_with_small_micro_batches_try_to_capture(
    options: dict[str, Any], streamed: bool, expected_obstacle: str | None
) -> None:
    settings, train, plan = chats(options)
    train.streamed = streamed
    if "per_device_train_batch_size" not in options:
        settings = dataclasses.replace(settings, per_device_train_batch_size="auto")
    assert why_not_captured(settings, None, train, plan) == expected_obstacle
    obstacle = "rows are padded"
    assert why_not_captured(settings, obstacle, train, plan) == (
        "as set" if expected_obstacle == "as set" else obstacle
    )


@pytest.mark.parametrize(
    ("seconds", "passes", "short"), [(0.1, 1200, False), (0.1, 1190, True), (1e-3, math.inf, False)]
)
def test_a_run_of_two_minutes_compiles(seconds: float, passes: float, short: bool) -> None:
    too_short = "the run takes about 119 s without them, too short for compiling to pay"
    assert why_too_short(seconds, passes) == (too_short if short else None)


@pytest.mark.parametrize(("steps", "short"), [(49, True), (50, False), (-1, True)])
def test_layers_of_the_backend_are_compiled_for_100_micro_batches(steps: int, short: bool) -> None:
    settings, train, plan = chats({"max_steps": steps, "num_train_epochs": 0.5})
    assert too_short_to_compile(settings, train, plan) is short
    train.streamed = True
    assert too_short_to_compile(settings, train, plan) is (short and steps > 0)


@pytest.mark.parametrize(("epochs", "smaller"), [(3, False), (1000, True)])
def test_further_numbers_of_tokens_are_captured_where_the_run_pays_for_them(epochs: int, smaller: bool) -> None:
    settings = Settings(model="m", dataset=["d"], max_length=2048, num_train_epochs=epochs)
    shape = shape_of_run(settings, packs_of([1000] * 60 + [2048] * 4), BatchPlan(16, 1, 1))
    assert bool(shape.smaller) is smaller


def test_chats_of_a_small_global_batch_are_not_padded_to_the_longest_packs() -> None:
    rng = np.random.default_rng(0)
    packs = [*rng.integers(400, 700, 950).tolist(), *rng.integers(1000, 2049, 50).tolist()]
    train = packs_of(packs, 2)
    plan = BatchPlan(4, 2, 1)
    settings = Settings(model="m", dataset=["d"], max_length=2048, num_train_epochs=10)
    shape = shape_of_run(settings, train, plan)
    micro_batches = dealt(train, plan)
    assert micro_batches.shape == (250, 4) and micro_batches.sum() == sum(packs)
    assert shape.tokens > 8000 and len(shape.smaller) == 2
    assert shape.padded(micro_batches).mean() < 1.3 * micro_batches.sum(axis=1).mean()


def test_a_sample_stands_for_many_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "SAMPLED_PACKS", 64)
    micro_batches = dealt(packs_of([100] * 1000), BatchPlan(4, 2, 2))
    assert micro_batches.shape == (16, 4) and (micro_batches == 100).all()


def test_the_sample_has_packs_of_all_lengths_and_the_filler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "SAMPLED_PACKS", 6)
    packs = packs_of([*[2000] * 500, *[100] * 500])
    micro_batches = dealt(packs, BatchPlan(4, 1, 1))
    assert micro_batches.shape == (2, 4) and sorted(micro_batches.ravel())[:2] == [1, 1]
    assert set(micro_batches.ravel()) == {1, 100, 2000}


def test_a_shape_has_room_for_the_packs_with_most_and_with_the_longest_rows() -> None:
    packing = SimpleNamespace(starts=np.array([0, 5, 6, 8]), longest=300)
    train: Any = SimpleNamespace(streamed=False, packing=packing, lengths=lambda: np.array([300, 200, 100, 1]))
    # 500 tokens in 7 rows; the rest of 512 is filled with one more.
    assert shape_for(train, 2, 512) == FixedShape(512, 8, 512)
    assert shape_for(train, 2, 256) == FixedShape(512, 9, 300)


def test_the_shape_of_streamed_rows_has_room_for_short_rows() -> None:
    train: Any = SimpleNamespace(streamed=True, packing=SimpleNamespace(starts=np.array([0, 1])))
    # A row has 16 tokens or more on average, and two more rows fill what is left.
    assert shape_for(train, 2, 512) == FixedShape(1024, 1024 // 16 + 2, 512)


def test_single_rows_are_no_sequences_where_one_is_far_longer_than_all() -> None:
    # 8 times the longest would be 16,384 tokens, where the memory search tried 4,148.
    shape = shape_for(packs_of([2048, *[300] * 50]), 8, 2048)
    assert (shape.sequences, shape.tokens, shape.longest) == (0, 4224, 2048)
    shape = shape_for(packs_of([2048, *[1900] * 50]), 8, 2048)
    assert (shape.sequences, shape.tokens, shape.longest) == (8, 16384, 2048)


@pytest.mark.parametrize(("starts", "sequences"), [([0, 1, 2, 3], 2), ([0, 1, 3, 4], 0)])
def test_packs_of_one_row_each_are_sequences(starts: list[int], sequences: int) -> None:
    packing: Any = SimpleNamespace(starts=np.array(starts), longest=250)
    train: Any = SimpleNamespace(streamed=False, packing=packing, lengths=lambda: np.array([250, 240, 130, 1]))
    shape = shape_for(train, 2, 512)
    assert shape.sequences == sequences
    # Two rows of up to 256 tokens; or packs of 490 tokens, as one sequence.
    assert (shape.tokens, shape.longest) == (512, 256 if sequences else 512)
