"""Measure the demo on two OpenMP threads by how long they spin while they wait, on an idle and on a busy machine.

    python -m benchmarks.speed.openmp_waiting --json benchmarks/results/speed/openmp_waiting.json

GOMP_SPINCOUNT 300000 is what libgomp takes by itself on two cores, and 0 is OMP_WAIT_POLICY=PASSIVE. The busy machine runs
six other processes that compute all the time. A run without an end after --limit seconds has no speed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common.runs import REPO, write_results

COUNTS = (0, 10_000, 30_000, 100_000, 300_000)
OTHERS = 6
OPTIONS = (
    "--config recipes/demo.yaml --use_cpu --compare_answers 0 --eval_strategy no --save_strategy no --report_to none"
)


def measure(count: int, busy: bool, limit: float) -> dict[str, Any]:
    """Train for some steps; return the tokens per second of training, or None where the run did not end."""
    environ = {**os.environ, "GOMP_SPINCOUNT": str(count), "OMP_NUM_THREADS": "2"}
    result: dict[str, Any] = {"spin_count": count, "other_processes": OTHERS if busy else 0, "tokens_per_second": None}
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(OTHERS if busy else 0)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "train_ddp.py", *OPTIONS.split(), "--max_steps", "8" if busy else "100"]
            command += ["--output_dir", folder, "--run_name", "run"]
            subprocess.run(command, cwd=REPO, env=environ, capture_output=True, timeout=limit, check=True)
            summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
            result["tokens_per_second"] = round(summary["tokens_per_second"])
    except subprocess.TimeoutExpired:
        result["ended"] = f"no end in {limit:g} s"
    finally:
        for other in others:
            other.kill()
            other.wait()
    return result


def main() -> None:
    """Measure every count on the idle machine, then on the busy one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=120, help="seconds that a run may take")
    given = parser.parse_args()
    results = []
    for busy in (False, True):
        for count in COUNTS:
            results.append(measure(count, busy, given.limit))
            print(results[-1], flush=True)
            write_results(given.json, cores=os.cpu_count(), runs=results)


if __name__ == "__main__":
    main()
