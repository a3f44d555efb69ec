"""Show what ZeRO-3's memory peak on GPUs is made of, for LoRA on a model of real size with random weights.

    python -m benchmarks.memory.zero3_peak --work /tmp/zero3 --json benchmarks/results/memory/zero3_peak.json

Each case is one run of train_ddp.py on two GPUs. Prints, of rank 0, allocated and peak memory after loading and after
DeepSpeed's initialization, and for the first and the last step after forward, backward and optimizer, each with the
weights that are gathered then. In the last step every allocation is recorded: the largest ones that live at its peak
are printed with the lines of code that made them. `--zero KEY=VALUE ...` replaces options of zero_optimization; given
several times, each is a run of its own:

    --only unsloth --zero --zero stage3_max_live_parameters=2e8 stage3_max_reuse_distance=0 reduce_bucket_size=2e7
"""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.rows import full_rows
from benchmarks.common.runs import have_model, launch_command, train, train_here, write_results
from unsloth_ddp.utils.units import GIB

TOKENS, STEPS = 2048, 4
OPTIONS = (
    f"--precision bf16 --max_length {TOKENS} --per_device_train_batch_size 1 --max_steps {STEPS} --logging_steps 1 "
    "--gradient_checkpointing torch --save_strategy no --warmup_steps 0 --compare_answers 0 --learning_rate 1e-5 --packing off"
)
# Frames of these say where in DeepSpeed or Unsloth memory was taken; those of torch say only that it was.
SKIPPED = ("/torch/", "<frozen", "??")


def describe_frames(frames: list[dict[str, Any]]) -> str:
    """Return the innermost three Python lines outside torch, innermost first."""
    kept = [f for f in frames if f["filename"].endswith(".py") and not any(part in f["filename"] for part in SKIPPED)]
    return " < ".join(f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in kept[:3]) or "torch itself"


def at_peak(trace: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """Return (bytes, allocations, code) of what was allocated since recording began and lives at the peak, largest first.

    Args:
        trace: one device's events, as torch.cuda.memory._snapshot() has them.
    """
    live = top = top_index = 0
    sizes: dict[int, int] = {}
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            live += event["size"]
            if live > top:
                top, top_index = live, index
        elif event["action"] == "free_completed" and event["addr"] in sizes:
            live -= sizes.pop(event["addr"])
    alive: dict[int, dict[str, Any]] = {}
    for event in trace[: top_index + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for event in alive.values():
        code = describe_frames(event.get("frames", []))
        total[code] += event["size"]
        count[code] += 1
    return [(size, count[code], code) for code, size in total.most_common()]


def one(folder: Path, zero: list[str], argv: list[str]) -> None:
    """Run train_ddp.py as one rank, and write what each phase took."""
    import deepspeed
    import torch

    rows: list[dict[str, Any]] = []
    steps = {"taken": 0}

    def gathered(model: Any) -> dict[str, float]:
        sizes: Counter[str] = Counter()
        for name, parameter in model.named_parameters():
            if getattr(parameter, "ds_status", None) is not None and parameter.ds_status.name == "AVAILABLE":
                kind = "embedding or head" if "embed" in name or "lm_head" in name else "blocks"
                sizes[kind if not parameter.requires_grad else "trained"] += (
                    parameter.ds_numel * parameter.element_size()
                )
        return {kind: round(size / GIB, 2) for kind, size in sizes.items()}

    def note(phase: str, model: Any = None) -> None:
        torch.cuda.synchronize()
        allocated, peak = torch.cuda.memory_allocated() / GIB, torch.cuda.max_memory_allocated() / GIB
        row = {"phase": phase, "allocated_gib": round(allocated, 2), "peak_gib": round(peak, 2)}
        if model is not None:
            row["gathered_gib"] = gathered(model)
        rows.append(row)
        torch.cuda.reset_peak_memory_stats()

    initialize = deepspeed.initialize

    def load(load_model: Any, run: Any) -> Any:
        loaded = load_model(run)
        note("loaded", loaded[0])
        return loaded

    def prepare(*given: Any, **options: Any) -> Any:
        config = options.get("config_params") or options["config"]
        for pair in zero:
            name, _, value = pair.partition("=")
            config["zero_optimization"][name] = json.loads(value)
        rows.append({"phase": "config", "zero_optimization": config["zero_optimization"]})
        note("before deepspeed.initialize")
        made = initialize(*given, **options)
        note("after deepspeed.initialize", made[0].module)
        watch(made[0])
        return made

    def watch(engine: Any) -> None:
        # Every method of the engine that has a phase of a step in it, on this engine only.
        for method in ("forward", "backward", "step"):
            setattr(engine, method, timed(engine, method, getattr(engine, method)))

    def timed(engine: Any, method: str, call: Any) -> Any:
        def measured(*given: Any, **options: Any) -> Any:
            last = steps["taken"] == STEPS - 1
            if method == "forward" and last:
                torch.cuda.memory._record_memory_history(max_entries=2_000_000, stacks="python")
            result = call(*given, **options)
            if steps["taken"] in (0, STEPS - 1):
                note(f"step {steps['taken'] + 1} {method}", engine.module)
            if method == "step":
                steps["taken"] += 1
            return result

        return measured

    def finish_noted(finish: Any, *given: Any) -> None:
        device = torch.cuda.current_device()
        trace = torch.cuda.memory._snapshot()["device_traces"][device]
        torch.cuda.memory._record_memory_history(enabled=None)
        peak = [{"gib": round(size / GIB, 3), "allocations": n, "code": code} for size, n, code in at_peak(trace)[:25]]
        if os.environ["RANK"] == "0":
            (folder / "found.json").write_text(json.dumps({"phases": rows, "live_at_peak": peak}))
        finish(*given)

    deepspeed.initialize = prepare
    train_here(argv, load_model=load, finish=finish_noted)


def measure(backend: str, zero: list[str], shape: str, work: Path, limit: float) -> dict[str, Any]:
    """Launch one run and return what rank 0 noted."""
    folder = work / "_".join([backend, *zero])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "found.json").unlink(missing_ok=True)
    command = [*launch_command("zero3.yaml", 2), "--main_process_port", "0", "--module", "benchmarks.memory.zero3_peak"]
    command += ["--work", str(folder), "--one", "--zero", *zero, "--argv"]
    command += f"--model {work}/{shape} --dataset {work}/rows.jsonl --method lora --backend {backend} {OPTIONS}".split()
    result = train([*command, "--global_batch_size", "2", "--overwrite"], "run", folder, limit)
    result |= {"backend": backend, "shape": shape, "zero": zero}
    if (folder / "found.json").is_file():
        result |= json.loads((folder / "found.json").read_text())
    if summary := result.pop("summary", None):
        result["peak_gib"] = round(summary["peak_memory_bytes"] / GIB, 2)
        result["peak_loading_gib"] = round(summary["peak_memory_bytes_loading"] / GIB, 2)
    return result


def main() -> None:
    """Measure, or be a rank of what is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, logs and outputs")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--shape", default="qwen3_8b")
    parser.add_argument("--only", nargs="*", choices=["unsloth", "transformers"], default=["unsloth", "transformers"])
    parser.add_argument(
        "--zero",
        nargs="*",
        action="append",
        metavar="KEY=VALUE",
        help="options of zero_optimization; each --zero is a run of its own",
    )
    parser.add_argument("--limit", type=float, default=200, help="seconds that one run may take")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--argv", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.work, given.zero[0], given.argv)
        return
    given.work.mkdir(parents=True, exist_ok=True)
    full_rows(given.work / "rows.jsonl", 64, seed=0, tokens=TOKENS)
    have_model(given.shape, given.work / given.shape)
    cases = [(backend, zero) for backend in given.only for zero in given.zero or [[]]]
    results: list[dict[str, Any]] = []
    # Each process counts its own memory, so that runs may share the GPUs; no times are measured.
    with ThreadPoolExecutor(max_workers=4) as pool:
        for result in pool.map(lambda case: measure(*case, given.shape, given.work, given.limit), cases):
            results.append(result)
            print(json.dumps(result, indent=1), flush=True)
            if given.json:
                write_results(given.json, runs=results)


if __name__ == "__main__":
    main()
