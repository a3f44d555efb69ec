"""Repeat runs on a GPU, each with an empty cache of compiled code, and compare their weights.

    python -m benchmarks.correctness.repeats --work DIR --json benchmarks/results/correctness/repeats.json

Each case trains eight steps with LoRA and dropout, several times with the same command. Runs whose weights have the
same bits count as one result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

from benchmarks.common.rows import full_rows
from benchmarks.common.runs import have_model, launch_command, train, write_results
from benchmarks.correctness.resume import OPTIONS, difference, weights

SHAPE, ROW_TOKENS = "qwen3_0.6b", 1024
DEMO = "--packing on --max_length 256 --lora_dropout 0.1"
# Rows of ROW_TOKENS on SHAPE: the attention of the demo's short rows adds in one order only.
LONG = "--packing on --lora_dropout 0.1"
GRAPHS, NO_GRAPHS = "--cuda_graphs on", "--cuda_graphs off"
FULL = '--trainer_args {"full_determinism":true}'
TIMED, UNTIMED = {"TORCHINDUCTOR_DETERMINISTIC": "0"}, {"TORCHINDUCTOR_DETERMINISTIC": "1"}


@dataclass(frozen=True)
class Case:
    """Describe a command, how often it is run, and what it finds."""

    options: str
    repeats: int = 2
    long_rows: bool = False
    environ: dict[str, str] = field(default_factory=dict)


CASES = {
    "demo": Case(f"{DEMO} {GRAPHS}", 3),
    "demo_untimed": Case(f"{DEMO} {GRAPHS}", 3, environ=UNTIMED),
    "demo_full": Case(f"{DEMO} {GRAPHS} {FULL}", 3),
    "demo_without_graphs": Case(f"{DEMO} {NO_GRAPHS}"),
    # With Transformers torch.compile makes the kernels that Unsloth brings, and times variants of them if it may.
    "demo_transformers": Case(f"{DEMO} {GRAPHS} --backend transformers", 3, environ=TIMED),
    "demo_transformers_untimed": Case(f"{DEMO} {GRAPHS} --backend transformers", 3, environ=UNTIMED),
    "long": Case(f"{LONG} {GRAPHS}", long_rows=True),
    "long_untimed": Case(f"{LONG} {GRAPHS}", long_rows=True, environ=UNTIMED),
    "long_full": Case(f"{LONG} {GRAPHS} {FULL}", long_rows=True),
    "long_without_graphs": Case(f"{LONG} {NO_GRAPHS}", long_rows=True),
    "long_without_graphs_full": Case(f"{LONG} {NO_GRAPHS} {FULL}", long_rows=True),
}


def train_once(name: str, number: int, work: Path, gpu: str, limit: float) -> dict[str, Any]:
    """Train case `name` once on one GPU; return its losses and the hash of its weights."""
    case, run = CASES[name], f"{name}_{number}"
    cache = work / "cache" / run
    environ = {"CUDA_VISIBLE_DEVICES": gpu, **case.environ}
    environ |= {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    command = [*launch_command("single_gpu.yaml", 1), "--main_process_port", "0", "train_ddp.py"]
    command += [*OPTIONS.split(), *case.options.split(), "--save_strategy", "no"]
    if case.long_rows:
        command += f"--model {work}/{SHAPE} --dataset {work}/rows.jsonl --max_length {ROW_TOKENS}".split()
    result = {"gpu": gpu, **train(command, run, work, limit, environ)}
    if not result["exit_code"]:
        trained = weights(work / "outputs" / run)
        result["weights"] = hashlib.sha256(trained.numpy().tobytes()).hexdigest()[:16]
    return result


def compare(name: str, runs: list[dict[str, Any]], work: Path) -> dict[str, Any]:
    """Return how many different results the runs of a case have, and their largest difference from the first."""
    case = CASES[name]
    result: dict[str, Any] = {"case": name, "options": case.options, "environ": case.environ, "runs": runs}
    if any(run["exit_code"] for run in runs):
        return result
    folders = [work / "outputs" / run["name"] for run in runs]
    result["results"] = len({run["weights"] for run in runs})
    result["differ_by"] = max(difference(folders[0], other) for other in folders[1:])
    return result


def main() -> None:
    """Run the cases, as many at once as asked for on each GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], choices=[*CASES], help="only these cases")
    parser.add_argument("--gpus", nargs="*", default=["0", "1"])
    parser.add_argument("--at_once", type=int, default=3, help="runs that share a GPU")
    parser.add_argument("--limit", type=float, default=150, help="seconds of a run")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    names = options.only or [*CASES]
    if any(CASES[name].long_rows for name in names):
        have_model(SHAPE, options.work / SHAPE)
        full_rows(options.work / "rows.jsonl", 128, seed=3, tokens=ROW_TOKENS)
    gpus: Queue[str] = Queue()
    for gpu in options.gpus * options.at_once:
        gpus.put(gpu)

    def on_free_gpu(name: str, number: int) -> dict[str, Any]:
        gpu = gpus.get()
        try:
            return train_once(name, number, options.work, gpu, options.limit)
        finally:
            gpus.put(gpu)

    with ThreadPoolExecutor(max_workers=gpus.qsize()) as pool:
        started = {
            name: [pool.submit(on_free_gpu, name, number) for number in range(1, CASES[name].repeats + 1)]
            for name in names
        }
        results = []
        for name, runs in started.items():
            results.append(compare(name, [run.result() for run in runs], options.work))
            print(json.dumps({key: value for key, value in results[-1].items() if key != "runs"}), flush=True)
            # Kept case by case: a benchmark that is ended loses nothing.
            write_results(options.json, shared_by=options.at_once, cases=results)


if __name__ == "__main__":
    main()
