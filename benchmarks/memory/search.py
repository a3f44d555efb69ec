"""Record what the automatic micro-batch and gradient checkpointing choose on GPUs of several sizes.

    python -m benchmarks.memory.search --json benchmarks/results/memory/fit_gpu.json

torch.cuda.set_per_process_memory_fraction makes GPUs smaller: allocations beyond the limit fail as out of memory. Some
runs get their limit after the choice, so that a step in the middle of training runs out of memory; their weights are
compared with those of a run that had enough. Qwen3-1.7B's shape, random weights, chats of log-normal length.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.rows import chat_rows, full_rows
from benchmarks.common.runs import (
    ACCELERATE,
    have_model,
    launch_command,
    train,
    train_here,
    update_difference,
    write_results,
)

OPTIONS = "--max_steps 6 --logging_steps 1 --save_strategy no --report_to none --seed 5 --warmup_steps 0"
LONG = (
    "--dataset {work}/long.jsonl --max_length 8192 --packing off --per_device_train_batch_size 4 --global_batch_size 4"
)


@dataclass
class Case:
    """Describe a run on GPUs limited to `gib` GiB (None: no limit), from the start or from a step on."""

    name: str
    options: str
    gib: float | None = None
    from_step: int = 0
    processes: int = 1
    like: str | None = None
    # The one rank whose GPU is smaller; None: every one.
    rank: int | None = None
    # One of accelerate_configs/, whose ranks cannot repeat a step: the run is started again, with the smaller GPUs.
    config: str | None = None


TWO_AT_ONCE = "--per_device_train_batch_size 2 --gradient_accumulation_steps 1"
CASES = [
    Case("all", "--per_device_train_batch_size 4 --global_batch_size 64"),
    Case("16_gib", "--per_device_train_batch_size 4 --global_batch_size 64", 16, like="all"),
    Case("10_gib", "--per_device_train_batch_size 4 --global_batch_size 64", 10, like="all"),
    Case("7_gib", "--per_device_train_batch_size 4 --global_batch_size 64", 7, like="all"),
    Case("4_gib", "--per_device_train_batch_size 4 --global_batch_size 64", 4),
    Case("rows_all", "--per_device_train_batch_size auto --global_batch_size 256"),
    Case("rows_20_gib", "--per_device_train_batch_size auto --global_batch_size 256", 20),
    Case("rows_6_gib", "--per_device_train_batch_size auto --global_batch_size 256", 6),
    Case("short_from_3", "--per_device_train_batch_size 4 --global_batch_size 64", 10, 3, like="all"),
    Case("two", "--per_device_train_batch_size 2 --global_batch_size 64", processes=2),
    Case("two_short_from_3", "--per_device_train_batch_size 2 --global_batch_size 64", 8, 3, 2, like="two"),
    # Gradients are being exchanged where memory runs out.
    Case("two_at_once", TWO_AT_ONCE, processes=2),
    Case("two_at_once_short_from_3", TWO_AT_ONCE, 6, 3, 2, like="two_at_once", rank=1),
    Case("fsdp2", TWO_AT_ONCE, processes=2, config="fsdp2.yaml"),
    Case("fsdp2_short_from_3", TWO_AT_ONCE, 4, 3, 2, like="fsdp2", rank=1, config="fsdp2.yaml"),
    Case("zero2", TWO_AT_ONCE, processes=2, config="zero2.yaml"),
    Case("zero2_short_from_3", TWO_AT_ONCE, 5, 3, 2, like="zero2", rank=1, config="zero2.yaml"),
    Case("graphs_two", f"{TWO_AT_ONCE} --cuda_graphs on", processes=2),
    Case("graphs_two_short_from_3", f"{TWO_AT_ONCE} --cuda_graphs on", 5, 3, 2, like="graphs_two", rank=0),
    Case("padded", "--packing off --per_device_train_batch_size 8 --global_batch_size 64"),
    Case(
        "padded_short_from_3",
        "--packing off --per_device_train_batch_size 8 --global_batch_size 64",
        9,
        3,
        like="padded",
    ),
    Case("long_30_gib", LONG, 30),
    Case("long_12_gib", LONG, 12),
    Case("long_9_gib", LONG, 9),
    Case("transformers_10_gib", "--backend transformers --packing off --global_batch_size 8", 10),
    Case("full_auto", "--method full --per_device_train_batch_size auto --global_batch_size 64", 60),
]


def run_limited(gib: float | None, from_step: int, argv: list[str]) -> None:
    """Run train_ddp.py on a GPU limited to `gib` GiB, or on all of its memory."""
    import torch

    def shrink() -> None:
        device = int(os.environ.get("LOCAL_RANK", 0))
        total = torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total, device)

    def make_shrinking_trainer(make_trainer: Any, *args: Any) -> Any:
        trainer = make_trainer(*args)
        begin = trainer.step.begin

        def begin_and_shrink(*args: Any) -> Any:
            if trainer.state.global_step + 1 == from_step:
                torch.cuda.empty_cache()
                shrink()
            return begin(*args)

        trainer.step.begin = begin_and_shrink
        return trainer

    if gib and not from_step:
        shrink()
    train_here(argv, **({"make_trainer": make_shrinking_trainer} if gib and from_step else {}))


def run(case: Case, args: argparse.Namespace, gpu: str) -> dict[str, Any]:
    """Launch one case; return its choices and its result."""
    options = case.options.format(work=args.work)
    if "--dataset" not in options:
        options += f" --dataset {args.work}/rows.jsonl --max_length 2048"
    saves = OPTIONS.replace("--save_strategy no", "--save_steps 1") if case.config else OPTIONS
    argv = f"--model {args.work}/{args.shape} {saves} {options} --overwrite".split()
    command = [sys.executable, "-m"]
    if case.config:
        command = [*launch_command(case.config, case.processes), "--main_process_port", "0", "--module"]
    elif case.processes > 1:
        command = [*ACCELERATE, "--multi_gpu", "--main_process_port", "0", "--num_processes", str(case.processes)]
        command.append("--module")
    rank = [] if case.rank is None else ["--rank", str(case.rank)]

    def start(from_step: int, argv: list[str]) -> dict[str, Any]:
        limits = ["--gib", str(case.gib or 0), "--from_step", str(from_step)]
        whole = [*command, "benchmarks.memory.search", "one", *limits, *rank, "--argv", *argv]
        return train(whole, case.name, args.work, 240, {"CUDA_VISIBLE_DEVICES": gpu})

    result = start(case.from_step, argv)
    if case.config and case.from_step:
        ended = result
        result = start(0, [word for word in argv if word != "--overwrite"]) | {"first_exit_code": ended["exit_code"]}
    result |= {"options": case.options, "gib": case.gib, "rank": case.rank, "from_step": case.from_step}
    words = ("activations", "packing", "global batch", "Out of memory", "train_ddp.py: error")
    lines = (args.work / f"{case.name}.log").read_text().splitlines()
    result |= {
        "processes": case.processes,
        "said": [" ".join(line.split()) for line in lines if line.startswith(words)],
    }
    if summary := result.pop("summary", None):
        how = (
            "gradient_checkpointing",
            "passes_a_micro_batch",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
        )
        result |= {name: summary[name] for name in (*how, "train_loss", "peak_memory_bytes", "versions")}
    return result


def compare(cases: list[Case], results: list[dict[str, Any]], work: Path) -> None:
    """Add the relative difference of the weight update from that of the run that had enough memory."""
    good = {result["name"] for result in results if result["exit_code"] == 0}
    for case, result in zip(cases, results, strict=True):
        if case.like and {case.name, case.like} <= good:
            result["update_difference"] = update_difference(work, case.name, case.like)


def main() -> None:
    """Run all cases, some side by side; runs of one process alternate between two GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["all", "one"], default="all")
    parser.add_argument("--work", type=Path, default=Path("/tmp/fit_gpu"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shape", default="qwen3_1.7b")
    parser.add_argument("--at_once", type=int, default=6, help="runs side by side")
    parser.add_argument("--only", nargs="*", help="only these cases")
    parser.add_argument("--gib", type=float, default=0)
    parser.add_argument("--from_step", type=int, default=0)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--argv", nargs=argparse.REMAINDER, default=[])
    options = parser.parse_args()
    if options.what == "one":
        limited = options.rank in (None, int(os.environ.get("RANK", 0)))
        run_limited(options.gib if limited else None, options.from_step, options.argv)
        return
    options.work.mkdir(parents=True, exist_ok=True)
    chat_rows(options.work / "rows.jsonl", 2000, seed=4)
    full_rows(options.work / "long.jsonl", 24, seed=4, tokens=8192)
    have_model(options.shape, options.work / options.shape)
    cases = [case for case in CASES if not options.only or case.name in options.only]
    with ThreadPoolExecutor(max_workers=options.at_once) as pool:
        gpus = ["0,1" if case.processes == 2 else str(number % 2) for number, case in enumerate(cases)]
        results = list(pool.map(lambda case, gpu: run(case, options, gpu), cases, gpus))
    compare(cases, results, options.work)
    for result in results:
        print({key: value for key, value in result.items() if key not in ("losses", "versions")}, flush=True)
    write_results(options.json, runs=results, VARLEN_SHIM=os.environ.get("VARLEN_SHIM"))


if __name__ == "__main__":
    main()
