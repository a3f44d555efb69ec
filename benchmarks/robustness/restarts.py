"""Strike a job of two hosts at random moments, with restarts on, and compare its weights with an uninterrupted job's.

    uv run python -m benchmarks.robustness.restarts --runs 100 --json benchmarks/results/robustness/restarts.json

The hosts are network namespaces (needs root and iproute2), each with one CPU process, started by `cluster/node.sh
--max_restarts 3`. A strike kills a rank, a host's launcher, or every process of a host whose cable is pulled first; that
host comes back within seconds, as a machine that reboots, and starts the same command. A job is struck once or twice, the
second time in a restart. Nothing else helps it: it has to end by itself, on both hosts, with exit code 0.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.runs import REPO, write_results
from tests.cluster.hosts import Host, make_hosts
from unsloth_ddp.utils.versions import versions

STEPS, SAVE_STEPS = 40, 4
OPTIONS = (
    f"--cpu --no_preflight --max_restarts 3 --run_name run -m {REPO}/demo/model -d rows.jsonl --max_length 64 "
    "--learning_rate 0.001 --gradient_checkpointing none --global_batch_size 6 --lora_dropout 0.1 --report_to none "
    f"--logging_steps 5 --max_steps {STEPS} --save_steps {SAVE_STEPS}"
).split()
ROWS = 30
# Gradients of a step take a quarter of a second at this rate.
RATE = "20mbit"
VICTIMS = ("rank", "launcher", "host")
# A job that is not done after this time hangs.
PATIENCE = 600.0


def is_a(victim: str, pid: int) -> bool:
    """Return whether a process is a rank, or a host's launcher."""
    with contextlib.suppress(OSError):
        if victim == "launcher":
            return b"accelerate-launch" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1]
        return b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    return False


@dataclass
class Job:
    """The job on two hosts, in a folder that both share."""

    hosts: list[Host]
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(init=False)

    def __post_init__(self) -> None:
        rows = (REPO / "demo" / "train.jsonl").read_text().splitlines()[:ROWS]
        self.folder.mkdir()
        (self.folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
        self.hosts[1].slow(RATE)
        self.processes = [self._start(number) for number in range(2)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        environ = {"NNODES": "2", "NODE_RANK": str(number), "MASTER_ADDR": "node1"}
        command = ["bash", str(REPO / "cluster" / "node.sh"), *OPTIONS]
        return self.hosts[number].start(command, self.folder / f"node{number + 1}.txt", environ, self.folder)

    def ended(self, seconds: float) -> bool:
        """Return whether both hosts' commands end within this time."""
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def strike(self, victim: str, number: int, away: float) -> bool:
        """Kill `victim` of a host, and return whether there was one; a host is away for some seconds."""
        host = self.hosts[number]
        if victim != "host":
            found = [pid for pid in host.pids() if is_a(victim, pid)]
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return bool(found)
        host.power_off()
        self.processes[number].wait()
        time.sleep(away)
        host.reconnect()
        self.processes[number] = self._start(number)
        return True

    def result(self) -> str | None:
        """Return a checksum of the trained adapter; None if the job did not end well."""
        path = self.folder / "outputs" / "run" / "adapter_model.safetensors"
        well = [process.poll() for process in self.processes] == [0, 0]
        return hashlib.sha256(path.read_bytes()).hexdigest() if well and path.exists() else None


def uninterrupted(folder: Path) -> tuple[str, float]:
    """Return the checksum of the uninterrupted job's adapter, and its seconds."""
    began = time.monotonic()
    with make_hosts(2) as hosts:
        job = Job(hosts, folder)
        assert job.ended(PATIENCE), "the uninterrupted job hangs"
        found = job.result()
    assert found is not None, f"the uninterrupted job failed; see {folder}"
    return found, time.monotonic() - began


def once(index: int, seed: int, seconds: float, expected: str, folder: Path) -> dict[str, Any]:
    """Run the job, strike it, wait for its end, and return what came of it."""
    dice = random.Random(seed * 100_003 + index)
    strikes: list[dict[str, Any]] = []
    began = time.monotonic()
    with make_hosts(2) as hosts:
        job = Job(hosts, folder)
        for _ in range(dice.choice((1, 1, 2))):
            fraction, victim, number = dice.random(), dice.choice(VICTIMS), dice.randrange(2)
            if job.ended(fraction * seconds):
                break
            saved = [
                int(path.parent.name.split("-")[1]) for path in folder.glob("outputs/run/checkpoint-*/manifest.json")
            ]
            struck = job.strike(victim, number, dice.uniform(0, 5))
            strikes.append(
                {"victim": victim, "host": number, "at_fraction": round(fraction, 3), "saved": max(saved, default=0), "struck": struck}
            )  # fmt: skip
        hung = not job.ended(PATIENCE)
        codes, found = [process.poll() for process in job.processes], job.result()
    return {
        "run": index,
        "strikes": strikes,
        "seconds": round(time.monotonic() - began, 1),
        "hung": hung,
        "exit_codes": codes,
        "bit_identical": found == expected,
    }


def main() -> None:
    """Read the command line, run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no run after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="restarts_"))
    until = time.monotonic() + 60 * given.minutes
    (expected, _), (repeated, seconds) = uninterrupted(work / "reference"), uninterrupted(work / "repeated")
    assert expected == repeated, "the uninterrupted job does not repeat bit for bit"
    each: list[dict[str, Any]] = []
    for index in range(given.runs):
        if time.monotonic() > until:
            break
        folder = work / f"run-{index}"
        each.append(once(index, given.seed, seconds, expected, folder))
        print(each[-1], flush=True)
        if each[-1]["bit_identical"]:
            shutil.rmtree(folder)
        if given.json:
            struck = [run for run in each if any(strike["struck"] for strike in run["strikes"])]
            write_results(
                given.json,
                command=f"benchmarks/robustness/restarts.py --runs {given.runs} --seed {given.seed}",
                hosts=2,
                steps=STEPS,
                save_steps=SAVE_STEPS,
                uninterrupted_seconds=round(seconds, 1),
                cpus=os.cpu_count(),
                versions=versions(),
                runs=len(each),
                struck=len(struck),
                strikes_after_a_checkpoint=sum(any(s["struck"] and s["saved"] for s in run["strikes"]) for run in each),
                hung=sum(run["hung"] for run in each),
                ended_by_themselves=sum(run["exit_codes"] == [0, 0] for run in each),
                bit_identical=sum(run["bit_identical"] for run in each),
                each=each,
            )


if __name__ == "__main__":
    main()
