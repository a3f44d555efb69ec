"""Run train_ddp.py on GPUs with every launcher and method, and check the results.

    python -m benchmarks.correctness.gpu_check --work /tmp/gpu_check --json
    benchmarks/results/correctness/gpu_check.json python -m benchmarks.correctness.gpu_check --groups 3 4 5 --json
    benchmarks/results/memory/gpu_check_large.json

Needs two GPUs and no network. Groups 0 to 2 train the demo and run the kit's parity tool with Unsloth and with
Transformers; groups 3 to 5 train random-weight models of Qwen3-8B's shape (LoRA, QLoRA) and Qwen3-1.7B's shape (every
parameter), each as plain python, with accelerate on one process and on two. Checks the exit code, that the loss falls,
and that the adapter or model loads without Unsloth with the evaluation loss that the run reported.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.runs import ACCELERATE, REPO, launch_command, make_model, reload, torchrun, train, write_results

LAUNCHERS = {
    "python": [sys.executable],
    "accelerate_1": launch_command("single_gpu.yaml", 1),
    "accelerate_all": [*ACCELERATE, "--config_file", str(REPO / "accelerate_configs/ddp.yaml")],
    "accelerate_default": [*ACCELERATE, "--main_process_port", "0"],
    "torchrun_2": torchrun(2),
}
PARITY_GROUPS = {1: "unsloth", 2: "transformers"}
PARITY = "--config recipes/demo.yaml --seed 5 --max_length 128"


@dataclass
class Job:
    """Describe one launch of train_ddp.py; `gpu` None means all GPUs."""

    name: str
    launcher: str
    gpu: int | None
    options: str
    reload: bool = False


def make_rows(path: Path, count: int, seed: int) -> None:
    """Write chats of log-normal length (median 8 turns), built from the demo's questions and answers."""
    turns = [json.loads(line)["messages"][:2] for line in (REPO / "demo/train.jsonl").read_text().splitlines()]
    rng = random.Random(seed)
    with path.open("w") as file:
        for _ in range(count):
            chosen = rng.choices(turns, k=max(1, min(60, int(rng.lognormvariate(2.1, 0.7)))))
            file.write(json.dumps({"messages": [m for pair in chosen for m in pair]}) + "\n")


def jobs(work: Path) -> list[list[Job]]:
    """Return the launches in groups; those of one group run side by side."""
    rows = (
        f"--dataset {work}/train.jsonl --eval_dataset {work}/eval.jsonl --global_batch_size 8 "
        "--per_device_train_batch_size 2"
    )
    rows += (
        " --learning_rate 2e-4 --warmup_steps 0 --logging_steps 1 --save_strategy no --max_length 1024 "
        "--gradient_checkpointing torch"
    )
    demo = [
        Job("demo_python", "python", 0, "--config recipes/demo.yaml", reload=True),
        Job("demo_accelerate_1", "accelerate_1", 1, "", reload=True),
        Job("demo_accelerate_all", "accelerate_all", None, "", reload=True),
        Job("demo_accelerate_default", "accelerate_default", None, "--save_strategy no"),
        Job("demo_torchrun_qlora", "torchrun_2", None, "--method qlora --learning_rate 2e-3", reload=True),
        Job("demo_fp32", "accelerate_all", None, "--precision fp32", reload=True),
        Job("demo_full", "python", 1, "--method full --learning_rate 1e-3", reload=True),
    ]
    large = []
    for method, shape, steps in (("lora", "qwen3_8b", 12), ("qlora", "qwen3_8b", 12), ("full", "qwen3_1.7b", 12)):
        rate = "--learning_rate 2e-5" if method == "full" else ""
        options = f"--model {work}/{shape} {rows} --method {method} --max_steps {steps} {rate}"
        large.append(
            [
                Job(f"{shape}_{method}_python", "python", 0, options, reload=True),
                Job(f"{shape}_{method}_accelerate_1", "accelerate_1", 1, options),
                Job(f"{shape}_{method}_accelerate_all", "accelerate_all", None, options),
            ]
        )
    return [demo, [], [], *large]


def run(job: Job, work: Path) -> dict[str, Any]:
    """Launch one job and return its result."""
    environ = {} if job.gpu is None else {"CUDA_VISIBLE_DEVICES": str(job.gpu)}
    command = [*LAUNCHERS[job.launcher], "train_ddp.py", *job.options.split()]
    result = train(command, job.name, work, 400, environ)
    if losses := result.pop("losses", []):
        result |= {"first_loss": losses[0], "last_loss": losses[-1]}
    return result


def parity(backend: str, work: Path) -> dict[str, Any]:
    """Run the kit's parity tool on all GPUs and return its result."""
    path = work / f"parity_{backend}.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "unsloth_ddp.parity", *PARITY.split(), "--backend", backend]
    process = subprocess.run([*command, "--micro_batches", "1", "4", "--json", str(path)], cwd=REPO)
    report = json.loads(path.read_text()) if path.is_file() else {"agree": False, "launches": []}
    return {"backend": backend, "exit_code": process.returncode, **report}


def main() -> None:
    """Run the groups, print one line per launch, and write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/gpu_check"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--groups", type=int, nargs="*", help="only these groups of jobs")
    parser.add_argument("--launchers", nargs="*", choices=LAUNCHERS, help="only jobs with these launchers")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    make_rows(options.work / "train.jsonl", 400, seed=0)
    make_rows(options.work / "eval.jsonl", 24, seed=1)
    groups = [[j for j in group if j.launcher in (options.launchers or LAUNCHERS)] for group in jobs(options.work)]
    chosen = options.groups if options.groups is not None else range(len(groups))
    makers = []
    if any(g >= 3 for g in chosen):
        missing = [s for s in ("qwen3_8b", "qwen3_1.7b") if not (options.work / s / "tokenizer_config.json").is_file()]
        for gpu, shape in enumerate(missing):
            makers.append(make_model(shape, options.work / shape, {"CUDA_VISIBLE_DEVICES": str(gpu)}))
    results: dict[str, dict[str, Any]] = {}
    layouts: list[dict[str, Any]] = []
    with ThreadPoolExecutor(max_workers=8) as pool:
        for maker in makers:
            maker.wait()
        if options.launchers:
            # What is left of each group is little, so all of it stands side by side.
            groups, chosen = [[job for number in chosen for job in groups[number]]], [0]
        for number in chosen:
            if number in PARITY_GROUPS:
                layouts.append(parity(PARITY_GROUPS[number], options.work))
            for job, result in zip(
                groups[number], pool.map(lambda j: run(j, options.work), groups[number]), strict=True
            ):
                results[job.name] = result
                fall = f"{result['first_loss']:.3f} -> {result['last_loss']:.3f}" if "last_loss" in result else "FAILED"
                print(f"{job.name:36} rc {result['exit_code']} {result['seconds']:5.0f} s  {fall}", flush=True)
            names = [j.name for j in groups[number] if j.reload and results[j.name]["exit_code"] == 0]
            folders = [options.work / "outputs" / name for name in names]
            for name, loss in zip(names, pool.map(reload, folders), strict=True):
                results[name]["reload"] = loss
                print(f"{name:36} reload {loss}  run {results[name]['summary']['eval_loss']}", flush=True)
            # After every group, so that a check cut short loses nothing.
            write_results(options.json, parity=layouts, runs=list(results.values()))


if __name__ == "__main__":
    main()
