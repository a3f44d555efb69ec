"""Write docs/what-fits.md: which models train on how many GPUs of which memory, as the kit's plan computes it.

    uv run python -m benchmarks.memory.what_fits            # print the tables
    uv run python -m benchmarks.memory.what_fits --write    # replace those in docs/what-fits.md

Needs no GPU and no network: the shapes are those of the models' published config.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from collections.abc import Sequence
from typing import get_args

import numpy as np

from benchmarks.common.models import make_config
from benchmarks.common.runs import REPO
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.packing import best_fit
from unsloth_ddp.distributed.sharding import Sharding
from unsloth_ddp.plan.compute import MemoryRow, make_memory_row
from unsloth_ddp.sizing.choose import make_workload
from unsloth_ddp.sizing.count import read_model_shape
from unsloth_ddp.sizing.estimate import Method, is_supported
from unsloth_ddp.sizing.micro_batch import RowLengths
from unsloth_ddp.sizing.shape import ModelShape
from unsloth_ddp.utils.units import GIB

PAGE = REPO / "docs" / "what-fits.md"
BEGIN, END = "<!-- written by benchmarks/memory/what_fits.py -->", "<!-- end -->"
RESULTS = REPO / "benchmarks" / "results" / "memory"

MODELS = {"1.7B": "qwen3_1.7b", "8B": "qwen3_8b", "14B": "qwen3_14b", "32B": "qwen3_32b", "72B": "qwen25_72b",
          "30B-A3B": "qwen3_30b_a3b"}  # fmt: skip
GPU_GB = (24, 48, 80, 141)
COUNTS = (1, 2, 4, 8, 16)
TOKENS, ACCUMULATION = 2048, 2
METHODS = {"lora": "LoRA r16", "qlora": "QLoRA r16", "full": "every parameter"}
NAMES = {"none": "DDP", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2", "in_shards": "FSDP2, loaded in shards"}


@functools.cache
def shape_of(name: str) -> ModelShape:
    """Return the counts of a model with the default adapter."""
    with tempfile.TemporaryDirectory() as folder:
        make_config(name).save_pretrained(folder)
        return read_model_shape(Settings(model=folder))


def ways_to_train(shape: ModelShape, method: Method, gpu_gb: float, count: int) -> list[MemoryRow]:
    """Return the memory of `count` GPUs with each sharding, as `python -m unsloth_ddp.plan` computes it."""
    # Checkpointing as in the measured runs; a run without it takes more where there is room.
    settings = Settings(model="m", method=method, max_length=TOKENS, gradient_checkpointing="torch")
    lengths = np.full(COUNTS[-1] * ACCUMULATION, TOKENS)
    rows = RowLengths(lengths, lengths).packed(best_fit(lengths, TOKENS))
    work = make_workload(settings, rows, TOKENS, BatchPlan(1, ACCUMULATION, count))
    # FSDP2 takes less memory than ZeRO-3 and needs no extra package.
    shardings: Sequence[Sharding] = ("none", "zero2", "fsdp2", "zero3") if count > 1 else ("none",)
    return [
        make_memory_row(settings, shape, method, sharding, work, gpu_gb * 1e9)
        for sharding in shardings
        if is_supported(method, sharding)
    ]


def cell(name: str, shape: ModelShape, method: Method, gpu_gb: float, measured: dict[tuple, float]) -> str:
    """Return the fewest GPUs on which the plan says "fits", and before them the fewest on which it cannot tell."""
    parts: list[str] = []
    for count in COUNTS:
        ways = ways_to_train(shape, method, gpu_gb, count)
        by_verdict = {
            verdict: [way for way in ways if way.verdict == verdict] for verdict in ("fits", "tight", "unknown")
        }
        if by_verdict["fits"]:
            # DDP sends least, and ZeRO-2 less than those that shard the weights.
            way = by_verdict["fits"][0]
            kinds = ("fsdp2", "in_shards") if way.sharding == "fsdp2" else (way.sharding,)
            mark = "*" if any((name, method, kind, count) in measured for kind in kinds) else ""
            return "; ".join([*parts, f"{count} {NAMES[way.sharding]} {way.memory.total / GIB:.0f}{mark}"])
        if by_verdict["unknown"] and not any("≥" in part for part in parts):
            way = min(by_verdict["unknown"], key=lambda way: way.memory.total)
            mark = "*" if (name, method, way.sharding, count) in measured else ""
            parts.append(f"{count}? {NAMES[way.sharding]} ≥{way.memory.total / GIB:.0f}{mark}")
    return "; ".join(parts) or "-"


def read_measured() -> dict[tuple, float]:
    """Return measured peaks in GiB by model, method, sharding and number of GPUs."""
    peaks = {}
    for file in ("gpu_check_large", "memory_two", "sharding_cost", "sharding_cost_2"):
        for run in json.loads((RESULTS / f"{file}.json").read_text())["runs"]:
            summary = run.get("summary")
            if not summary:
                continue
            model = next((short for short in MODELS.values() if run["name"].startswith(short)), None)
            method = next(method for method in ("qlora", "lora", "full") if f"_{method}_" in run["name"])
            sharding = summary.get("sharding") or "none"
            if (method, sharding) == ("full", "fsdp2"):
                continue  # of a version that kept whole gradients between micro-batches
            peak = max(summary["peak_memory_bytes"], summary.get("peak_memory_bytes_loading", 0))
            peaks[model, method, sharding, summary["world_size"]] = peak / GIB
    for run in json.loads((RESULTS / "sharded_load.json").read_text())["runs"]:
        peak = max(run["gib_training"], run["gib_loading"], run["gib_saving"])
        peaks[run["shape"], run["method"], "in_shards", run["processes"]] = peak
    return peaks


def make_line(label: str, method: Method, measured: dict[tuple, float]) -> str:
    """Return a model's line in the table of a method."""
    name = MODELS[label]
    cells = [cell(name, shape_of(name), method, gb, measured) for gb in GPU_GB]
    return "| " + " | ".join([label, *cells]) + " |"


def make_tables() -> str:
    """Return the tables as Markdown."""
    measured = read_measured()
    lines = []
    for method in get_args(Method):
        header = [METHODS[method], *(f"{gb} GB" for gb in GPU_GB)]
        lines += ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
        lines += [*(make_line(label, method, measured) for label in MODELS), ""]
    lines += [
        "Measured on H200s, in GiB of one GPU:",
        "",
        "| model | method | sharding | GPUs | measured |",
        "|---" * 5 + "|",
    ]
    labels = {name: label for label, name in MODELS.items()}
    for (name, method, sharding, count), peak in sorted(measured.items()):
        lines.append(f"| {labels[name]} | {METHODS[method]} | {NAMES[sharding]} | {count} | {peak:.1f} |")
    return "\n".join(lines)


def with_tables(page: str, tables: str) -> str:
    """Return the page with these tables between its marks."""
    start, _, rest = page.partition(BEGIN)
    return f"{start}{BEGIN}\n\n{tables}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the tables in docs/what-fits.md")
    tables = make_tables()
    if parser.parse_args().write:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    else:
        print(tables)
