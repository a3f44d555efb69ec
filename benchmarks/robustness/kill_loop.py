"""Kill a run again and again with restarts on, and measure the seconds from each kill to the next step.

    python -m benchmarks.robustness.kill_loop --kills 20 --json benchmarks/results/robustness/kill_loop.json

The demo's model trains on one GPU with packed rows and CUDA graphs, under `cluster/node.sh --max_restarts 3`; `--cpu`
leaves both out. A rank is killed with SIGKILL as soon as it has taken a step behind a new checkpoint. The weights are
compared with those of an uninterrupted run, which goes beside it, on the last GPU. The results are written after each
kill.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common.runs import REPO, gpu_names, write_results
from unsloth_ddp.utils.versions import versions

SAVE_STEPS = 10
# Seconds without a new step after which the run hangs.
PATIENCE = 180.0


def command(name: str, kills: int, work: Path, *, cpu: bool) -> list[str]:
    """Return the command of a run with a checkpoint for each kill."""
    steps = SAVE_STEPS * (kills + 2)
    text = (
        f"bash {REPO}/cluster/node.sh --no_preflight --max_restarts 3 --config {REPO}/recipes/demo.yaml "
        f"--compare_answers 0 --max_steps {steps} --save_steps {SAVE_STEPS} --logging_steps 1 --global_batch_size 16 "
        f"--report_to none --output_dir {work}/outputs --run_name {name} --eval_strategy no "
    )
    text += "--cpu" if cpu else "--packing on --max_length 256 --cuda_graphs on"
    return text.split()


def last_step(log: Path) -> int:
    """Return the last step that a log shows."""
    found = re.findall(r"^ *(\d+)/\d+ ", log.read_text(errors="replace"), re.MULTILINE)
    return int(found[-1]) if found else 0


def saved_step(run: Path) -> int:
    """Return the step of the newest complete checkpoint."""
    found = [int(path.parent.name.rpartition("-")[2]) for path in run.glob("checkpoint-*/manifest.json")]
    return max(found, default=0)


def rank_of(run: str) -> int | None:
    """Return the process id of the rank that trains this run."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            command_line = (path.parent / "cmdline").read_bytes().decode(errors="replace")
            if f"--run_name\0{run}\0" in command_line and b"\0LOCAL_RANK=" in path.read_bytes():
                return int(path.parent.name)
        except OSError:
            continue
    return None


def train(
    name: str, kills: int, work: Path, gpu: int, resumed: Callable[[list[dict[str, Any]]], None] | None, *, cpu: bool
) -> dict[str, Any]:
    """Run to the end, and return the exit code, the weights' checksum and what each kill cost.

    Args:
        gpu: that the run uses.
        resumed: gets the kills so far after each; without it nothing is killed.
    """
    log, run = work / f"{name}.txt", work / "outputs" / name
    each: list[dict[str, Any]] = []
    environ = {**os.environ, **({} if cpu else {"CUDA_VISIBLE_DEVICES": str(gpu)})}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command(name, kills, work, cpu=cpu), cwd=work, env=environ, stdout=output, stderr=subprocess.STDOUT
        )
    killed_at, wanted, moved, seen = 0.0, SAVE_STEPS, time.monotonic(), 0
    while process.poll() is None and time.monotonic() - moved < PATIENCE:
        step = last_step(log)
        if step != seen:
            seen, moved = step, time.monotonic()
            if killed_at and step < wanted:
                each[-1] |= {"seconds_to_next_step": round(moved - killed_at, 1), "resumed_at": step}
                killed_at = 0.0
                if resumed:
                    resumed(each)
        saved = saved_step(run)
        if (
            resumed
            and not killed_at
            and len(each) < kills
            and saved >= wanted
            and step > saved
            and (pid := rank_of(name))
        ):
            os.kill(pid, signal.SIGKILL)
            killed_at, wanted = time.monotonic(), saved + SAVE_STEPS
            each.append({"killed_at": step, "saved": saved})
            # The log is empty until the run that was started again takes a step.
            seen = 0
            _forget_steps(log)
        time.sleep(0.02)
    hung = process.poll() is None
    process.kill()
    weights = run / "adapter_model.safetensors"
    found = hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None
    return {"exit_code": process.wait(), "hung": hung, "weights": found, "kills": each}


def _forget_steps(log: Path) -> None:
    """Empty the log, so that its last step is one of the next start; node.sh appends to it."""
    with log.open("r+b") as file:
        file.truncate()


def main() -> None:
    """Read the command line, run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="kill_loop_"))
    result: dict[str, Any] = {}

    def keep(each: list[dict[str, Any]], **ended: Any) -> None:
        seconds = [kill["seconds_to_next_step"] for kill in each if "seconds_to_next_step" in kill]
        shown = {"median": statistics.median(seconds), "most": max(seconds)} if seconds else None
        result.update(kills=len(each), resumed=len(seconds), seconds_to_next_step=shown, each=each, **ended)
        if given.json:
            write_results(given.json, versions=versions(), save_steps=SAVE_STEPS, **result)

    with ThreadPoolExecutor() as pool:
        last = max(0, len(gpu_names()) - 1)
        beside = pool.submit(train, "whole", given.kills, work, last, None, cpu=given.cpu)
        killed = train("killed", given.kills, work, 0, keep, cpu=given.cpu)
        whole = beside.result()
    same = whole["weights"] is not None and whole["weights"] == killed["weights"]
    keep(killed["kills"], exit_code=killed["exit_code"], hung=killed["hung"], bit_identical=same)
    print(result, flush=True)
    if result["bit_identical"]:
        shutil.rmtree(work)
    else:
        print(f"the logs are in {work}")


if __name__ == "__main__":
    main()
