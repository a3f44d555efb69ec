"""Put the measured speed of several GPUs beside a published table and the efficiency that the plan gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.models import SHAPES
from unsloth_ddp.plan.network import Links, StepWork, scaling_efficiency

# Speed of several GPUs over one, as the multi-node guide publishes it (2 A100s a node; see docs/plan.md).
GUIDE = {2: 1.9, 4: 3.5, 8: 6.4}
# Bytes a second from a GPU to the others of its machine, as preflight measured them between two H200s
# (benchmarks/results/scaling/preflight_gpu.json).
NVLINK = 330e9
LORA_RANK = 16
# Two of the three products of a step are in the backward pass; with LoRA a little less than two.
BACKWARD_SHARE = {"lora": 0.5, "qlora": 0.5, "full": 2 / 3}


def gradient_bytes(shape: str, method: str) -> float | None:
    """Return the bytes that the GPUs average in a step, in fp32; None for a shape that is not known."""
    if shape not in SHAPES:
        return None
    hidden, layers, heads, kv_heads, intermediate, vocabulary = SHAPES[shape]
    queries, keys = heads * 128, kv_heads * 128
    matrices = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    matrices += [(hidden, intermediate), (hidden, intermediate), (intermediate, hidden)]
    if method == "full":
        return 4.0 * (layers * sum(a * b for a, b in matrices) + hidden * vocabulary)
    return 4.0 * layers * LORA_RANK * sum(a + b for a, b in matrices)


def planned_efficiency(cell: Mapping[str, Any], single_speed: float) -> float | None:
    """Return the plan's efficiency of a run on several GPUs of one machine, rows dealt evenly; None without its sizes.

    Args:
        cell: result of the run.
        single_speed: tokens a second of one GPU alone.
    """
    gradients = gradient_bytes(cell["shape"], cell["method"])
    accumulation = cell.get("settings", {}).get("gradient_accumulation_steps")
    if gradients is None or not accumulation:
        return None
    processes = cell["processes"]
    seconds = cell["tokens_a_step"] / processes / single_speed
    step = StepWork(seconds, accumulation, BACKWARD_SHARE[cell["method"]], gradients)
    return scaling_efficiency(step, 1, processes, Links(network=NVLINK, inside=NVLINK))


def scaling_rows(cells: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a row for each run on several GPUs whose contestant also ran on one, fewest GPUs first."""
    done = [one for one in cells if one["exit_code"] == 0]
    single: dict[tuple[str, ...], list[float]] = {}
    for one in done:
        if one["processes"] == 1:
            single.setdefault(_kind(one), []).append(one["tokens_per_second_a_gpu"])
    rows = []
    for one in sorted(done, key=lambda one: (_kind(one), one["scaling"], one["processes"])):
        count = one["processes"]
        if count == 1 or _kind(one) not in single:
            continue
        alone = sorted(single[_kind(one)])[len(single[_kind(one)]) // 2]
        measured = one["tokens_per_second_a_gpu"] / alone
        planned = planned_efficiency(one, alone)
        published = GUIDE.get(count)
        rows.append(
            [
                f"{one['work']} {one['shape']} {one['method']}",
                str(count),
                one["scaling"],
                f"{count * measured:.2f}x",
                f"{measured:.1%}",
                f"{published}x ({published / count:.0%})" if published else "-",
                f"{planned:.1%} ({planned - measured:+.1%})" if planned else "-",
            ]
        )
    return rows


SCALING_HEAD = ["work", "GPUs", "scaling", "speed over one GPU", "efficiency", "published", "planned (error)"]


def _kind(cell: Mapping[str, Any]) -> tuple[str, ...]:
    return cell["work"], cell["shape"], cell["method"], cell["contestant"]
