"""Save, kill and resume FSDP2 runs on two GPUs, resume them on one, and load what they saved in plain Transformers.

    python -m benchmarks.correctness.sharded_saving --work /tmp/sharded_saving --json FILE

For each method: a run of eight steps on two GPUs; the same run, killed with SIGKILL once checkpoint-4 is there, and
resumed on two GPUs, which has to give the same bits (every parameter in fp32: or differ no more than a second
uninterrupted run does); the killed run resumed on one GPU without sharding; the evaluation loss of every result in
plain Transformers and PEFT. On a CPU, --processes 2 --cpu tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.common.runs import REPO, launch_command, reload, train, write_results
from benchmarks.correctness.resume import difference
from unsloth_ddp.parity.processes import kill_tree

LIMIT = 240
OPTIONS = "--config recipes/demo.yaml --compare_answers 0 --max_steps 8 --logging_steps 1 --save_steps 4 --seed 5"
OPTIONS += " --save_total_limit none --per_device_train_batch_size 2 --global_batch_size 16 --report_to none"
# No dropout: on another number of GPUs it draws anew.
METHODS = {
    "lora": "--method lora --merge",
    "qlora": "--method qlora",
    "full": "--method full --learning_rate 1e-3",
    "full_transformers": "--method full --learning_rate 1e-3 --backend transformers --precision fp32",
}


def launch(processes: int, options: str, cpu: bool) -> tuple[list[str], dict[str, str]]:
    """Return the command of a run, and what it adds to the environment."""
    config = "cpu.yaml" if cpu else "fsdp2.yaml" if processes > 1 else "single_gpu.yaml"
    command = [*launch_command(config, processes), "--main_process_port", "0", "train_ddp.py", *OPTIONS.split()]
    return [*command, *options.split()], {"UNSLOTH_FSDP2": "1"} if cpu and processes > 1 else {}


def finish(work: Path, name: str, options: str, processes: int, cpu: bool) -> dict[str, Any]:
    """Run to the end; return exit code, and the evaluation loss of the run and of what was saved."""
    command, environ = launch(processes, options, cpu)
    result = {**train(command, name, work, LIMIT, environ), "processes": processes}
    if summary := result.pop("summary", None):
        result |= {"eval_loss": summary["eval_loss"], "reload": reload(work / "outputs" / name)}
        lines = (work / f"{name}.log").read_text().splitlines()
        result["said"] = [line for line in lines if line.startswith(("Resuming", "Changed"))]
    return result


def kill_after_checkpoint(work: Path, name: str, options: str, processes: int, cpu: bool) -> bool:
    """Start a run, kill all of its processes when checkpoint-4 is whole, and return whether it was still running."""
    command, environ = launch(processes, options, cpu)
    command += ["--run_name", name, "--output_dir", str(work / "outputs")]
    with (work / f"{name}_before.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=REPO, env={**os.environ, **environ}, stdout=log, stderr=subprocess.STDOUT
        )
    folder, end = work / "outputs" / name, time.monotonic() + LIMIT
    while not (folder / "checkpoint-4").is_dir() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    running = process.poll() is None
    kill_tree(process)
    # Of a run that was faster than the signal, what came after the checkpoint goes.
    shutil.rmtree(folder / "checkpoint-8", ignore_errors=True)
    for file in ("summary.json", "adapter_model.safetensors", "model.safetensors"):
        (folder / file).unlink(missing_ok=True)
    return running


def play(method: str, work: Path, processes: int, cpu: bool) -> dict[str, Any]:
    """Run, run again, kill and resume a method."""
    options, outputs = METHODS[method], work / "outputs"
    result: dict[str, Any] = {"method": method, "options": options}
    with ThreadPoolExecutor() as pool:
        killed = pool.submit(kill_after_checkpoint, work, f"{method}_killed", options, processes, cpu)
        runs = [pool.submit(finish, work, f"{method}_{kind}", options, processes, cpu) for kind in ("whole", "again")]
        result["killed_while_running"] = killed.result()
        shutil.copytree(outputs / f"{method}_killed", outputs / f"{method}_alone")
        runs.append(pool.submit(finish, work, f"{method}_killed", options, processes, cpu))
        runs.append(pool.submit(finish, work, f"{method}_alone", options, 1, cpu))
    runs = result["runs"] = [run.result() for run in runs]
    if not any(run["exit_code"] for run in runs):
        whole = outputs / f"{method}_whole"
        for kind in ("again", "killed", "alone"):
            result[f"{kind}_differs_by"] = difference(whole, outputs / f"{method}_{kind}")
    shards = outputs / f"{method}_whole" / "checkpoint-8"
    result["shards"] = {path.relative_to(shards).as_posix(): path.stat().st_size for path in shards.glob("*/shard-*")}
    return result


def main() -> None:
    """Run all methods, two side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/sharded_saving"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cpu", action="store_true", help="on the CPU, with gloo")
    parser.add_argument("--only", nargs="*", choices=METHODS, default=list(METHODS), help="only these methods")
    parser.add_argument("--side_by_side", type=int, default=5, help="methods at a time; the model is tiny")
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    results = []
    with ThreadPoolExecutor(max_workers=options.side_by_side) as pool:
        futures = [pool.submit(play, method, options.work, options.processes, options.cpu) for method in options.only]
        for future in as_completed(futures):
            result = future.result()
            results.append(result)
            shown = {key: value for key, value in result.items() if key != "runs"}
            shown["runs"] = [
                {key: run.get(key) for key in ("name", "exit_code", "eval_loss", "reload", "log")}
                for run in result["runs"]
            ]
            print(json.dumps(shown, indent=1), flush=True)
            write_results(options.json, runs=results)


if __name__ == "__main__":
    main()
