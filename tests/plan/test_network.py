"""Time on the network as arithmetic, and amounts in units."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.plan.network import (
    Links,
    StepWork,
    all_reduce_seconds,
    balance_efficiency,
    exposed_seconds,
    scaling_efficiency,
)
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.units import parse_bandwidth, parse_memory, shown_bytes, shown_seconds

# ---- units ----


def test_bits_and_bytes_are_told_apart():
    assert parse_bandwidth("--bandwidth", "25Gbps") == 25e9 / 8
    assert parse_bandwidth("--bandwidth", "100 Gbit/s") == 100e9 / 8
    assert parse_bandwidth("--bandwidth", "450GB/s") == 450e9
    assert parse_memory("--gpu_memory", "80GB") == 80e9
    assert parse_memory("--gpu_memory", "139GiB") == 139 * 2**30
    for text in ("25", "0Gbps", "25 G", "1.2.3Gbps", "-1Gbps"):
        with pytest.raises(UserError, match="write 25Gbps"):
            parse_bandwidth("--bandwidth", text)
    with pytest.raises(UserError, match="write 80GB"):
        parse_memory("--gpu_memory", "80")


def test_amounts_are_shown_in_units_of_their_size():
    assert [shown_bytes(b) for b in (0, 1536, 174_587_904, 3 * 2**30, 2**50)] == [
        "0 B", "1.5 KiB", "166.5 MiB", "3.0 GiB", "1,024.0 TiB",
    ]  # fmt: skip
    assert [shown_seconds(s) for s in (0.0, 0.00005, 0.0123, 30.0, 600.0, 36_000.0, 864_000.0)] == [
        "0.0 s", "50 us", "12.3 ms", "30.0 s", "10.0 min", "10.0 h", "10.0 days",
    ]  # fmt: skip


# ---- network ----


def test_a_ring_inside_and_between_nodes():
    assert all_reduce_seconds(1e9, 1, 1, Links(1e9)) == 0
    assert all_reduce_seconds(1e9, 2, 1, Links(1e9)) == 1
    assert all_reduce_seconds(1e9, 4, 8, Links(1e9, 10e9)) == pytest.approx(1.5 + 2 * 7 / 8 / 10)
    assert all_reduce_seconds(1e9, 1, 8, Links(1e9)) == 0


def test_all_but_the_last_bucket_hides_behind_the_backward_pass():
    size = 100 * 2**20
    assert exposed_seconds(size, 4.0, 10.0) == 1.0
    assert exposed_seconds(size, 4.0, 2.0) == 2.0
    assert exposed_seconds(size, 4.0, 0.0) == 4.0
    assert exposed_seconds(2**20, 4.0, 10.0) == 4.0
    assert exposed_seconds(0, 0.0, 1.0) == 0


def efficiency(lengths: list[int], per_device: int, accumulation: int, processes: int, images=None) -> float | None:
    plan = BatchPlan(per_device, accumulation, processes)
    return balance_efficiency(np.array(lengths), plan, np.array(images or [0] * len(lengths)))


def test_uneven_rows_cost_what_the_longest_takes():
    assert efficiency([4, 4, 4, 4], 1, 2, 2) == 1
    # Two processes, one row each a step: 4 and 2, then 1 and 1.
    assert efficiency([4, 2, 1, 1, 9], 1, 1, 2) == pytest.approx((3 + 1) / (4 + 1))
    # Rows of like length share a micro-batch: 4 and 4, then 2 and 3.
    assert efficiency([4, 2, 3, 4], 2, 1, 2) == pytest.approx(3.5 / 4)
    # The process with the most so far gets the cheapest: 4 + 1 and 3 + 2.
    assert efficiency([4, 1, 3, 2], 1, 2, 2) == 1
    # Of many steps every nth is looked at.
    assert efficiency([4, 2] * 100_000, 1, 1, 2) == pytest.approx(3 / 4)
    assert efficiency([4], 1, 1, 2) is None
    # 4 with an image of 6, and 4 and 3 and 3 without.
    assert efficiency([4, 4, 3, 3], 1, 2, 2, [6, 0, 0, 0]) == pytest.approx(10 / 13)


def test_efficiency_falls_with_nodes_and_rises_with_bandwidth_and_work():
    step = StepWork(compute=1.0, accumulation=4, backward_share=0.5, gradients=1e9)
    slow, fast = Links(1e9), Links(100e9)
    assert scaling_efficiency(step, 1, 8, slow) == 1
    assert (
        scaling_efficiency(step, 8, 8, slow)
        < scaling_efficiency(step, 2, 8, slow)
        < scaling_efficiency(step, 2, 8, fast)
        < 1
    )
    assert scaling_efficiency(step, 2, 1, slow) == pytest.approx(1 / (1 + 1 - 0.125))
    assert scaling_efficiency(step, 1, 1, slow, even=0.8) == pytest.approx(0.8)
    assert scaling_efficiency(dataclasses.replace(step, compute=4.0), 2, 8, slow) > scaling_efficiency(step, 2, 8, slow)
