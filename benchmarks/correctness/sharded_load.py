"""Load, train and save models that fit on no GPU of the job: FSDP2 in shards, on GPUs that are made smaller.

    python -m benchmarks.correctness.sharded_load --work /tmp/shards --json benchmarks/results/memory/sharded_load.json

Each case limits every GPU to a memory below that of the model, and trains for some steps. Prints, of the fullest GPU,
the peak of loading, of training and of saving, of the fullest process the peak of host memory, and of the slowest rank
the seconds to load and the tokens a second. Models of `sparse` cases are files of zeros, as their random weights would
not fit on the disk; memory and speed do not depend on the values. A case's name begins with the GPUs that it needs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.rows import full_rows
from benchmarks.common.runs import log_history, make_model, torchrun, train, train_here, write_results

OPTIONS = (
    "--backend auto --precision bf16 --max_length 1024 --per_device_train_batch_size 1 --max_steps 6 --logging_steps 1"
)
OPTIONS += (
    " --gradient_checkpointing torch --save_strategy no --warmup_steps 0 --compare_answers 0 --learning_rate 1e-5"
)
# Steps that are not counted for the speed.
WARM = 3


@dataclass
class Case:
    """Name a shape and a method, the processes, and the GiB that each may allocate."""

    name: str
    shape: str
    method: str
    processes: int
    gib: float
    sparse: bool = False
    options: str = ""


CASES = [
    Case("2x8b_lora", "qwen3_8b", "lora", 2, 15.0),
    Case("2x8b_qlora", "qwen3_8b", "qlora", 2, 8.0),
    Case("2x8b_full", "qwen3_8b", "full", 2, 80.0, options="--backend transformers"),
    Case("4x8b_lora", "qwen3_8b", "lora", 4, 10.0),
    Case("4x8b_full", "qwen3_8b", "full", 4, 60.0, options="--backend transformers"),
    Case("2x32b_qlora", "qwen3_32b", "qlora", 2, 20.0, sparse=True),
    # The model exceeds one GPU, and its experts' weights are random: tokens spread over them.
    Case("2x30b_a3b_lora", "qwen3_30b_a3b", "lora", 2, 50.0),
    Case("2x30b_a3b_experts", "qwen3_30b_a3b", "lora", 2, 80.0, options="--lora_target_parameters all-experts"),
    Case("2x72b_lora", "qwen25_72b", "lora", 2, 120.0, sparse=True),
    Case("4x72b_lora", "qwen25_72b", "lora", 4, 80.0, sparse=True),
    Case("2x72b_qlora", "qwen25_72b", "qlora", 2, 48.0, sparse=True),
]


def run_limited(gib: float, folder: Path, argv: list[str]) -> None:
    """Run train_ddp.py as one rank on a GPU limited to `gib` GiB, and write what loading and saving took."""
    import torch

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / torch.cuda.mem_get_info(rank)[1], rank)
    measured: dict[str, float] = {}

    def load_timed(load_model: Any, run: Any) -> Any:
        began = time.perf_counter()
        loaded = load_model(run)
        measured["seconds_to_load"] = time.perf_counter() - began
        measured["gib_loading"] = torch.cuda.max_memory_allocated() / 2**30
        measured["gib_loaded"] = torch.cuda.memory_allocated() / 2**30
        return loaded

    def finish_measured(finish: Any, *arguments: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        finish(*arguments)
        measured["seconds_to_save"] = time.perf_counter() - began
        measured["gib_saving"] = torch.cuda.max_memory_allocated() / 2**30
        # ru_maxrss counts KiB; pages of the model's files that a process has mapped count too.
        measured["host_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        (folder / f"rank_{rank}.json").write_text(json.dumps(measured))

    train_here(argv, load_model=load_timed, finish=finish_measured)


def measure(case: Case, work: Path, limit: float) -> dict[str, Any]:
    """Launch one job and return what it came to."""
    folder = work / case.name
    folder.mkdir(parents=True, exist_ok=True)
    argv = f"--model {work}/{case.shape} --dataset {work}/rows.jsonl --method {case.method} {OPTIONS} {case.options}"
    argv += f" --global_batch_size {2 * case.processes} --overwrite"
    command = [*torchrun(case.processes), "--module", "benchmarks.correctness.sharded_load"]
    command += ["--one", str(case.gib), "--work", str(folder), "--argv", *argv.split()]
    run = train(command, "run", folder, limit, {"UNSLOTH_FSDP2": "1", "OMP_NUM_THREADS": "4"})
    result: dict[str, Any] = {**run, **asdict(case)}
    result["model_gib"] = sum(path.stat().st_size for path in (work / case.shape).glob("*.safetensors")) / 2**30
    if "summary" not in result:
        return result
    summary = result.pop("summary")
    ranks = [json.loads(path.read_text()) for path in folder.glob("rank_*.json")]
    result |= {name: max(rank[name] for rank in ranks) for name in ranks[0]}
    result["gib_training"] = summary["peak_memory_bytes"] / 2**30
    history = log_history(folder / "outputs" / "run")
    speeds = [e["tokens_per_second"] for e in history if e.get("step", 0) > WARM and "tokens_per_second" in e]
    result["tokens_per_second_per_gpu"] = statistics.median_high(speeds) / case.processes
    rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in result.items()}
    return rounded | {name: summary[name] for name in ("backend", "packing")}


def main() -> None:
    """Measure, or be a rank of what is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models, logs and outputs")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES], default=["2x8b_lora"])
    parser.add_argument("--limit", type=float, default=500, help="seconds that one job may take")
    parser.add_argument("--one", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--argv", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_limited(options.one, options.work, options.argv)
        return
    options.work.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if case.name in options.only]
    full_rows(options.work / "rows.jsonl", 64, seed=0, tokens=1024)
    makers = {
        case.shape: make_model(case.shape, options.work / case.shape, sparse=case.sparse)
        for case in cases
        if not (options.work / case.shape / "config.json").is_file()
    }
    results = []
    for case in cases:
        if case.shape in makers and makers[case.shape].wait():
            raise SystemExit(f"no model of shape {case.shape} could be made")
        results.append(measure(case, options.work, options.limit))
        print(json.dumps(results[-1], indent=1), flush=True)
        if options.json:
            write_results(options.json, runs=results)


if __name__ == "__main__":
    main()
