"""Strike a job of two hosts at random moments, with restarts on, and compare its weights with an uninterrupted job's.

    uv run python -m benchmarks.robustness.restarts --runs 100 --at_once 2 --json FILE

The hosts are network namespaces (needs root and iproute2), each with one CPU process, started by `cluster/node.sh
--max_restarts 3`. A strike kills a rank, a host's launcher, or every process of a host whose cable is pulled first;
that host comes back within seconds, as a machine that reboots, and starts the same command. A job is struck once or
twice, the second time in a restart. Nothing else helps it: it has to end by itself, on both hosts, with exit code 0.

With `--network loopback` the hosts are groups of processes on this machine's loopback, where no namespaces can be made:
then a killed host's connections are closed rather than silent. The same command continues a results file that a time
limit (`--seconds`) left unfinished.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.common.runs import REPO
from benchmarks.robustness.cases import case_options, run_cases
from tests.cluster.hosts import Host, clean_environment, make_hosts

# A job writes so many checkpoints.
SAVES = 10
OPTIONS = (
    f"--cpu --no_preflight --max_restarts 3 --run_name run -m {REPO}/demo/model -d rows.jsonl --max_length 64 "
    "--learning_rate 0.001 --gradient_checkpointing none --global_batch_size 6 --lora_dropout 0.1 --report_to none "
    "--logging_steps 5"
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
            return any(b"accelerate" in word for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:3])
        return b"\0LOCAL_RANK=" in Path(f"/proc/{pid}/environ").read_bytes()
    return False


@dataclass
class LoopbackHost:
    """A group of processes that stands for a host (tests.cluster.hosts.Host), known by a variable they inherit."""

    # 127.0.0.1 as a number: node.sh refuses names that mean "this machine" on every node.
    name: ClassVar[str] = "2130706433"
    environ: dict[str, str]
    mark: str = field(default_factory=lambda: secrets.token_hex(8))

    def start(self, command: list[str], output: Path, environ: dict[str, str], cwd: Path) -> subprocess.Popen[bytes]:
        """Start `command` in this group, with all that it prints added to `output`."""
        marked = clean_environment() | environ | self.environ | {"BENCHMARK_HOST": self.mark}
        with output.open("ab") as file:
            return subprocess.Popen(
                command, cwd=cwd, env=marked, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )

    def pids(self) -> list[int]:
        """Return every process of this group."""
        mark = f"BENCHMARK_HOST={self.mark}\0".encode()
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if mark in content(path)]

    def slow(self, rate: str) -> None:
        """Do nothing: the loopback is as fast as it is."""

    def power_off(self) -> None:
        """Kill every process of this group, also those that are born meanwhile."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def reconnect(self) -> None:
        """Do nothing: the loopback was not cut."""


def content(path: Path) -> bytes:
    """Return what a file of /proc holds; nothing once its process ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def loopback_hosts(port: int) -> Iterator[list[LoopbackHost]]:
    """Yield two hosts whose jobs meet at this port, and kill their processes at the end."""
    hosts = [LoopbackHost({"MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}) for _ in range(2)]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.power_off()


@dataclass
class Job:
    """The job on two hosts, in a folder that both share."""

    hosts: Sequence[Host | LoopbackHost]
    folder: Path
    steps: int
    processes: list[subprocess.Popen[bytes]] = field(init=False)

    def __post_init__(self) -> None:
        rows = (REPO / "demo" / "train.jsonl").read_text().splitlines()[:ROWS]
        self.folder.mkdir()
        (self.folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
        self.hosts[1].slow(RATE)
        self.processes = [self._start(number) for number in range(2)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        environ = {"NNODES": "2", "NODE_RANK": str(number), "MASTER_ADDR": self.hosts[0].name}
        steps = ["--max_steps", str(self.steps), "--save_steps", str(self.steps // SAVES)]
        command = ["bash", str(REPO / "cluster" / "node.sh"), *OPTIONS, *steps]
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
            pids = [pid for pid in host.pids() if is_a(victim, pid)]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return bool(pids)
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


class Restarts:
    """Run the job again and again, each time in a folder of its own."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        (self.weights, _), (repeated, self.seconds) = self._uninterrupted(1), self._uninterrupted(2)
        assert self.weights == repeated, "the uninterrupted job does not repeat bit for bit"

    def hosts(self, number: int) -> contextlib.AbstractContextManager[Sequence[Host | LoopbackHost]]:
        """Return the two hosts of the job of this number."""
        # Of neighbouring jobs, and below the ports that the system gives to connections.
        return loopback_hosts(20_000 + 10 * number) if self.options.network == "loopback" else make_hosts(2)

    def _uninterrupted(self, number: int) -> tuple[str, float]:
        """Return the checksum of the uninterrupted job's adapter, and its seconds."""
        began, folder = time.monotonic(), self.work / f"reference-{number}"
        with self.hosts(self.options.runs + number) as hosts:
            job = Job(hosts, folder, self.options.steps)
            assert job.ended(PATIENCE), "the uninterrupted job hangs"
            checksum = job.result()
        assert checksum is not None, f"the uninterrupted job failed; see {folder}"
        return checksum, time.monotonic() - began

    def run(self, number: int) -> dict[str, Any]:
        """Run the job, strike it, wait for its end, and return what came of it."""
        dice = random.Random(self.options.seed * 100_003 + number)
        folder, strikes = self.work / f"run-{number}", []
        began = time.monotonic()
        with self.hosts(number) as hosts:
            job = Job(hosts, folder, self.options.steps)
            for _ in range(dice.choice((1, 1, 2))):
                fraction, victim, host = dice.random(), dice.choice(VICTIMS), dice.randrange(2)
                if job.ended(fraction * self.seconds):
                    break
                manifests = folder.glob("outputs/run/checkpoint-*/manifest.json")
                saved = max((int(path.parent.name.split("-")[1]) for path in manifests), default=0)
                struck = job.strike(victim, host, dice.uniform(0, 5))
                at = {"victim": victim, "host": host, "at_fraction": round(fraction, 3), "saved": saved}
                strikes.append(at | {"struck": struck})
            hung = not job.ended(PATIENCE)
            codes, checksum = [process.poll() for process in job.processes], job.result()
        identical = checksum == self.weights
        if identical:
            shutil.rmtree(folder)
        seconds = round(time.monotonic() - began, 1)
        result = {"run": number, "strikes": strikes, "seconds": seconds, "hung": hung, "exit_codes": codes}
        return result | {"bit_identical": identical}


def counts(results: list[dict[str, Any]]) -> dict[str, int]:
    """Return the totals over all runs."""
    return {
        "runs": len(results),
        "struck": sum(any(strike["struck"] for strike in run["strikes"]) for run in results),
        "struck_after_a_checkpoint": sum(any(s["struck"] and s["saved"] for s in run["strikes"]) for run in results),
        "hung": sum(run["hung"] for run in results),
        "ended_by_themselves": sum(run["exit_codes"] == [0, 0] for run in results),
        "bit_identical": sum(run["bit_identical"] for run in results),
    }


def main() -> None:
    """Read the command line, run, and write the results."""
    parser = case_options(__doc__, runs=100)
    parser.add_argument("--network", choices=("namespaces", "loopback"), default="namespaces")
    parser.add_argument("--steps", type=int, default=40, help="of a job, a multiple of 10 (default: %(default)s)")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="restarts_"))
    restarts = Restarts(options, work)
    settings = {"network": options.network, "seed": options.seed, "hosts": 2, "steps": options.steps}
    measured = {"uninterrupted_seconds": round(restarts.seconds, 1)}
    summary = run_cases(restarts.run, options, settings, measured, counts)
    if summary["bit_identical"] == summary["runs"]:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
