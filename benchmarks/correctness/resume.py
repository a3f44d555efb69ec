"""Compare resumed with uninterrupted runs on GPUs, and two uninterrupted runs with each other.

    python -m benchmarks.correctness.resume --json benchmarks/results/correctness/resume_gpu.json

Trains the demo's model for eight steps with dropout and a checkpoint at step 4, trains it again, and resumes from the
checkpoint. The difference between the two uninterrupted runs comes from the order in which kernels add, which no
resume can remove.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.rows import full_rows
from benchmarks.common.runs import gpu_names, have_model, launch_command, train, write_results

OPTIONS = "--config recipes/demo.yaml --compare_answers 0 --max_steps 8 --logging_steps 1 --save_steps 4 --seed 5"
OPTIONS += " --save_total_limit none --per_device_train_batch_size 2 --global_batch_size 16 --report_to none"
BEST = '--trainer_args {"load_best_model_at_end":true} --eval_steps 4'


@dataclass
class Case:
    """Name a way to train, and the number of processes before and after the resume."""

    name: str
    sharding: str
    options: str = "--lora_dropout 0.1"
    processes: int = 2
    resumed_with: int = 2
    # Of benchmarks/common/models.py, with rows of ROW_TOKENS; empty: the demo's.
    shape: str = ""


ROW_TOKENS = 1024
CASES = [
    Case("lora_1", "single_gpu", processes=1, resumed_with=1),
    Case("lora", "ddp"),
    Case("lora_2_to_1", "ddp", resumed_with=1),
    Case("lora_fp32", "ddp", "--precision fp32 --lora_dropout 0.1"),
    # Sixteen packs a step, of about ten rows each: the demo has four steps an epoch.
    Case("lora_packed", "ddp", "--packing on --max_length 256 --lora_dropout 0.1"),
    Case("lora_auto", "ddp", "--packing on --max_length 256 --per_device_train_batch_size auto --lora_dropout 0.1"),
    # The checkpoint is behind the second window of rows.
    Case("lora_window_skipped", "ddp", "--streaming --shuffle_buffer 20 --lora_dropout 0.1"),
    Case("lora_streamed", "ddp", "--streaming --shuffle_buffer 100 --lora_dropout 0.1"),
    Case("lora_streamed_packed", "ddp", "--streaming --packing on --max_length 256 --lora_dropout 0.1"),
    # Its loss scaler is part of a checkpoint.
    Case("lora_fp16", "ddp", "--precision fp16 --lora_dropout 0.1"),
    Case("lora_cuda_graphs", "ddp", "--packing on --max_length 256 --cuda_graphs on --lora_dropout 0.1"),
    Case("lora_fp8", "ddp", "--packing on --max_length 256 --cuda_graphs on --fp8 --lora_dropout 0.1"),
    # A pack is one row, whose attention torch computes with cuDNN on newer GPUs.
    Case(
        "lora_single_rows",
        "single_gpu",
        "--packing on --cuda_graphs on --lora_dropout 0.1",
        processes=1,
        resumed_with=1,
        shape="qwen3_0.6b",
    ),
    Case(
        "lora_single_rows_full",
        "single_gpu",
        '--packing on --cuda_graphs on --lora_dropout 0.1 --trainer_args {"full_determinism":true}',
        processes=1,
        resumed_with=1,
        shape="qwen3_0.6b",
    ),
    # A pack is three rows or so, which the kernel keeps apart.
    Case(
        "lora_several_rows_full",
        "single_gpu",
        '--max_length 4096 --packing on --cuda_graphs on --lora_dropout 0.1 --trainer_args {"full_determinism":true}',
        processes=1,
        resumed_with=1,
        shape="qwen3_0.6b",
    ),
    Case("qlora", "ddp", "--method qlora --lora_dropout 0.1"),
    Case("full", "ddp", "--method full --learning_rate 1e-3"),
    Case(
        "full_cuda_graphs", "ddp", "--method full --learning_rate 1e-3 --packing on --max_length 256 --cuda_graphs on"
    ),
    Case("lora_transformers", "ddp", "--backend transformers --lora_dropout 0.1"),
    Case("zero2_lora", "zero2"),
    Case("zero2_full", "zero2", "--method full --learning_rate 1e-3"),
    # Once more: one sample of a difference says little.
    Case("zero2_full_2", "zero2", "--method full --learning_rate 1e-3"),
    Case("zero2_full_3", "zero2", "--method full --learning_rate 1e-3"),
    Case("zero3_lora", "zero3"),
    Case("fsdp2_lora", "fsdp2"),
    Case("fsdp2_full", "fsdp2", "--method full --learning_rate 1e-3"),
    Case("zero2_best", "zero2", f"{BEST} --lora_dropout 0.1"),
    Case("fsdp2_best", "fsdp2", f"{BEST} --lora_dropout 0.1"),
]


def launch(case: Case, work: Path, name: str, processes: int, extra: str, gpu: str) -> dict[str, Any]:
    """Run one training to its end and return its result."""
    command = [*launch_command(f"{case.sharding}.yaml", processes), "--main_process_port", "0", "train_ddp.py"]
    command += [*OPTIONS.split(), *extra.split(), *case.options.split()]
    environ = {"CUDA_VISIBLE_DEVICES": gpu if processes == 1 else "0,1"}
    result = train(command, name, work, 240, environ)
    words = ("Resuming", "Changed", "resume", "The first")
    result["said"] = [line for line in (work / f"{name}.log").read_text().splitlines() if line.startswith(words)]
    return result


def prepared(case: Case, work: Path) -> str:
    """Write the model and the rows of the case where it does not take the demo's; return the options that name them."""
    if not case.shape:
        return ""
    model, rows = work / case.shape, work / "rows.jsonl"
    have_model(case.shape, model)
    full_rows(rows, 128, seed=3, tokens=ROW_TOKENS)
    return f"--model {model} --dataset {rows} --max_length {ROW_TOKENS}"


def weights(folder: Path) -> Any:
    """Return all trained weights of a finished run as one float64 vector."""
    import torch
    from safetensors.torch import load_file

    files = sorted([*folder.glob("adapter_model.safetensors"), *folder.glob("model*.safetensors")])
    saved = {key: value for file in files for key, value in load_file(file).items()}
    return torch.cat([saved[key].double().flatten() for key in sorted(saved)])


def difference(folder: Path, other: Path) -> float:
    """Return the norm of the difference over the norm of the first."""
    first, second = weights(folder), weights(other)
    return ((first - second).norm() / first.norm()).item()


def play(case: Case, work: Path, model_options: str, gpu: str) -> dict[str, Any]:
    """Run the case; then run it again, and resume it from its checkpoint at the same time.

    Args:
        model_options: options of its model and rows.
    """
    result: dict[str, Any] = {"case": case.name, "sharding": case.sharding, "options": case.options}
    result |= {"processes": case.processes, "resumed_with": case.resumed_with}
    checkpoint = work / "outputs" / f"{case.name}_whole" / "checkpoint-4"

    def run(kind: str, processes: int, extra: str = "") -> dict[str, Any]:
        return launch(case, work, f"{case.name}_{kind}", processes, f"{model_options} {extra}", gpu)

    result["runs"] = [run("whole", case.processes)]
    if result["runs"][0]["exit_code"]:
        return result
    with ThreadPoolExecutor(max_workers=2) as pool:
        again = pool.submit(run, "again", case.processes)
        resumed = pool.submit(run, "resumed", case.resumed_with, f"--resume {checkpoint} --trust_checkpoint")
        result["runs"] += [again.result(), resumed.result()]
    if any(run["exit_code"] for run in result["runs"]):
        return result
    folders = {kind: work / "outputs" / f"{case.name}_{kind}" for kind in ("whole", "again", "resumed")}
    result["again_differs_by"] = difference(folders["whole"], folders["again"])
    result["resumed_differs_by"] = difference(folders["whole"], folders["resumed"])
    return result


def main() -> None:
    """Run all cases side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/resume_gpu"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="only these cases")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if not args.only or case.name in args.only]
    results, gpus = [], max(1, len(gpu_names()))
    options = [prepared(case, args.work) for case in cases]
    with ThreadPoolExecutor(max_workers=len(cases)) as pool:
        started = [
            pool.submit(play, case, args.work, case_options, str(number % gpus))
            for number, (case, case_options) in enumerate(zip(cases, options, strict=True))
        ]
        for ended in as_completed(started):
            results.append(ended.result())
            shown = {key: value for key, value in results[-1].items() if key != "runs"}
            shown["codes"] = [run["exit_code"] for run in results[-1]["runs"]]
            shown["log"] = [run["log"] for run in results[-1]["runs"] if "log" in run]
            print(shown, flush=True)
            # Kept case by case: a benchmark that is ended loses nothing.
            write_results(args.json, runs=results)


if __name__ == "__main__":
    main()
