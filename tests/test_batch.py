"""The batch plan and the row order, dealt to processes by the class that accelerate deals them with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from unsloth_ddp.batch import BatchPlan, RowOrder, nearest_multiple, plan_batch
from unsloth_ddp.errors import UserError

SMALL = st.integers(1, 12)


@pytest.mark.parametrize(
    ("per_device", "processes", "global_batch", "accumulation", "expected"),
    [
        (1, 1, None, None, 16),
        (4, 3, None, None, 1),  # neither given: 12 is the nearest to 16 that divides
        (4, 7, None, None, 1),
        (2, 4, 32, None, 4),
        (3, 2, None, 5, 5),
        (2, 2, 16, 4, 4),  # both given, and they agree
        (8, 1, 8, None, 1),
    ],
)
def test_accumulation_follows_from_the_global_batch(
    per_device: int, processes: int, global_batch: int | None, accumulation: int | None, expected: int
) -> None:
    plan = plan_batch(per_device, processes, global_batch, accumulation)
    assert plan == BatchPlan(per_device, expected, processes)
    assert plan.global_batch == per_device * expected * processes


@pytest.mark.parametrize(
    ("per_device", "processes", "global_batch", "nearest"),
    [(2, 3, 16, 18), (3, 1, 16, 15), (1, 8, 1, 8), (4, 1, 6, 8), (5, 2, 24, 20)],
)
def test_a_global_batch_that_does_not_divide_is_refused_with_the_nearest(
    per_device: int, processes: int, global_batch: int | None, nearest: int
) -> None:
    with pytest.raises(UserError, match=f"nearest that does is {nearest}") as refusal:
        plan_batch(per_device, processes, global_batch, None)
    assert f"global_batch_size {global_batch} does not divide" in str(refusal.value)
    assert plan_batch(per_device, processes, nearest, None).global_batch == nearest


def test_a_global_batch_and_an_accumulation_that_disagree_are_refused() -> None:
    with pytest.raises(UserError, match=r"32 and gradient_accumulation_steps 4 disagree: 2 rows .* = 16; give only"):
        plan_batch(2, 2, 32, 4)


@given(SMALL, SMALL, st.integers(1, 500))
def test_a_plan_has_the_global_batch_asked_for_or_is_refused(per_device: int, processes: int, wanted: int) -> None:
    slots = per_device * processes
    nearest = nearest_multiple(wanted, slots)
    assert nearest % slots == 0
    assert all(abs(wanted - nearest) <= abs(wanted - other) for other in range(slots, wanted + slots + 1, slots))
    try:
        assert plan_batch(per_device, processes, wanted, None).global_batch == wanted == nearest
    except UserError:
        assert wanted % slots


@pytest.mark.parametrize(("rows", "epochs", "max_steps", "steps"), [(17, 1, -1, 3), (16, 2, -1, 4), (17, 0.5, -1, 2)])
def test_steps_of_a_run(rows: int, epochs: float, max_steps: int, steps: int) -> None:
    plan = BatchPlan(per_device=2, accumulation=2, processes=2)
    assert plan.steps(rows, epochs, max_steps) == steps
    assert plan.steps(rows, epochs, 7) == 7


def deal(order: RowOrder, plan: BatchPlan) -> list[list[int]]:
    """The rows of each optimizer step, as accelerate deals batches to the processes."""
    per_process = [
        list(BatchSamplerShard(BatchSampler(order, plan.per_device, drop_last=False), plan.processes, rank))
        for rank in range(plan.processes)
    ]
    assert len({len(batches) for batches in per_process}) == 1, "a process would wait for the others for ever"
    streams: list[Iterator[list[int]]] = [iter(batches) for batches in per_process]
    steps = []
    while step := [row for stream in streams for batch in islice(stream, plan.accumulation) for row in batch]:
        steps.append(step)
    return steps


LAYOUTS = [(8, 1, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4), (1, 1, 8)]


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 13, 64, 101])
def test_every_layout_of_a_global_batch_sees_the_same_rows_in_the_same_steps(rows: int) -> None:
    seen = set()
    for per_device, accumulation, processes in LAYOUTS:
        plan = BatchPlan(per_device, accumulation, processes)
        steps = deal(RowOrder(rows, per_device * processes, seed=3), plan)
        assert len(steps) == plan.steps_per_epoch(rows)
        seen.add(tuple(tuple(sorted(row for row in step if row < rows)) for step in steps))
    assert len(seen) == 1
    assert sorted(row for step in seen.pop() for row in step) == list(range(rows))


@given(st.integers(1, 60), SMALL, SMALL, st.integers(1, 4), st.integers(0, 2**32 - 1) | st.none(), st.integers(0, 5))
def test_an_epoch_holds_each_row_once_and_fillers_at_its_end(
    rows: int, per_device: int, processes: int, accumulation: int, seed: int | None, epoch: int
) -> None:
    plan = BatchPlan(per_device, accumulation, processes)
    order = RowOrder(rows, per_device * processes, seed)
    order.set_epoch(epoch)
    indices = list(order)
    assert indices == list(order)
    assert len(indices) == len(order)
    assert sorted(indices[:rows]) == list(range(rows))
    assert indices[rows:] == [rows] * (len(order) - rows)
    assert len(indices) - rows < per_device * processes
    dealt = deal(order, plan)
    assert sorted(row for step in dealt for row in step) == sorted(indices)
    for number, step in enumerate(dealt):
        assert sorted(step) == sorted(indices[number * plan.global_batch : (number + 1) * plan.global_batch])


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_seeds_and_epochs_give_different_orders(seed: int, epoch: int) -> None:
    assume(seed != epoch)
    first, other_seed, other_epoch = RowOrder(200, 1, seed), RowOrder(200, 1, epoch), RowOrder(200, 1, seed)
    other_epoch.set_epoch(epoch + 1)
    assert list(first) != list(other_seed)
    assert list(first) != list(other_epoch)


def test_without_a_seed_the_rows_keep_their_order_in_every_epoch() -> None:
    order = RowOrder(5, 4, None)
    order.set_epoch(3)
    assert list(order) == [0, 1, 2, 3, 4, 5, 5, 5]
