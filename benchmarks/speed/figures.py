"""Compute speeds from what a run logged. Pure arithmetic.

An interval is (tokens without padding over all GPUs, seconds, steps).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

Interval = Sequence[float]
FIRST_STEP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) .*: step 1 \{", re.MULTILINE)


def kit_intervals(history: Iterable[Mapping[str, Any]], warm: int) -> list[Interval]:
    """Return the intervals between the log lines of train_ddp.py, without the first `warm` lines."""
    lines = [entry for entry in history if "tokens_per_second" in entry and "loss" in entry]
    intervals, tokens, steps = [], 0.0, 0
    for entry in lines:
        counted = entry["num_tokens"] - tokens
        intervals.append((counted, counted / entry["tokens_per_second"], entry["step"] - steps))
        tokens, steps = entry["num_tokens"], entry["step"]
    return intervals[warm:]


def first_step_at(log: str) -> float | None:
    """Return the time (seconds since the epoch) at which train_ddp.py's log reports step 1."""
    match = FIRST_STEP.search(log)
    return datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp() if match else None


def figures(intervals: Sequence[Interval], processes: int) -> dict[str, float]:
    """Return median, lowest and highest speed of a GPU, and tokens a step; an empty dict without intervals."""
    if not intervals:
        return {}
    speeds = [tokens / seconds / processes for tokens, seconds, _ in intervals]
    steps = sum(interval[2] for interval in intervals)
    return {
        "tokens_per_second_a_gpu": statistics.median(speeds),
        "lowest": min(speeds),
        "highest": max(speeds),
        "intervals_counted": len(speeds),
        "seconds_counted": sum(interval[1] for interval in intervals),
        "tokens_a_step": sum(interval[0] for interval in intervals) / steps,
    }


def work_done(flops_a_token: float, head_flops_a_token: float, head_share: float) -> float:
    """Return the model work of a token when the output head computes only a share of the tokens."""
    return flops_a_token - (1 - head_share) * head_flops_a_token


def used_share(tokens_per_second: float, flops_a_token: float, flops_a_second: float) -> float:
    """Return MFU: model work a second over the GPU's peak rate."""
    return tokens_per_second * flops_a_token / flops_a_second
