"""Load and train a model that fits on no GPU of the job: FSDP2 in shards, on GPUs that are made smaller.

    python -m benchmarks.correctness.sharded_load --work /tmp/shards --json benchmarks/results/memory/sharded_load.json

Writes a random-weight model of an 8B shape, limits every GPU to a memory below that of its weights, and trains it for
three steps with adapters. Prints, of the fullest GPU, the peak of loading and of training, and of the slowest rank the
seconds to load. `--method qlora` and `--method full` take other limits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.rows import full_rows
from benchmarks.common.runs import REPO, losses, make_model, write_results

# GiB that a process may allocate: less than the whole model takes, and more than half of it with what a step needs.
LIMITS = {"lora": 13.0, "qlora": 5.5, "full": 80.0}
OPTIONS = (
    "--backend auto --precision bf16 --max_length 1024 --per_device_train_batch_size 1 --max_steps 3 --logging_steps 1"
)
OPTIONS += " --gradient_checkpointing torch --save_strategy no --warmup_steps 0 --compare_answers 0"


def one(gib: float, work: Path, argv: list[str]) -> None:
    """Run train_ddp.py as one rank on a GPU limited to `gib` GiB, and write how long loading took."""
    import torch

    import train_ddp
    from unsloth_ddp.run import stages

    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / torch.cuda.mem_get_info(rank)[1], rank)
    load_model = stages.load_model

    def load_timed(run: Any) -> Any:
        began = time.perf_counter()
        loaded = load_model(run)
        (work / f"seconds_{rank}").write_text(str(time.perf_counter() - began))
        return loaded

    stages.load_model = load_timed
    sys.argv = ["train_ddp.py", *argv]
    train_ddp.main()


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Launch one job and return what it came to."""
    gib = given.gib or LIMITS[given.method]
    argv = f"--model {given.work}/{given.shape} --dataset {given.work}/rows.jsonl --method {given.method} {OPTIONS}"
    argv += f" --global_batch_size {2 * given.processes} --output_dir {given.work}/outputs --run_name {given.method} --overwrite"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(given.processes), "--module"]
    command += [
        "benchmarks.correctness.sharded_load",
        "--one",
        str(gib),
        "--work",
        str(given.work),
        "--argv",
        *argv.split(),
    ]
    log = given.work / f"{given.method}.log"
    with log.open("w") as file:
        environ = {**os.environ, "UNSLOTH_FSDP2": "1"}
        code = subprocess.call(
            command, cwd=REPO, env=environ, stdout=file, stderr=subprocess.STDOUT, timeout=given.limit
        )
    result: dict[str, Any] = {
        "method": given.method,
        "gib_allowed": gib,
        "processes": given.processes,
        "exit_code": code,
    }
    result["model_bytes"] = sum(path.stat().st_size for path in (given.work / given.shape).glob("*.safetensors"))
    folder = given.work / "outputs" / given.method
    if code or not (folder / "summary.json").is_file():
        return {**result, "log": log.read_text()[-4000:]}
    summary = json.loads((folder / "summary.json").read_text())
    seconds = max(float(path.read_text()) for path in given.work.glob("seconds_*"))
    for name in ("loading", "training"):
        peak = summary["peak_memory_bytes" + ("_loading" if name == "loading" else "")]
        result[f"gib_{name}"] = round(peak / 2**30, 2)
    return {**result, "backend": summary["backend"], "seconds_to_load": round(seconds, 1), "losses": losses(folder)}


def main() -> None:
    """Measure, or be a rank of what is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the model, logs and outputs")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--shape", default="qwen3_8b")
    parser.add_argument("--method", choices=list(LIMITS), default="lora")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--gib", type=float, help="memory that each process may allocate")
    parser.add_argument("--limit", type=float, default=500, help="seconds that the job may take")
    parser.add_argument("--one", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--argv", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.one, given.work, given.argv)
        return
    given.work.mkdir(parents=True, exist_ok=True)
    if not (given.work / given.shape / "config.json").is_file():
        make_model(given.shape, given.work / given.shape).wait()
    full_rows(given.work / "rows.jsonl", 32, seed=0, tokens=1024)
    result = measure(given)
    print(json.dumps(result, indent=2))
    if given.json:
        write_results(given.json, result=result)


if __name__ == "__main__":
    main()
