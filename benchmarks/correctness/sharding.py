"""Compare ZeRO-2, ZeRO-3 and FSDP2 with DDP on GPUs: weight update, saved model, memory and seconds a step.

    python -m benchmarks.correctness.sharding parity --work /tmp/sharding --json
    benchmarks/results/correctness/sharding_parity.json python -m benchmarks.correctness.sharding offload --work
    /tmp/sharding --json benchmarks/results/correctness/sharding_offload.json python -m benchmarks.correctness.sharding
    cost --work /tmp/sharding --json benchmarks/results/memory/sharding_cost.json

parity: trains the demo's model for three steps of SGD on the same rows with every sharding, method and backend, and
compares weight update and loss with DDP's. Then loads the adapter or model in plain Transformers and PEFT, where it has
to give the evaluation loss that the run reported. With --processes 4 also two copies, each on two GPUs (fsdp2-hybrid).
offload: the same with parts in host memory, in three steps of AdamW, as DeepSpeed's optimizer there is Adam.
cost: measures seconds a step and memory a GPU on random-weight models of real size. A mixture of experts (61 GB on
disk) is measured only if it is named: --only qwen3_30b_a3b. With --processes 1 only CPU offload is measured, on one
GPU.
"""

from __future__ import annotations

import argparse
import queue
import statistics
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.rows import full_rows
from benchmarks.common.runs import (
    REPO,
    have_model,
    launch_command,
    log_history,
    reload,
    train,
    update_difference,
    write_results,
)

# Compiling DeepSpeed's Adam for the CPU takes more than a minute of it.
LIMIT = 240
CONFIGS = {
    "cpu": "cpu.yaml",
    "ddp": "ddp.yaml",
    "again": "ddp.yaml",
    "single": "ddp.yaml",
    "zero2": "zero2.yaml",
    "zero3": "zero3.yaml",
    "fsdp2": "fsdp2.yaml",
    "fsdp2-hybrid": "fsdp2_hybrid.yaml",
    "zero2-offload": "zero2_offload.yaml",
    "zero3-offload": "zero3_offload.yaml",
    "fsdp2-offload": "fsdp2_offload.yaml",
}
# Before the script: two copies on one machine, as if it were two nodes.
LAUNCHER_OPTIONS = {"fsdp2-hybrid": ["--parallelism_config_dp_replicate_size", "2"]}
# Controls: `again` repeats DDP, `single` takes one row in a micro-batch instead of two. Differences between these and
# DDP are not caused by sharding.
METHODS = {
    "lora": ["ddp", "zero2", "zero3", "fsdp2", "fsdp2-hybrid"],
    "qlora": ["ddp", "again", "single", "zero2", "fsdp2", "fsdp2-hybrid"],
    "full": ["ddp", "single", "zero2", "zero3", "fsdp2", "fsdp2-hybrid"],
}
OFFLOADED = {
    "lora": ["ddp", "zero2-offload", "zero3-offload", "fsdp2-offload"],
    "full": ["ddp", "zero2-offload", "zero3-offload", "fsdp2-offload"],
}
# What `cost` measures: shape, method and shardings.
COST = (
    ("qwen3_8b", "lora", ["ddp", "zero2", "zero3", "fsdp2", "fsdp2-offload"]),
    ("qwen3_8b", "full", ["ddp", "zero2", "zero3", "fsdp2", "zero2-offload", "fsdp2-offload"]),
    ("qwen3_8b", "qlora", ["ddp", "fsdp2"]),
    ("qwen3_30b_a3b", "lora", ["ddp", "zero2", "fsdp2"]),
    ("qwen3_30b_a3b", "qlora", ["ddp"]),
)
COST_ON_ONE_GPU = (
    ("qwen3_1.7b", "full", ["ddp", "zero2-offload", "zero3-offload"]),
    ("qwen3_8b", "lora", ["ddp", "zero3-offload"]),
)
SGD = "--optim sgd --learning_rate 0.1"
# With a large epsilon AdamW's update follows the size of the gradients, and not the sign of their rounding.
ADAM = """--optim adamw_torch --learning_rate 0.01 --trainer_args {"adam_epsilon":0.01}"""
STEPS = "--lr_scheduler_type constant --warmup_steps 0 --max_grad_norm 0 --max_steps 3"
STEPS += " --global_batch_size 8 --compare_answers 0 --logging_steps 1"
STEPS += " --seed 5 --max_length 128 --save_steps 2"


@dataclass
class Job:
    """Describe one launch of train_ddp.py."""

    name: str
    sharding: str
    options: str


def launch(
    job: Job, work: Path, processes: int, environ: dict[str, str] | None = None, limit: float = LIMIT
) -> dict[str, Any]:
    """Run one job on `processes` GPUs for at most `limit` seconds; return its summary, losses and duration."""
    command = [*launch_command(CONFIGS[job.sharding], processes), *LAUNCHER_OPTIONS.get(job.sharding, [])]
    return train([*command, "train_ddp.py", *job.options.split(), "--overwrite"], job.name, work, limit, environ)


def precision(backend: str, method: str) -> str:
    """Return fp32, which shows the arithmetic, or bf16 for full training with Unsloth, which supports 16 bit only."""
    return "bf16" if (backend, method) == ("unsloth", "full") else "fp32"


def parity(
    work: Path, path: Path, processes: int, only: list[str], forced: str | None = None, *, offload: bool = False
) -> None:
    """Run all pairs side by side, then compare each with DDP."""
    steps = f"{ADAM if offload else SGD} {STEPS}"
    jobs = [
        Job(f"{backend}_{method}_{sharding}", sharding, f"--config recipes/demo.yaml --backend {backend} --method "
            f"{method} {steps} --precision {forced or precision(backend, method)} "
            f"--per_device_train_batch_size {1 if sharding == 'single' else 2}")
        for backend in (("transformers",) if offload else ("unsloth", "transformers"))
        for method, kinds in (OFFLOADED if offload else METHODS).items()
        for sharding in kinds
        if sharding != "fsdp2-hybrid" or processes % 4 == 0
    ]  # fmt: skip
    jobs = [job for job in jobs if not only or any(word in job.name for word in only)]
    results: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(max_workers=8) as pool:
        for job, result in zip(jobs, pool.map(lambda j: launch(j, work, processes), jobs), strict=True):
            results[job.name] = result
            tail = result.get("losses") or result["log"][-1500:]
            print(f"{job.name:28} rc {result['exit_code']} {result['seconds']:5.0f} s {tail}", flush=True)
            write_results(path, processes=processes, runs=list(results.values()))
        good = [name for name, result in results.items() if "losses" in result]
        for name in good:
            results[name] |= differences(results, name, work)
        # Kept before the results are loaded: a benchmark that is ended loses little.
        write_results(path, processes=processes, runs=list(results.values()))
        for name, loss in zip(good, pool.map(lambda n: reload(work / "outputs" / n), good), strict=True):
            results[name]["reload"] = loss
            shown = {key: results[name].get(key) for key in ("update_difference", "loss_difference", "reload")}
            print(f"{name:28} {shown} run {results[name]['summary']['eval_loss']}", flush=True)
    write_results(path, processes=processes, runs=list(results.values()))


def differences(results: dict[str, dict[str, Any]], name: str, work: Path) -> dict[str, float]:
    """Return the differences of a finished run's weight update and losses from DDP's, if that run finished."""
    reference = "_".join([*name.split("_")[:2], "ddp"])
    if "losses" not in results.get(reference, {}):
        return {}
    initial = REPO / "demo/model" if "_full_" in name else None
    pairs = zip(results[name]["losses"], results[reference]["losses"], strict=True)
    return {
        "update_difference": update_difference(work, name, reference, initial),
        "loss_difference": max(abs(a - b) / b for a, b in pairs),
    }


def cost(work: Path, path: Path, processes: int, only: list[str]) -> None:
    """Measure each sharding on GPUs of its own; the first three steps are not counted.

    On one GPU, the steps with CPU offload are measured beside those without it.
    """
    full_rows(work / "rows.jsonl", 64, seed=0, tokens=2048)
    rows = (
        f"--dataset {work}/rows.jsonl --max_length 2048 --per_device_train_batch_size 1 "
        f"--global_batch_size {2 * processes}"
    )
    rows += " --max_steps 8 --logging_steps 1 --save_strategy no --gradient_checkpointing torch --warmup_steps 0"
    jobs = []
    for shape, method, kinds in COST if processes > 1 else COST_ON_ONE_GPU:
        if shape == "qwen3_30b_a3b" and not any(shape in word for word in only):
            continue
        for sharding in kinds:
            options = f"--model {work}/{shape} {rows} --method {method}"
            options += " --learning_rate 1e-5" if method == "full" else ""
            jobs.append(Job(f"{shape}_{method}_{sharding}", sharding, options))
    jobs = [job for job in jobs if not only or any(word in job.name for word in only)]
    for shape in {job.name.rpartition("_")[0].rpartition("_")[0] for job in jobs}:
        have_model(shape, work / shape)
    results = []
    gpus: queue.Queue[str] = queue.Queue()
    for first in range(0, torch.cuda.device_count() - processes + 1, processes):
        gpus.put(",".join(str(gpu) for gpu in range(first, first + processes)))

    def on_own_gpus(job: Job) -> dict[str, Any]:
        mine = gpus.get()
        try:
            return launch(job, work, processes, {"CUDA_VISIBLE_DEVICES": mine})
        finally:
            gpus.put(mine)

    pool = ThreadPoolExecutor(max_workers=gpus.qsize())
    for future in as_completed([pool.submit(on_own_gpus, job) for job in jobs]):
        result = future.result()
        name = result["name"]
        if "losses" in result:
            history = log_history(work / "outputs" / name)
            speeds = [e["tokens_per_second"] for e in history if e.get("step", 0) > 3 and "tokens_per_second" in e]
            tokens = result["summary"]["tokens"] / result["summary"]["steps"]
            result["seconds_a_step"] = tokens / statistics.median_high(speeds)
            summary = result["summary"]
            print(
                f"{name:28} {result['seconds_a_step']:.2f} s a step, {summary['peak_memory_bytes'] / 2**30:.1f} GiB in "
                f"steps, {summary['peak_memory_bytes_loading'] / 2**30:.1f} GiB loading, loss "
                f"{result['losses'][0]:.3f} -> {result['losses'][-1]:.3f}, whole run {result['seconds']:.0f} s",
                flush=True,
            )
        else:
            print(f"{name:28} rc {result['exit_code']} {result['log'][-1500:]}", flush=True)
        results.append(result)
        for weights in (work / "outputs" / name).glob("*.safetensors"):
            weights.unlink()
        write_results(path, processes=processes, runs=results)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["parity", "offload", "cost"])
    parser.add_argument("--work", type=Path, default=Path("/tmp/sharding"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--precision", choices=["bf16", "fp32"], help="parity: of every run (default: fp32 where possible)"
    )
    parser.add_argument("--only", nargs="*", default=[], help="only the runs whose name holds one of these words")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.what != "cost":
        parity(
            options.work,
            options.json,
            options.processes,
            options.only,
            options.precision,
            offload=options.what == "offload",
        )
    else:
        cost(options.work, options.json, options.processes, options.only)


if __name__ == "__main__":
    main()
