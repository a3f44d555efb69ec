"""The batch plan and the row order, dealt to processes by the class that accelerate deals them with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from unsloth_ddp.data.order.batch_plan import (
    BalancedOrder,
    BatchPlan,
    RowOrder,
    arrange,
    check_layouts,
    nearest_multiple,
    plan_batch,
    rows_at_once,
)
from unsloth_ddp.utils.errors import UserError

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


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 13, 64, 101])
def test_every_layout_of_a_global_batch_sees_the_same_rows_in_the_same_steps(rows: int, balanced: bool) -> None:
    tokens = np.append(np.random.default_rng(1).integers(1, 300, rows), 1)
    seen = set()
    for per_device, accumulation, processes in LAYOUTS:
        plan = BatchPlan(per_device, accumulation, processes)
        plain = RowOrder(rows, per_device * processes, seed=3)
        steps = deal(BalancedOrder(plan, tokens, seed=3, padded=True) if balanced else plain, plan)
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
    assert len(dealt) == plan.steps_per_epoch(rows)
    assert sorted(row for step in dealt for row in step) == sorted(indices)
    for number, step in enumerate(dealt):
        assert sorted(step) == sorted(indices[number * plan.global_batch : (number + 1) * plan.global_batch])


@given(st.integers(1, 10_000), st.integers(1, 100_000), st.integers(1, 64))
def test_evaluation_batches_are_as_few_as_asked_and_filled_up_by_less_than_a_row_each(
    rows: int, most: int, processes: int
) -> None:
    at_once = rows_at_once(rows, most, processes)
    batches = -(-rows // (most * processes))
    assert 1 <= at_once <= most
    # Fewer rows would not do.
    assert (at_once - 1) * batches * processes < rows <= at_once * batches * processes


def test_without_evaluation_rows_the_batch_is_the_one_asked_for() -> None:
    assert rows_at_once(0, 8, 2) == 8


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


LENGTHS = st.lists(st.integers(1, 2048), min_size=1, max_size=150)


def micro_batches(step: list[int], plan: BatchPlan) -> np.ndarray:
    """Rows of each micro-batch, int (accumulation positions, processes, per device), as they are dealt."""
    return np.asarray(step).reshape(-1, plan.processes, plan.per_device)


@given(LENGTHS, SMALL, st.integers(1, 5), st.integers(1, 5), st.integers(0, 3), st.booleans(), st.integers(0, 500))
def test_arranged_steps_hold_the_same_rows_with_less_padding_and_even_ranks(
    lengths: list[int], per_device: int, processes: int, accumulation: int, epoch: int, padded: bool, most: int
) -> None:
    plan = BatchPlan(per_device, accumulation, processes)
    tokens = np.array([*lengths, 1])
    plain = RowOrder(len(lengths), per_device * processes, seed=7)
    # The work of images; without one, 0.
    beside = np.random.default_rng(most).integers(0, most + 1, len(tokens))
    order = BalancedOrder(plan, tokens, seed=7, padded=padded, beside=beside if most else None)
    plain.set_epoch(epoch)
    order.set_epoch(epoch)
    before, after = list(plain), list(order)
    assert after == list(order)
    assert len(after) == len(order) == len(before)
    for start in range(0, len(before), plan.global_batch):
        old, new = (indices[start : start + plan.global_batch] for indices in (before, after))
        assert sorted(old) == sorted(new)
        widths = [tokens[micro_batches(step, plan)].max(axis=2) for step in (old, new)]
        assert widths[1].sum() <= widths[0].sum()
        dealt = tokens[micro_batches(new, plan)]
        costs = (per_device * dealt.max(axis=2) if padded else dealt.sum(axis=2)) + beside[
            micro_batches(new, plan)
        ].sum(axis=2)
        most_within_a_position = (costs.max(axis=1) - costs.min(axis=1)).max()
        totals = costs.sum(axis=0)
        assert totals.max() - totals.min() <= most_within_a_position


def test_ranks_of_a_step_differ_by_little_on_chat_rows() -> None:
    rng = np.random.default_rng(0)
    tokens = np.append(np.clip(rng.lognormal(5.4, 0.8, 4096).astype(np.int64), 1, 2048), 1)
    plan = BatchPlan(per_device=1, accumulation=4, processes=4)

    def spread(order: RowOrder) -> float:
        loads = tokens[np.fromiter(order, dtype=np.int64).reshape(-1, 4, 4)].sum(axis=1)
        return float((loads.max(axis=1) / loads.mean(axis=1)).mean())

    # The slowest rank waits for nobody: how much more than the mean it has to do.
    assert spread(RowOrder(4096, 4, seed=0)) > 1.4
    assert spread(BalancedOrder(plan, tokens, seed=0, padded=True)) < 1.25


def test_ranks_of_a_step_share_the_work_of_images_too() -> None:
    rng = np.random.default_rng(0)
    # Alike in tokens, as images are merged to few of them; every fourth row has images, which cost more than its text.
    tokens = np.append(rng.integers(100, 140, 4096), 1)
    beside = np.append(np.where(rng.random(4096) < 0.25, rng.integers(100, 2000, 4096), 0), 0)
    plan = BatchPlan(per_device=2, accumulation=4, processes=4)

    def spread(order: RowOrder) -> float:
        dealt = np.fromiter(order, dtype=np.int64).reshape(-1, 4, 4, 2)
        loads = (2 * tokens[dealt].max(axis=3) + beside[dealt].sum(axis=3)).sum(axis=1)
        return float((loads.max(axis=1) / loads.mean(axis=1)).mean())

    assert spread(BalancedOrder(plan, tokens, seed=0, padded=True)) > 1.4
    assert spread(BalancedOrder(plan, tokens, seed=0, padded=True, beside=beside)) < 1.15


def test_rows_of_like_length_share_a_micro_batch() -> None:
    tokens = np.array([10, 90, 11, 91, 50, 51, 12, 92, 1])
    step = arrange(np.arange(8), tokens, BatchPlan(2, 2, 2), padded=True)
    assert sorted(tuple(sorted(tokens[pair])) for pair in step.reshape(-1, 2)) == [
        (10, 11),
        (12, 50),
        (51, 90),
        (91, 92),
    ]
    assert tokens[step.reshape(2, 2, 2)].max(axis=2).sum(axis=0).tolist() == [103, 140]


@pytest.mark.parametrize(
    ("global_batch", "nodes", "says"),
    [
        (12, range(1, 4), None),
        (16, range(1, 3), None),
        (16, range(2, 5), "go on with 3 nodes, but 6 processes cannot share the 16 of a step; give "
            "--global_batch_size 24, which 2 to 4 nodes can share, or --min_nodes 4."),
        # Neither given: the steps of three nodes would be of another size.
        (None, range(1, 4), "go on with 3 nodes, but 6 processes cannot share the 16 of a step; give "
            "--global_batch_size 24, which 1 to 3 nodes can share."),
        (16, range(1, 100_000), "cannot share the 16 of a step; give another number of nodes."),
    ],
)  # fmt: skip
def test_a_job_that_may_lose_nodes_takes_the_same_steps_with_each_number_of_them(global_batch, nodes, says):
    def check() -> None:
        plan = plan_batch(1, 2 * nodes.start, global_batch, None)
        check_layouts(plan, nodes, 2, lambda n: plan_batch(1, n, global_batch, None), "--global_batch_size")

    if says is None:
        check()
        return
    with pytest.raises(UserError) as error:
        check()
    assert says in str(error.value)
