"""Kill a short two-process job at random moments and check what is left of it.

    uv run python -m benchmarks.robustness.fault_injection --runs 200 --at_once 4 --json FILE
    uv run python -m benchmarks.robustness.fault_injection --runs 200 --peer trl --json FILE
    uv run python -m benchmarks.robustness.fault_injection --runs 5 --peer cuda_graphs --json FILE

Each run starts the job under a launcher (a process that behaves like an elastic launcher without importing torch
anew). It then sends a random signal to a random process at a random moment, or lets the job's disk (a tmpfs, which
needs root) fill up, and starts the same command again, at most twice, until the job is done. A run that ended before
its signal is repeated with another moment.

Counts damaged offers (the checkpoint that the next start would resume from lacks a file that the uninterrupted job's
checkpoints have, or holds one that cannot be read), hangs, failed starts, jobs that never finished, and final weights
that are not bit-identical to the uninterrupted job's. `--peer trl` does the same to TRL's SFTTrainer with
`resume_from_checkpoint=True` whenever it finds a checkpoint. `--peer cuda_graphs` is the kit on two GPUs, with packs
and CUDA graphs, which run one case at a time. Moments are the same fractions of the peer's own duration, measured on
its latest undisturbed start. The same command continues a results file that `--seconds` left unfinished.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.runs import REPO
from benchmarks.robustness.cases import case_options, run_cases
from benchmarks.robustness.killable_job import JOBS, ON_GPUS, RANKS, ROWS, SAVE_STEPS, STEPS, Job

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
VICTIMS = ("rank 0", "rank 1", "both ranks", "launcher")
# A second start that is offered the same as the first fails like the first.
STARTS = 2
# Peers that spend most of their time on imports and compilation: most of their signals come after a chosen save.
STRUCK_AFTER_SAVES = ("cuda_graphs",)


def weights(folder: Path) -> str | None:
    """Return a checksum of the finished job's adapter; None if there is none."""
    path = folder / "run" / "adapter_model.safetensors"
    done = (folder / "run" / "summary.json").exists()
    return hashlib.sha256(path.read_bytes()).hexdigest() if done and path.exists() else None


def offered(peer: str, run: Path) -> Path | None:
    """Return the checkpoint that the next start would resume from."""
    if peer == "trl":
        from transformers.trainer_utils import get_last_checkpoint

        last = get_last_checkpoint(str(run)) if run.is_dir() else None
        return Path(last) if last else None
    from unsloth_ddp.checkpoints import manifest

    newest, _ = manifest.newest(manifest.step_folders(run), manifest.verify)
    return newest and newest[0]


def damage(folder: Path, names: set[str]) -> str | None:
    """Return what is wrong with a checkpoint that should hold `names`, whatever its manifest says; None if whole."""
    from safetensors import safe_open

    for name in sorted(names):
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="np") as tensors:
                    for key in tensors.keys():  # noqa: SIM118
                        tensors.get_tensor(key)
            elif path.suffix in (".pt", ".pth", ".bin"):
                with zipfile.ZipFile(path) as archive:
                    broken = archive.testzip()
                if broken:
                    return f"{name} is damaged at {broken}"
            elif path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            elif not path.stat().st_size:
                return f"{name} is empty"
        except Exception as error:
            return f"{name} cannot be read: {type(error).__name__}"
    return None


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Callable[[], None]]:
    """Mount a tmpfs at `folder`; the yielded callable enlarges it."""
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "torture", str(folder)]
    subprocess.run(["mount", *options], check=True)
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,size=1g", str(folder)], check=True) and None
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@dataclasses.dataclass(frozen=True)
class Reference:
    """Describe the uninterrupted job: seconds, checksum of its weights, files of a checkpoint, kilobytes of all."""

    seconds: float
    weights: str
    names: set[str]
    kilobytes: int


class FaultInjection:
    """Run one peer's job again and again in the folder `work`."""

    def __init__(self, peer: str, seed: int, work: Path) -> None:
        self.peer, self.seed, self.work = peer, seed, work
        self.rows = work / "rows.jsonl"
        self.rows.write_text("\n".join((REPO / "demo" / "train.jsonl").read_text().splitlines()[:ROWS]) + "\n")
        first, second = self._uninterrupted(1), self._uninterrupted(2)
        assert first.weights == second.weights, "the uninterrupted job does not repeat bit for bit"
        self.reference = second
        # How long the latest start that nothing struck took: other work on the machine changes it.
        self.seconds = second.seconds
        self.can_mount = os.geteuid() == 0 and self._mounts()

    def _mounts(self) -> bool:
        """Return whether this machine lets a disk be mounted; containers often do not."""
        folder = self.work / "disk"
        folder.mkdir(exist_ok=True)
        try:
            with small_disk(folder, 200):
                return True
        except subprocess.CalledProcessError:
            return False

    def _uninterrupted(self, number: int) -> Reference:
        folder = self.work / f"reference-{number}"
        folder.mkdir()
        logs = self.work / f"logs-reference-{number}"
        job = Job(self.peer, folder, self.rows, logs)
        assert job.ended() and job.exit_code == 0, f"the uninterrupted job failed; see {logs}"
        seconds = time.monotonic() - job.began
        checksum, last = weights(folder), folder / "run" / f"checkpoint-{STEPS}"
        names = {path.name for path in last.iterdir()}
        assert checksum is not None and damage(last, names) is None
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1024
        return Reference(seconds, checksum, names, size)

    def run(self, index: int) -> dict[str, Any]:
        """Start the job, strike it, and start it again until it is done; return the result."""
        dice = random.Random(self.seed * 100_003 + index)
        folder, logs = self.work / f"run-{index}", self.work / f"logs-{index}"
        disk = self.can_mount and dice.random() < 0.15
        result: dict[str, Any] = {"run": index, "disk_full": disk}
        with contextlib.ExitStack() as stack:
            if disk:
                folder.mkdir()
                size = dice.randrange(200, self.reference.kilobytes)
                grow = stack.enter_context(small_disk(folder, size))
                job = Job(self.peer, folder, self.rows, logs / "0")
                result |= {"disk_kilobytes": size, "hangs": int(not job.ended())}
                grow()
            else:
                result |= self._strike(dice, folder, logs)
            result |= self._finish(folder, logs)
        result["hangs"] += result.pop("hangs_of_starts")
        shutil.rmtree(folder, ignore_errors=True)
        if not is_bad(result):
            shutil.rmtree(logs, ignore_errors=True)
        return result

    def _strike(self, dice: random.Random, folder: Path, logs: Path) -> dict[str, Any]:
        while True:
            folder.mkdir()
            fraction, number, victim = dice.random(), dice.choice(SIGNALS), dice.choice(VICTIMS)
            save = dice.randrange(0, STEPS, SAVE_STEPS) if self.peer in STRUCK_AFTER_SAVES else 0
            job = Job(self.peer, folder, self.rows, logs / "0")
            # A step and the save behind it take about a tenth of a second.
            over = job.wait_for_save(folder / "run", save, fraction / 10) if save else job.wait(fraction * self.seconds)
            struck = not over and job.strike(number, victim)
            began = time.monotonic()
            ended = job.ended()
            if struck:
                break
            self.seconds = time.monotonic() - job.began
            shutil.rmtree(folder)
        at = {"signal": number.name, "victim": victim, "at_fraction": round(fraction, 3), "after_save": save}
        return at | {"seconds_to_end": round(time.monotonic() - began, 1), "hangs": int(not ended)}

    def _finish(self, folder: Path, logs: Path) -> dict[str, Any]:
        starts = hangs = failed = 0
        offers: list[str | None] = []
        damaged: dict[str, str] = {}
        while weights(folder) is None and starts < STARTS:
            starts += 1
            offer = offered(self.peer, folder / "run")
            offers.append(offer.name if offer else None)
            wrong = damage(offer, self.reference.names) if offer else None
            if offer and wrong:
                damaged[offer.name] = wrong
            again = Job(self.peer, folder, self.rows, logs / str(starts))
            hangs += not again.ended()
            failed += again.exit_code != 0
            if offer is None and again.exit_code == 0:
                self.seconds = time.monotonic() - again.began
        checksum = weights(folder)
        return {
            "starts": starts,
            "offered": offers,
            "damaged": damaged,
            "hangs_of_starts": hangs,
            "failed_starts": failed,
            "finished": checksum is not None,
            "bit_identical": checksum == self.reference.weights,
        }


def is_bad(result: dict[str, Any]) -> bool:
    """Return whether a run lost anything."""
    return bool(result["damaged"] or result["hangs"] or result["failed_starts"]) or not result["bit_identical"]


def counts(results: list[dict[str, Any]]) -> dict[str, int]:
    """Return the totals over all runs."""
    offers = [result["offered"][0] if result["offered"] else None for result in results]
    return {
        "runs": len(results),
        "disk_full_runs": sum(r["disk_full"] for r in results),
        "needed_no_start": sum(r["starts"] == 0 for r in results),
        "offered_a_checkpoint": sum(offer is not None for offer in offers),
        "damaged_offers": sum(bool(r["damaged"]) for r in results),
        "hangs": sum(r["hangs"] for r in results),
        "runs_with_a_failed_start": sum(bool(r["failed_starts"]) for r in results),
        "unfinished": sum(not r["finished"] for r in results),
        "finished_with_other_weights": sum(r["finished"] and not r["bit_identical"] for r in results),
        "bit_identical": sum(r["bit_identical"] for r in results),
    }


def inject_faults(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return the counts and every result of the runs that `options` ask for."""
    place = FaultInjection(options.peer, options.seed, work)
    settings = {"peer": options.peer, "seed": options.seed, "steps": STEPS, "save_steps": SAVE_STEPS, "ranks": RANKS}
    measured = {"uninterrupted_seconds": round(place.reference.seconds, 1)}
    return run_cases(place.run, options, settings, measured, counts)


def read_options(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of these words, or of the command line."""
    parser = case_options(__doc__, runs=200)
    parser.add_argument("--peer", choices=JOBS, default="kit")
    parser.add_argument("--work", type=Path, help="a folder for the runs, kept; default: a temporary one")
    return parser.parse_args(words)


def main() -> None:
    """Run what the command line asks for."""
    options = read_options()
    if options.peer not in ON_GPUS:
        # Forked ranks could not use CUDA, and need not look for it.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    work = options.work or Path(tempfile.mkdtemp(prefix="torture_"))
    work.mkdir(parents=True, exist_ok=True)
    inject_faults(options, work.resolve())
    if not options.work:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
