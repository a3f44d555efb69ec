"""Compare replayed micro-batches with gradient checkpointing `torch` to the backend's own: loss, gradients, memory, speed.

    python -m benchmarks.correctness.cuda_graphs_checkpointing --work /tmp/recompute --json FILE
    python -m benchmarks.correctness.cuda_graphs_checkpointing --work /tmp/recompute --cases demo:transformers --cpu

Takes about a minute and a half on one GPU: the demo's model and a random-weight model of Qwen3-1.7B's shape, LoRA, one pack
of rows at a time, with both backends. The cases are prepared side by side and measured one after the other; another case
may compile meanwhile, so the speeds are rough. A case passes if the run would use CUDA graphs (its own trial included), every pack's
loss and gradients agree within the tolerances of that trial, and nothing is compiled after the first capture. `without`
is a CUDA graph that keeps all activations. --cpu tries the script on a CPU, which computes what a CUDA graph would.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.prepared_run import compiled_graphs, prepared_run
from benchmarks.common.rows import chat_rows
from benchmarks.common.runs import REPO, make_model, write_results

CASES = ("demo:transformers", "demo:unsloth", "qwen3_1.7b:transformers", "qwen3_1.7b:unsloth")
PACKS, TURNS = 4, 5
LENGTHS = {"demo": 256}
OPTIONS = "--method lora --packing on --gradient_checkpointing torch --per_device_train_batch_size 1 --max_steps 200"
OPTIONS += " --save_strategy no --report_to none --seed 5 --resume no"


class Kept(logging.Handler):
    """Keep what the kit logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the message."""
        self.lines.append(record.getMessage())


def measure(argv: list[str], lock: Path) -> dict[str, Any]:
    """Prepare a run as train_ddp.py does, and compare its passes before the first step.

    Args:
        argv: options of the run.
        lock: a file that is locked while the passes run.
    """
    import torch

    kept, logger = Kept(), logging.getLogger("unsloth_ddp")
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    with prepared_run(argv, recompute=True) as prepared:
        runner, captured = prepared.runner, prepared.captured
        choice = prepared.trainer.step.graphs.choice
        cuda = runner.device.type == "cuda"
        found: dict[str, Any] = {
            "backend": prepared.run.runtime.backend,
            "choice": choice.reason,
            "uses_graphs": choice.uses_graphs,
            "torch_version": torch.__version__,
            "device": prepared.run.runtime.device_name,
            "log": kept.lines,
        }
        if captured is None:
            return found
        batches = [prepared.batch(index, 1) for index in range(min(PACKS, prepared.data.train.units))]
        one, trained = torch.ones((), device=runner.device), captured.trained

        def ordinary(batch: dict[str, Any]) -> torch.Tensor:
            loss = runner.loss_sum(batch)
            loss.backward()
            return loss.detach()

        def replayed(batch: dict[str, Any]) -> torch.Tensor:
            return captured.run(batch, one)[0].clone()

        def passes(compute: Callable[[dict[str, Any]], torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
            """Return loss and gradients of every micro-batch, and memory and speed."""
            if cuda:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            results = []
            graphs: list[int] = []
            for batch in batches:
                for parameter in trained:
                    parameter.grad = None
                loss = compute(batch)
                flat = torch.cat([p.grad.float().flatten() for p in trained])
                results.append((loss.item(), flat.cpu()))
                graphs.append(compiled_graphs())
            began = time.perf_counter()
            for _ in range(TURNS):
                for batch in batches:
                    loss = compute(batch)
            if cuda:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - began
            graphs.append(compiled_graphs())
            measured: dict[str, Any] = {"micro_batches_a_second": TURNS * len(batches) / seconds}
            measured["compiled_after_the_first"] = graphs[-1] - graphs[0]
            if cuda:
                measured["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
                measured["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
            return results, measured

        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # The trial has captured graphs already; all ways begin alike.
            captured.forget()
            expected, found["ordinary"] = passes(ordinary)
            torch_results, found["torch"] = passes(replayed)
            captured.recompute_layers(False)
            none_results, found["without"] = passes(replayed)
        for name, results in (("torch", torch_results), ("without", none_results)):
            pairs = list(zip(results, expected, strict=True))
            found[name]["loss_difference"] = max(abs(a[0] - b[0]) / abs(b[0]) for a, b in pairs)
            found[name]["gradient_difference"] = max(((a[1] - b[1]).norm() / b[1].norm()).item() for a, b in pairs)
        pairs = list(zip(torch_results, none_results, strict=True))
        found["torch"]["gradient_difference_to_without"] = max(
            ((a[1] - b[1]).norm() / b[1].norm()).item() for a, b in pairs
        )
    return found


def passed(found: dict[str, Any], *, cpu: bool) -> bool:
    """Return whether a CUDA graph was captured, agrees, and compiled nothing twice."""
    from unsloth_ddp.training.step.capture_check import GRADIENT_TOLERANCE, LOSS_TOLERANCE

    if "torch" not in found or not isinstance(found["torch"], dict) or not (found["uses_graphs"] or cpu):
        return False
    one = found["torch"]
    agrees = one["loss_difference"] <= LOSS_TOLERANCE and one["gradient_difference"] <= GRADIENT_TOLERANCE
    return agrees and one["compiled_after_the_first"] == 0


def start(case: str, work: Path, *, cpu: bool) -> subprocess.Popen[bytes]:
    """Start the process that measures a case and writes `<case>.json` to `work`."""
    shape, backend = case.split(":")
    folder = work / case.replace(":", "-")
    folder.mkdir(parents=True, exist_ok=True)
    longest = LENGTHS.get(shape, 2048)
    rows = folder / "rows.jsonl"
    chat_rows(rows, 64, seed=1, longest=longest)
    model = REPO / "demo/model" if shape == "demo" else work / shape
    options = (
        f"--model {model} --dataset {rows} --output_dir {folder}/outputs --run_name measured --max_length {longest}"
    )
    options += f" --backend {backend} --precision {'bf16' if cpu else 'bf16 --cuda_graphs on'} {OPTIONS}"
    # Transformers would use DataParallel where it sees several GPUs.
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environ = {**os.environ, "UNSLOTH_COMPILE_LOCATION": str(folder / "unsloth_compiled"), "CUDA_VISIBLE_DEVICES": gpu}
    command = [sys.executable, "-m", "benchmarks.correctness.cuda_graphs_checkpointing", "--work", str(work)]
    command += ["--child", str(folder / "found.json"), "--", *options.split()]
    with (folder / "output.txt").open("wb") as output:
        return subprocess.Popen(command, cwd=REPO, env=environ, stdout=output, stderr=output)


def main() -> None:
    """Measure the cases, print a line for each, write the results, and fail if one does not agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for models and rows")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="SHAPE:BACKEND")
    parser.add_argument("--cpu", action="store_true", help="try the script on a CPU")
    parser.add_argument("--seconds", type=float, default=240, help="limit of a case")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("options", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    work = args.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    if args.child is not None:
        args.child.write_text(json.dumps(measure(args.options, work / "lock")))
        return
    shapes = {case.split(":")[0] for case in args.cases} - {"demo"}
    written = [make_model(shape, work / shape) for shape in shapes if not (work / shape / "config.json").is_file()]
    small = [case for case in args.cases if case.startswith("demo:")]
    children = {case: start(case, work, cpu=args.cpu) for case in small}
    if any(process.wait() for process in written):
        sys.exit("a model could not be written")
    children |= {case: start(case, work, cpu=args.cpu) for case in args.cases if case not in small}
    results, failed = {}, []
    for case, process in children.items():
        folder = work / case.replace(":", "-")
        try:
            code = process.wait(args.seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if code:
            tail = (folder / "output.txt").read_text(errors="replace")[-2000:]
            results[case] = {"exit_code": code, "output": tail}
        else:
            results[case] = json.loads((folder / "found.json").read_text())
        if code or not passed(results[case], cpu=args.cpu):
            failed.append(case)
        print(case, "failed" if case in failed else "passed", json.dumps(results[case]), flush=True)
    if args.json is not None:
        write_results(args.json, cases=results, failed=failed)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
