"""Take a node from a running job and give it back: two nodes, one, and two again, against one node that is left alone.

    python -m benchmarks.robustness.fewer_nodes --sharding fsdp2 --json benchmarks/results/robustness/fewer_nodes.json
    python -m benchmarks.robustness.fewer_nodes --sharding none --cpu --json FILE

The "nodes" are one GPU of this machine each (see benchmarks/scaling/nodes.py), under `cluster/node.sh --min_nodes 1`.
The second one is killed after two checkpoints, and started again when the first has saved two more. SGD in fp32; the
adapters are compared.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.runs import REPO, write_results
from benchmarks.scaling.nodes import environ_of
from tests.cluster.jobs import difference
from unsloth_ddp.utils.versions import versions

PORT = 6301
# Seconds that anything may take.
PATIENCE = 400.0
OPTIONS = (
    "--no_preflight --config recipes/demo.yaml --precision fp32 --lr_scheduler_type constant --warmup_steps 0 "
    "--max_grad_norm 0 --optim sgd --learning_rate 0.02 --seed 5 --max_length 128 --compare_answers 0 --eval_strategy "
    "no --report_to none --global_batch_size 32 --per_device_train_batch_size 1 --logging_steps 1 --save_steps 5"
)


class Job:
    """Start and kill the nodes of one run."""

    def __init__(self, name: str, work: Path, words: list[str]) -> None:
        self.run = work / "outputs" / name
        self.logs = work / name
        self.command = ["bash", "cluster/node.sh", *OPTIONS.split(), *words, "--run_name", name]
        self.command += ["--output_dir", str(self.run.parent)]
        self.events: list[tuple[str, float]] = []
        self.began = time.monotonic()

    def start(self, node: int, port: int, **changed: str) -> subprocess.Popen[bytes]:
        """Start a node."""
        self.note(f"node {node} started")
        with Path(f"{self.logs}_{node}_{len(self.events)}.log").open("wb") as log:
            environ = environ_of(node, port, 1) | changed
            return subprocess.Popen(self.command, cwd=REPO, env=environ, stdout=log, stderr=subprocess.STDOUT)

    def note(self, event: str) -> None:
        """Keep when something happened, and the step of the newest complete checkpoint."""
        self.events.append((f"{event}, checkpoint {self.saved()}", round(time.monotonic() - self.began, 1)))
        print(self.events[-1], flush=True)

    def saved(self) -> int:
        """Return the step of the newest complete checkpoint."""
        found = [int(path.parent.name.rpartition("-")[2]) for path in self.run.glob("checkpoint-*/manifest.json")]
        return max(found, default=0)

    def said(self) -> str:
        """Return what all nodes have printed."""
        return "\n".join(path.read_text(errors="replace") for path in self.logs.parent.glob(f"{self.logs.name}_*.log"))

    def wait(self, happened: Any, event: str) -> None:
        """Wait until `happened()`.

        Raises:
            TimeoutError: with the end of what the nodes printed.
        """
        deadline = time.monotonic() + PATIENCE
        while not happened():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {event} in {PATIENCE:g} s:\n{self.said()[-4000:]}")
            time.sleep(0.1)
        self.note(event)


def main() -> None:
    """Read the command line, run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("/tmp/fewer_nodes"))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--sharding", choices=("none", "fsdp2"), default="fsdp2")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    words = ["--max_steps", str(given.steps), *(["--cpu"] if given.cpu else [])]
    job = Job("elastic", given.work, [*words, "--sharding", given.sharding, "--min_nodes", "1"])
    first, second = (job.start(node, PORT) for node in (0, 1))
    job.wait(lambda: job.saved() >= 10, "two checkpoints of two nodes")
    for process in [*psutil.Process(second.pid).children(recursive=True), psutil.Process(second.pid)]:
        process.kill()
    second.wait()
    job.note("node 1 killed")
    lost_at = job.saved()
    # On the GPU that is free now.
    whole = Job("whole", given.work, words)
    alone = whole.start(1, PORT + 10, NNODES="1", NODE_RANK="0")
    job.wait(lambda: job.saved() >= lost_at + 10, "two checkpoints of one node")
    again = job.start(1, PORT)
    job.wait(lambda: "world_size 1 -> 2" in job.said(), "two nodes again")
    codes = [first.wait(PATIENCE), again.wait(PATIENCE), alone.wait(PATIENCE)]
    job.note(f"ended with {codes}")
    result = {
        "sharding": given.sharding,
        "steps": given.steps,
        "codes": codes,
        "difference": difference(job.run, whole.run) if codes == [0, 0, 0] else None,
        "events": job.events,
        "said": job.said()[-3000:],
    }
    print({name: value for name, value in result.items() if name != "said"}, flush=True)
    write_results(given.json, versions=versions(), **result)


if __name__ == "__main__":
    main()
