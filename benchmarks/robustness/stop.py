"""Stop, kill and resume runs on GPUs (NCCL), with and without sharding, and time how long each takes to end.

    python -m benchmarks.robustness.stop --json benchmarks/results/robustness/stop_gpu.json

Each run trains the demo's model until its log shows step 20; then one process gets a signal. Records the time until no
process of the run is left, the exit code written for the job script, the printed sentences, and, after a stop with a
checkpoint, the step at which the resumed run continued (with --resume auto, in some cases on fewer GPUs).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.runs import REPO, launch_command, write_results
from unsloth_ddp.parity.processes import kill_tree

OPTIONS = (
    "--config recipes/demo.yaml --compare_answers 0 --max_steps 100000 --logging_steps 10 --save_steps 50 "
    "--global_batch_size 8"
)
OPTIONS += " --per_device_train_batch_size 1 --eval_strategy no"


@dataclass
class Case:
    """Name a run, its signal and target, and the number of processes that resume it."""

    sharding: str
    processes: int
    signal: str
    target: str
    resumed_with: int = 0

    @property
    def name(self) -> str:
        return f"{self.sharding}_{self.processes}_{self.signal}_{self.target}"


CASES = [
    Case("ddp", 4, "KILL", "rank 2"),
    Case("ddp", 2, "KILL", "rank 0"),
    Case("ddp", 4, "STOP", "rank 1"),
    Case("ddp", 2, "STOP", "rank 1"),
    Case("zero2", 2, "KILL", "rank 1"),
    Case("fsdp2", 2, "KILL", "rank 1"),
    Case("ddp", 4, "TERM", "launcher", resumed_with=2),
    Case("ddp", 2, "TERM", "rank 1", resumed_with=2),
    Case("zero2", 2, "TERM", "launcher", resumed_with=2),
    Case("zero3", 2, "TERM", "launcher", resumed_with=2),
    Case("fsdp2", 2, "USR1", "rank 0", resumed_with=2),
    Case("ddp", 2, "USR1", "rank 0", resumed_with=1),
    Case("ddp", 2, "TERM", "rank 0", resumed_with=1),
]


def start(case: Case, work: Path, processes: int, name: str, extra: str = "") -> tuple[subprocess.Popen[bytes], Path]:
    """Launch a run on the first `processes` GPUs; its output goes to <name>.log."""
    command = [*launch_command(f"{case.sharding}.yaml", processes), "train_ddp.py"]
    command += [*OPTIONS.split(), "--run_name", case.name.replace(" ", ""), *extra.split()]
    command += ["--output_dir", str(work / "outputs")]
    environ = {**os.environ, "UNSLOTH_DDP_EXIT_CODE_FILE": str(work / f"{name}.code")}
    log = work / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=REPO, env=environ, stdout=file, stderr=subprocess.STDOUT)
    return process, log


def wait_for_step(run: Path, least: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until rank 0's log shows this step."""
    deadline = time.monotonic() + 200
    log = run / "logs" / "rank_0.log"
    while time.monotonic() < deadline and process.poll() is None:
        steps = [int(line.split(": step ")[1].split()[0]) for line in lines(log) if ": step " in line]
        if steps and max(steps) >= least:
            return
        time.sleep(0.2)
    raise RuntimeError(f"{run} did not come to step {least}")


def lines(path: Path) -> list[str]:
    """Return the lines of a file; none if it does not exist yet."""
    return path.read_text().splitlines() if path.exists() else []


def rank_process(launcher: int, rank: int) -> psutil.Process:
    """Return the process of one rank, found by the environment its launcher gave it."""
    for child in psutil.Process(launcher).children():
        if child.environ().get("RANK") == str(rank):
            return child
    raise RuntimeError(f"no process of rank {rank}")


def last_checkpoint(run: Path) -> int | None:
    """Return the step of the newest checkpoint that has a manifest."""
    found = [json.loads(p.read_text())["step"] for p in run.glob("checkpoint-*/*manifest*.json")]
    return max(found, default=None)


def play(case: Case, work: Path) -> dict[str, Any]:
    """Run one case from launch to resume."""
    name = case.name.replace(" ", "")
    run = work / "outputs" / name
    process, log = start(case, work, case.processes, name)
    result: dict[str, Any] = {"name": case.name}
    target = psutil.Process(process.pid)
    try:
        wait_for_step(run, 20, process)
        everybody = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        which = case.target.split()
        if which != ["launcher"]:
            target = rank_process(process.pid, int(which[1]))
        began = time.monotonic()
        target.send_signal(getattr(signal, f"SIG{case.signal}"))
        code = process.wait(timeout=60)
        _, alive = psutil.wait_procs(everybody, timeout=60)
        result |= {"seconds_to_end": round(time.monotonic() - began, 1), "launcher_code": code}
        result["left_alive"] = len(alive)
    except Exception as error:
        with contextlib.suppress(psutil.Error, OSError):
            signals = [line for line in lines(Path(f"/proc/{target.pid}/status")) if line.startswith("Sig")]
            result["signals"] = {"target": target.pid, "cmdline": target.cmdline()[:6], "masks": signals}
        kill_tree(process)
        return {**result, "error": str(error), "log": log.read_text()[-2000:]}
    result["noted_code"] = "".join(lines(work / f"{name}.code"))
    result["said"] = [line for line in lines(log) if line.startswith(("train_ddp.py", "Stop", "stop"))][:4]
    result["last_checkpoint"] = last_checkpoint(run)
    if case.resumed_with:
        process, log = start(case, work, case.resumed_with, f"{name}_resumed", "--max_time 100s")
        try:
            process.wait(timeout=200)
        except subprocess.TimeoutExpired:
            kill_tree(process)
        result["resumed_with"] = case.resumed_with
        result["resumed_said"] = [
            line for line in lines(log) if "resum" in line.lower() or "checkpoint" in line.lower()
        ][:4]
        result["resumed_code"] = "".join(lines(work / f"{name}_resumed.code"))
        result["resumed_last_checkpoint"] = last_checkpoint(run)
        if result["resumed_last_checkpoint"] == result["last_checkpoint"]:
            result["log"] = log.read_text()[-2500:]
    return result


def main() -> None:
    """Run all cases side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/stop_gpu"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], help="only the cases whose name holds one of these words")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    cases = [case for case in CASES if not given.only or any(word in case.name for word in given.only)]
    results = []
    with ThreadPoolExecutor(max_workers=len(cases)) as pool:
        for ended in as_completed([pool.submit(play, case, given.work) for case in cases]):
            results.append(ended.result())
            print(json.dumps(results[-1]), flush=True)
            # Kept case by case: a benchmark that is ended loses nothing.
            write_results(given.json, runs=results)


if __name__ == "__main__":
    main()
