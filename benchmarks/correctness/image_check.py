"""Train tiny image-text models on images with both backends, on one and two GPUs, and compare their updates.

    python -m benchmarks.correctness.image_check --eager --json benchmarks/results/correctness/image_check.json
    python -m benchmarks.correctness.image_check --cpu --only qwen3_vl --json FILE

Rows have no, one, two or three images, so that with two processes a rank has micro-batches without any. Every run takes
one step of SGD in fp32 on the same 8 rows; its update is compared with that of the first run of its kind, which uses
Transformers on one GPU; runs with towers and QLoRA have a reference of their own. `--eager` switches Unsloth's
compilation off. About 4 minutes on two GPUs.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.runs import REPO, launch_command, train, update_difference, write_results

KINDS = ("qwen3_vl", "gemma3", "gemma4", "mistral3")
NUMBERS = (1, 0, 3, 2, 1, 0, 0, 0)
OPTIONS = (
    "--precision fp32 --optim sgd --learning_rate 0.5 --lora_r 8 --lora_alpha 8 --lr_scheduler_type constant "
    "--max_grad_norm 0 --max_steps 1 --seed 5 --global_batch_size 8 --max_length 512 --logging_steps 1 --save_strategy "
    "no --report_to none --gradient_checkpointing none --dataset_num_proc 1"
)
TOWERS = "--method full --train_towers --learning_rate 0.2"
# Name -> backend, processes, rows at once, accelerate's file, further options. The first run of a kind is the
# reference.
RUNS: dict[str, tuple[str, int, int, str, str]] = {
    "one": ("transformers", 1, 8, "single_gpu.yaml", ""),
    "one_by_one": ("transformers", 1, 1, "single_gpu.yaml", ""),
    "two": ("transformers", 2, 1, "ddp.yaml", ""),
    "two_fsdp2": ("transformers", 2, 2, "fsdp2.yaml", ""),
    "two_zero2": ("transformers", 2, 1, "zero2.yaml", ""),
    "two_zero3": ("transformers", 2, 1, "zero3.yaml", ""),
    "qlora_one": ("transformers", 1, 8, "single_gpu.yaml", "--method qlora"),
    "qlora_unsloth_one": ("unsloth", 1, 8, "single_gpu.yaml", "--method qlora"),
    "qlora_two": ("transformers", 2, 1, "ddp.yaml", "--method qlora"),
    "qlora_two_fsdp2": ("transformers", 2, 2, "fsdp2.yaml", "--method qlora"),
    "unsloth_one": ("unsloth", 1, 8, "single_gpu.yaml", ""),
    "unsloth_one_by_one": ("unsloth", 1, 1, "single_gpu.yaml", ""),
    "unsloth_two": ("unsloth", 2, 1, "ddp.yaml", ""),
    "towers_one": ("transformers", 1, 8, "single_gpu.yaml", TOWERS),
    "towers_two": ("transformers", 2, 1, "ddp.yaml", TOWERS),
    "towers_two_fsdp2": ("transformers", 2, 2, "fsdp2.yaml", TOWERS),
}


def make(kind: str, work: Path) -> None:
    """Write the model and the rows of a kind."""
    from tests.conftest import write_jsonl
    from tests.tiny_vision import image_rows, save_vision

    folder = work / kind
    if not (folder / "rows" / "rows.jsonl").is_file():
        save_vision(kind, folder / "model")
        (folder / "rows").mkdir(exist_ok=True)
        write_jsonl(folder / "rows" / "rows.jsonl", image_rows(folder / "rows", NUMBERS))


def run(kind: str, name: str, gpu: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """Launch one run; on all GPUs if `gpu` is None."""
    backend, processes, at_once, config, more = RUNS[name]
    folder = args.work / kind
    options = f"{OPTIONS} {more}".split()
    if "--learning_rate" in more:
        # The rate of the towers' runs replaces the other.
        first = options.index("--learning_rate")
        del options[first : first + 2]
    command = (
        [sys.executable]
        if args.cpu and processes == 1
        else launch_command("cpu.yaml" if args.cpu else config, processes)
    )
    command += ["train_ddp.py", "--model", str(folder / "model"), "--dataset", str(folder / "rows" / "rows.jsonl")]
    command += ["--backend", backend, "--per_device_train_batch_size", str(at_once), *options]
    command += ["--use_cpu"] if args.cpu else []
    environ = {"UNSLOTH_COMPILE_DISABLE": "1"} if args.eager else {}
    environ |= {"UNSLOTH_FSDP2": "1"} if args.cpu and config == "fsdp2.yaml" else {}
    environ |= {} if gpu is None or args.cpu else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    result = train(command, f"{kind}_{name}", args.work, args.limit, environ)
    return {**result, "kind": kind, "run": name}


def compare(results: list[dict[str, Any]], work: Path) -> None:
    """Add the difference of each finished run's update from the reference of its kind."""
    finished = {result["name"] for result in results if "losses" in result}
    for result in results:
        kind, name = result["kind"], result["run"]
        part = name.split("_")[0]
        reference = f"{kind}_{part}_one" if part in ("towers", "qlora") else f"{kind}_one"
        if {result["name"], reference} <= finished:
            initial = work / kind / "model" if name.startswith("towers") else None
            result["update_difference"] = update_difference(work, result["name"], reference, initial)


def main() -> None:
    """Run everything, print one line per run, and write everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/image_check"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--eager", action="store_true", help="without Unsloth's compilation")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, to try the script")
    parser.add_argument("--gpus", type=int, default=2, help="with 1, runs on two GPUs are left out")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds of a run at most")
    options = parser.parse_args()
    sys.path.insert(0, str(REPO))
    for kind in options.only:
        make(kind, options.work)
    names = [
        name
        for name in options.runs
        if RUNS[name][1] <= options.gpus and not (options.cpu and RUNS[name][0] == "unsloth")
    ]
    single = [(kind, name) for kind in options.only for name in names if RUNS[name][1] == 1]
    both = [(kind, name) for kind in options.only for name in names if RUNS[name][1] > 1]
    results: list[dict[str, Any]] = []

    def show(result: dict[str, Any]) -> None:
        results.append(result)
        print(
            f"{result['name']:32} rc {result['exit_code']} {result['seconds']:5.0f} s {result.get('losses', '')}",
            flush=True,
        )
        # Kept run by run: a check that is ended loses only the comparison.
        write_results(options.json, options=OPTIONS, runs=results)

    # Two at a time on each GPU, since most of a run is imports.
    with ThreadPoolExecutor(max_workers=1 if options.cpu else 2 * options.gpus) as pool:
        gpus = range(len(single))
        for result in pool.map(
            lambda job: run(*job[0], job[1] % options.gpus, options), zip(single, gpus, strict=True)
        ):
            show(result)
        for result in pool.map(lambda job: run(*job, None, options), both):
            show(result)
    compare(results, options.work)
    for result in results:
        print(f"{result['name']:32} update differs by {result.get('update_difference', 'FAILED')}")
    write_results(options.json, options=OPTIONS, runs=results)


if __name__ == "__main__":
    main()
