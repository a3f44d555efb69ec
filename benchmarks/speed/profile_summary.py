"""Summarize a profiler's events: how busy the GPU was, which kernels took longest, and what waited. Pure functions.

Events are those of torch.profiler's Chrome trace: dicts with cat, name, ts, dur (microseconds), pid and tid.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

Event = dict[str, Any]

ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
# What keeps a thread of the CPU until the GPU, or a copy, is done; and the operation that reads one number of a tensor.
WAITS = (
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy", "aten::_local_scalar_dense",
)  # fmt: skip
TOP = 25
FRAMES = 10
SHORT = 160
ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def busy_seconds(events: Iterable[Event]) -> float:
    """Return the seconds in which at least one of these events was active."""
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in events)
    total, end = 0.0, float("-inf")
    for began, ended in spans:
        total += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return total / 1e6


def gpu_summary(events: Sequence[Event], seconds: float, steps: int) -> dict[str, Any]:
    """Return the share of time in which the GPU was busy, and the kernels that took most of it."""
    on_gpu = [event for event in events if event.get("cat") in ON_GPU]
    spent, count = Counter[str](), Counter[str]()
    for event in on_gpu:
        spent[event["name"]] += event["dur"]
        count[event["name"]] += 1
    whole = sum(spent.values()) or 1
    return {
        "busy": busy_seconds(on_gpu) / seconds,
        "kernels_a_step": len(on_gpu) / steps,
        "top": [
            {
                "name": name[:SHORT],
                "share": spent[name] / whole,
                "count_a_step": count[name] / steps,
                "milliseconds_a_step": spent[name] / 1000 / steps,
            }
            for name, _ in spent.most_common(TOP)
        ],
    }


def operator_summary(averages: Iterable[tuple[str, int, float]], steps: int) -> list[dict[str, Any]]:
    """Return the operations that kept the CPU longest, from (name, count, own seconds)."""
    longest = sorted(averages, key=lambda average: average[2], reverse=True)[:TOP]
    return [
        {"name": name[:SHORT], "count_a_step": count / steps, "milliseconds_a_step": 1000 * seconds / steps}
        for name, count, seconds in longest
    ]


def waits(events: Sequence[Event], steps: int) -> list[dict[str, Any]]:
    """Return every place that waits, how often a step, and its innermost Python frames, outermost first."""
    waits = [event for event in events if event.get("cat") in ("cuda_runtime", "cpu_op") and event["name"] in WAITS]
    stacks = _stacks(events, waits)
    counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for event, stack in zip(waits, stacks, strict=True):
        counts[event["name"], stack] += 1
    return [
        {"name": name, "count_a_step": count / steps, "stack": list(stack)}
        for (name, stack), count in counts.most_common()
    ]


def _stacks(events: Sequence[Event], waits: Sequence[Event]) -> list[tuple[str, ...]]:
    """Return the Python frames around each event on its thread, outermost first, at most the innermost FRAMES."""
    by_thread: dict[Any, list[tuple[float, int, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "python_function" and "dur" in event:
            # A frame that begins with an event is around it.
            by_thread[event["tid"]].append((event["ts"], 0, event))
    for index, event in enumerate(waits):
        by_thread[event["tid"]].append((event["ts"], 1, index))
    stacks: list[tuple[str, ...]] = [()] * len(waits)
    for moments in by_thread.values():
        moments.sort(key=lambda moment: (moment[0], moment[1], -moment[2]["dur"] if moment[1] == 0 else 0))
        active: list[Event] = []
        for now, kind, what in moments:
            while active and active[-1]["ts"] + active[-1]["dur"] < now:
                active.pop()
            if kind == 0:
                active.append(what)
            else:
                stacks[what] = tuple(ADDRESS.sub("", frame["name"])[:SHORT] for frame in active[-FRAMES:])
    return stacks
