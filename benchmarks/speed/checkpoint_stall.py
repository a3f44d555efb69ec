"""Measure how long training waits for a checkpoint of all weights: written beside training, and while it waits.

    python -m benchmarks.speed.checkpoint_stall --model qwen3_4b --json benchmarks/results/speed/checkpoint_stall.json

One process trains every weight with adamw_8bit and saves three times. The stall is the time in the trainer's save,
after the GPU has finished its step; the write is the time until the checkpoint is complete. A later save waits for the
write before it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common.rows import full_rows
from benchmarks.common.runs import REPO, have_model, train_here, write_results
from unsloth_ddp.utils.versions import versions

PARTS = ("beside", "waiting")


def options(model: Path, rows: Path, outputs: Path, args: argparse.Namespace) -> list[str]:
    """Return train_ddp.py's options."""
    save = args.steps // 3
    text = (
        f"--method full --model {model} --dataset {rows} --optim {args.optim} --max_length 1024 --global_batch_size 4 "
        f"--max_steps {3 * save + 2} --save_steps {save} --save_total_limit 1 --logging_steps 1 --report_to none "
        f"--output_dir {outputs} --run_name stall --overwrite --cuda_graphs off"
    )
    return text.split()


def measure(part: str, argv: list[str], result_file: Path) -> None:
    """Train in this process, and write the seconds of each save, of its write, and of each step to `found`."""
    import torch

    stalls: list[float] = []
    writes: list[float] = []
    steps: list[float] = []
    sizes: list[int] = []

    def timed(work: Any, seconds: list[float], *, wait: bool = False) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if wait and torch.cuda.is_available():
                torch.cuda.synchronize()
            began = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - began)

        return run

    def make_trainer(original: Any, *args: Any) -> Any:
        from transformers import TrainerCallback

        from unsloth_ddp.training import saving

        class Steps(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                steps.append(time.perf_counter())

        if part == "waiting":
            saving.has_room_for = lambda size: False
        trainer = original(*args)
        trainer._save_checkpoint = timed(trainer._save_checkpoint, stalls, wait=True)
        complete = timed(trainer.checkpoints._complete, writes)

        def and_weigh(step: int, target: Path, *rest: Any) -> Any:
            problem = complete(step, target, *rest)
            folder = trainer.checkpoints.folder / target.name
            sizes.append(sum(path.stat().st_size for path in folder.iterdir()))
            return problem

        trainer.checkpoints._complete = and_weigh
        trainer.add_callback(Steps())
        return trainer

    train_here(argv, make_trainer=make_trainer)
    between = [later - earlier for earlier, later in itertools.pairwise(steps)]
    result = {"stalls": stalls, "writes": writes, "median_step": statistics.median(between), "checkpoint_bytes": sizes}
    result_file.write_text(json.dumps(result))


def main() -> None:
    """Read the command line, run both parts, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3_4b", help="a shape of benchmarks/common/models.py, or a folder")
    parser.add_argument("--optim", default="adamw_8bit")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--work", type=Path, default=Path("/tmp/checkpoint_stall"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=PARTS, help="measure this part in this process")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows, model = args.work / "rows.jsonl", Path(args.model)
    if not model.is_dir():
        model = args.work / args.model
        have_model(args.model, model)
    if args.part:
        argv = options(model, rows, args.work / "outputs", args)
        measure(args.part, argv, args.work / f"{args.part}.json")
        return
    full_rows(rows, 200, 0, 1024)
    results = {}
    for part in PARTS:
        command = [sys.executable, "-m", "benchmarks.speed.checkpoint_stall", *sys.argv[1:], "--part", part]
        subprocess.run(command, cwd=REPO, check=True)
        results[part] = json.loads((args.work / f"{part}.json").read_text())
        print(part, results[part], flush=True)
    if args.json:
        write_results(args.json, model=args.model, versions=versions(), **results)


if __name__ == "__main__":
    main()
