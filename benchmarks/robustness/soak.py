"""Train for thousands of steps and check that memory, open files and threads of every rank stay flat.

    uv run python -m benchmarks.robustness.soak --json benchmarks/results/robustness/soak.json

Two CPU processes train the demo's model under torch's launcher, with a log line and a TensorBoard event every step, a
checkpoint every 20 (two are kept) and an evaluation every 100. 3600 steps equal an hour on a GPU at one second a step.
Resident memory, open file descriptors and threads of every rank are read every few seconds.

The verdict ignores the first fifth of the steps. Memory is flat if a fitted line rises by less than 4 MiB in 1000
steps; files and threads are flat if their medians over the first and the last third are equal. Of those 4 MiB, the list
of log entries that Transformers keeps takes about 0.5, and writing it into every checkpoint 0.4 more in the main
process, whose threads that read a checkpoint for its checksums also take some MiB, once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.runs import REPO, torchrun
from unsloth_ddp.utils.versions import versions

RANKS = 2
STEPS, SAVE_STEPS, EVAL_STEPS = 3600, 20, 100
WARM_UP = 0.2
MIB_PER_1000_STEPS = 4.0
OPTIONS = (
    "--model demo/model --dataset demo/train.jsonl --eval_dataset demo/eval.jsonl --max_length 64 --learning_rate "
    f"0.001 --global_batch_size 2 --logging_steps 1 --save_steps {SAVE_STEPS} --save_total_limit 2 --eval_steps "
    f"{EVAL_STEPS} --report_to tensorboard --gradient_checkpointing none --use_cpu"
)


@dataclass(frozen=True)
class Sample:
    """Hold one reading of a rank: seconds since the start, step, MiB resident, open files, threads."""

    seconds: float
    step: int
    mib: float
    files: int
    threads: int


def slope(samples: Sequence[Sample]) -> float:
    """Return MiB in 1000 steps by least squares; 0 if all samples are of one step."""
    steps, mib = [s.step for s in samples], [s.mib for s in samples]
    if len(set(steps)) < 2:
        return 0.0
    return 1000 * statistics.linear_regression(steps, mib).slope


def judge(samples: Sequence[Sample], bound: float = MIB_PER_1000_STEPS) -> dict[str, Any]:
    """Return the growth of one rank after warm-up, and whether it stayed flat.

    Args:
        bound: MiB in 1000 steps under which memory counts as flat.
    """
    last = max(sample.step for sample in samples)
    warm = [sample for sample in samples if sample.step >= WARM_UP * last]
    third = max(1, len(warm) // 3)
    early, late = warm[:third], warm[-third:]

    def medians(name: str) -> list[float]:
        return [round(statistics.median(getattr(s, name) for s in part), 1) for part in (early, late)]

    growth = slope(warm)
    found: dict[str, Any] = {
        "samples_after_warm_up": len(warm),
        "mib_per_1000_steps": round(growth, 3),
        "mib": medians("mib"),
        "open_files": medians("files"),
        "most_open_files": max(s.files for s in warm),
        "threads": medians("threads"),
    }
    found["flat"] = {
        "memory": growth < bound,
        "open_files": found["open_files"][0] == found["open_files"][1],
        "threads": found["threads"][0] == found["threads"][1],
    }
    return found


# ---- the job ----


def ranks_of(launcher: psutil.Process) -> dict[int, psutil.Process]:
    """Return the launcher's running ranks by number."""
    found = {}
    for child in launcher.children():
        with contextlib.suppress(psutil.Error):
            environ = child.environ() if "train_ddp.py" in " ".join(child.cmdline()) else {}
            # A process that is ending has no environment any more.
            if "RANK" in environ:
                found[int(environ["RANK"])] = child
    return found


def current_step(log: Path) -> int:
    """Return the newest step in a rank's log; 0 before the first."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            found = re.findall(rb" step (\d+) \{", file.read())
    except OSError:
        return 0
    return int(found[-1]) if found else 0


def look(process: psutil.Process, seconds: float, step: int) -> Sample:
    """Read one rank now.

    Raises:
        psutil.Error: it has ended.
    """
    with process.oneshot():
        mib = process.memory_info().rss / 2**20
        return Sample(round(seconds, 1), step, round(mib, 2), process.num_fds(), process.num_threads())


def soak(steps: int, work: Path, every: float, max_time: str | None = None) -> dict[str, Any]:
    """Run the job and watch it; return all samples and the verdict.

    Args:
        every: seconds between two readings.
        max_time: the kit's option of that name, for machines on which the steps may take too long.
    """
    options = f"{OPTIONS} --max_steps {steps}" + (f" --max_time {max_time}" if max_time else "")
    command = [*torchrun(RANKS), "train_ddp.py", *options.split()]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "UNSLOTH_DDP_EXIT_CODE_FILE": str(work / "code")}
    samples: dict[int, list[Sample]] = {rank: [] for rank in range(RANKS)}
    run, began, most = work / "soak", time.monotonic(), 0
    with (work / "output.txt").open("w") as output:
        job = subprocess.Popen(
            [*command, "--output_dir", str(work), "--run_name", "soak"],
            cwd=REPO,
            env=environ,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while job.poll() is None:
                step = current_step(run / "logs" / "rank_0.log")
                for rank, process in ranks_of(psutil.Process(job.pid)).items():
                    with contextlib.suppress(psutil.Error):
                        if 0 < step < steps:
                            samples[rank].append(look(process, time.monotonic() - began, step))
                most = max(most, len([*run.glob("checkpoint-*")]))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(every)
        finally:
            job.kill()
    note = work / "code"
    code = int(note.read_text()) if note.exists() else job.returncode
    if code not in (0, 75):
        raise RuntimeError(f"the job ended with {code}:\n" + (work / "output.txt").read_text()[-3000:])
    verdicts = {rank: judge(seen) for rank, seen in samples.items()}
    return {
        "job": " ".join(["python", *command[1:]]),
        "steps": current_step(run / "logs" / "rank_0.log"),
        "seconds": round(time.monotonic() - began),
        "most_checkpoints_at_once": most,
        "bound_mib_per_1000_steps": MIB_PER_1000_STEPS,
        "flat": all(all(verdict["flat"].values()) for verdict in verdicts.values()),
        "ranks": verdicts,
        "cpus": os.cpu_count(),
        "versions": versions(),
        "samples": {rank: [list(dataclasses.astuple(s)) for s in seen] for rank, seen in samples.items()},
    }


def main() -> None:
    """Read the command line, run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two looks at the ranks")
    parser.add_argument("--max_time", help="end the job after this time, with the verdict on its steps so far")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak_") as work:
        found = soak(given.steps, Path(work), given.every, given.max_time)
    print(json.dumps({name: value for name, value in found.items() if name != "samples"}, indent=1))
    print("flat" if found["flat"] else "NOT flat")
    if given.json:
        given.json.write_text(json.dumps(found) + "\n", encoding="utf-8")
    sys.exit(not found["flat"])


if __name__ == "__main__":
    main()
