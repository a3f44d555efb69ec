"""The batch plan, whatever its numbers: every row once an epoch, as many a rank, and the same rest after a resume."""

from __future__ import annotations

from itertools import islice

from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from tests.fuzz import few, result_or_sentence
from unsloth_ddp.data.order.batch_plan import BatchPlan, RowOrder, plan_batch

NUMBERS = st.integers(1, 12)
PLANS = st.builds(BatchPlan, NUMBERS, st.integers(1, 4), st.integers(1, 6))


def deal(plan: BatchPlan, rows: int, seed: int, epoch: int, done: int) -> list[list[list[int]]]:
    """Return the rows that are left of an epoch after `done` steps, by step and rank, as accelerate deals them."""
    order = RowOrder(rows, plan.per_device * plan.processes, seed)
    order.set_epoch(epoch)
    ranks = []
    for rank in range(plan.processes):
        shard = BatchSamplerShard(BatchSampler(order, plan.per_device, drop_last=False), plan.processes, rank)
        ranks.append(iter(SkipBatchSampler(shard, skip_batches=done * plan.accumulation)))
    steps = []
    while step := [[row for batch in islice(rank, plan.accumulation) for row in batch] for rank in ranks]:
        if not any(step):
            break
        steps.append(step)
    return steps


@few
@given(PLANS, st.integers(1, 80), st.integers(0, 2**32 - 1), st.integers(0, 3), st.data())
def test_a_run_resumed_at_any_step_sees_the_rest_that_it_would_have_seen(
    plan: BatchPlan, rows: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    whole = deal(plan, rows, seed, epoch, 0)
    done = data.draw(st.integers(0, len(whole)), label="done")
    assert deal(plan, rows, seed, epoch, done) == whole[done:]
    # With other processes and the same global batch, a step holds the same rows.
    sizes = [n for n in range(1, plan.global_batch + 1) if plan.global_batch % n == 0]
    processes = data.draw(st.sampled_from(sizes), label="processes")
    share = plan.global_batch // processes
    per_device = data.draw(st.sampled_from([n for n in sizes if share % n == 0]), label="per_device")
    other = BatchPlan(per_device, share // per_device, processes)
    assert [rows_of(step, rows) for step in deal(other, rows, seed, epoch, done)] == [
        rows_of(step, rows) for step in whole[done:]
    ]


def rows_of(step: list[list[int]], rows: int) -> list[int]:
    """The rows of a step over all ranks, without fillers."""
    return sorted(row for share in step for row in share if row != rows)


HUGE = st.integers(1, 10**5) | st.integers(1, 2**62)


@few
@given(HUGE, st.integers(1, 2**20), st.none() | HUGE, st.none() | HUGE)
def test_any_numbers_are_a_plan_or_one_sentence(
    per_device: int, processes: int, global_batch: int | None, accumulation: int | None
) -> None:
    plan = result_or_sentence(lambda: plan_batch(per_device, processes, global_batch, accumulation))
    if plan is not None:
        assert plan.accumulation >= 1
        assert global_batch in (None, plan.global_batch)
        assert accumulation in (None, plan.accumulation)


@few
@given(PLANS, st.integers(1, 10**12), st.floats(1e-9, 1e6), st.just(-1) | st.integers(1, 2**62))
def test_any_run_has_a_whole_number_of_steps_above_zero(plan: BatchPlan, rows: int, epochs: float, most: int) -> None:
    steps = plan.steps(rows, epochs, most)
    assert type(steps) is int and steps >= 1
    assert most == -1 or steps == most
