"""Kill a short two-process job at random moments and check what is left of it.

    uv run python -m benchmarks.robustness.fault_injection --runs 200 --json benchmarks/results/robustness/torture.json
    uv run python -m benchmarks.robustness.fault_injection --runs 200 --peer trl --json benchmarks/results/robustness/torture_trl.json
    uv run python -m benchmarks.robustness.fault_injection --runs 5 --peer cuda_graphs --json FILE

Each run starts the job under a launcher (a process that behaves like an elastic launcher without importing torch
anew). It then sends a random signal to a random process at a random moment, or lets the job's disk (a tmpfs, which
needs root) fill up, and starts the same command again, at most twice, until the job is done. A run that ended before
its signal is repeated with another moment.

Counts damaged offers (the checkpoint that the next start would resume from lacks a file that the uninterrupted job's
checkpoints have, or holds one that cannot be read), hangs, failed starts, jobs that never finished, and final weights
that are not bit-identical to the uninterrupted job's. `--peer trl` does the same to TRL's SFTTrainer with
`resume_from_checkpoint=True` whenever it finds a checkpoint. `--peer cuda_graphs` is the kit on two GPUs, with packs and CUDA
graphs. Moments are the same fractions of the peer's own
duration, measured on its latest undisturbed start.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.common.runs import REPO

RANKS = 2
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
VICTIMS = ("rank 0", "rank 1", "both ranks", "launcher")
ROWS, GLOBAL_BATCH, EPOCHS, SAVE_STEPS = 48, 4, 2, 2
STEPS = ROWS // GLOBAL_BATCH * EPOCHS
# A job that is over this has hung; elastic launchers give their ranks 30 s.
PATIENCE = 240.0
# A second start that is offered the same as the first fails like the first.
STARTS = 2
PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors")
PRELOAD = ["torch", "accelerate", "datasets", "peft", "transformers", "unsloth_ddp.training.trainer", "train_ddp"]


# ---- one rank ----


def kit_job(folder: str, rows: str, more: str = "--max_length 64 --use_cpu") -> None:
    """Run the kit's job in the folder <folder>/run."""
    import train_ddp

    options = f"""--model {REPO}/demo/model --dataset {rows} --output_dir {folder} --run_name run --lora_dropout 0.1
        --learning_rate 0.01 --global_batch_size {GLOBAL_BATCH} --num_train_epochs {EPOCHS} --save_steps {SAVE_STEPS}
        --save_total_limit 2 --gradient_checkpointing none --report_to none {more}"""
    sys.argv = ["train_ddp.py", *options.split()]
    train_ddp.main()


def cuda_graphs_job(folder: str, rows: str) -> None:
    """Run the kit's job with packs and CUDA graphs on two GPUs."""
    kit_job(folder, rows, f"--max_length 64 --packing on --cuda_graphs on --backend transformers --max_steps {STEPS}")


def trl_job(folder: str, rows: str) -> None:
    """Run the same rows, model and steps in TRL's trainer, as its documentation shows."""
    import torch
    from peft import LoraConfig
    from transformers import Trainer
    from transformers.trainer_utils import get_last_checkpoint
    from trl import SFTConfig, SFTTrainer

    from unsloth_ddp.checkpoints.resume_point import make_cpu_checkpoints_readable

    # Without these two TRL does not train on a CPU, or not resume on two.
    make_cpu_checkpoints_readable()

    class OnCpu(SFTTrainer):
        compute_loss = Trainer.compute_loss

    import datasets

    torch.set_num_threads(1)
    run = Path(folder) / "run"
    config = SFTConfig(
        output_dir=str(run), use_cpu=True, bf16=False, per_device_train_batch_size=1, num_train_epochs=EPOCHS,
        gradient_accumulation_steps=GLOBAL_BATCH // RANKS, learning_rate=0.01, save_steps=SAVE_STEPS,
        save_total_limit=2, max_length=64, report_to=[], gradient_checkpointing=False, disable_tqdm=True, seed=42,
    )  # fmt: skip
    data = datasets.Dataset.from_list([json.loads(line) for line in Path(rows).read_text().splitlines()])
    lora = LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = OnCpu(model=f"{REPO}/demo/model", args=config, train_dataset=data, peft_config=lora)
    found = get_last_checkpoint(str(run)) if run.is_dir() else None
    trainer.train(resume_from_checkpoint=True if found else None)
    trainer.save_model()
    # Says that the model is written, as the kit's does.
    if trainer.args.process_index == 0:
        (run / "summary.json").write_text("{}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


JOBS: dict[str, Callable[[str, str], None]] = {"kit": kit_job, "cuda_graphs": cuda_graphs_job, "trl": trl_job}
ON_GPUS = ("cuda_graphs",)
# Peers that spend most of their time on imports and compilation: most of their signals come after a chosen save.
STRUCK_AFTER_SAVES = ("cuda_graphs",)


def rank_process(peer: str, folder: str, rows: str, environ: dict[str, str], log: str) -> None:
    """Run one rank, forked from the launcher; never returns."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ.update(environ)
    code = 1
    try:
        JOBS[peer](folder, rows)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def new_process(peer: str, folder: str, rows: str, environ: dict[str, str], log: str) -> int:
    """Start one rank that imports everything anew, as CUDA cannot be used after a fork; return its process id."""
    command = [sys.executable, "-m", "benchmarks.robustness.fault_injection", "--rank", peer, folder, rows]
    out = (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    return os.posix_spawn(
        command[0], command, {**os.environ, **environ}, file_actions=[out, (os.POSIX_SPAWN_DUP2, 1, 2)]
    )


def launcher(peer: str, folder: str, rows: str, logs: str, pids: Any) -> None:
    """Act as an elastic launcher: start the ranks, end all when one fails, forward signals, kill after 30 s."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Shells start what runs in the background with SIGINT ignored, and the ranks would take that for a wish.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    children: list[int] = []
    for rank in range(RANKS):
        environ = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "torture",
            "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        log = f"{logs}/rank_{rank}.txt"
        children.append(new_process(peer, folder, rows, environ, log) if peer in ON_GPUS else os.fork())
        if children[-1] == 0:
            rank_process(peer, folder, rows, environ, log)
    pids.send(children)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: asked.append(n))
    running, failed, deadline = set(children), False, None
    while running:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                running.discard(pid)
                failed = failed or status != 0
        if (asked or failed) and deadline is None:
            deadline = time.monotonic() + 30
            for pid in running:
                os.kill(pid, asked[0] if asked else signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    os._exit(1 if failed or asked else 0)


# ---- one run ----


class Job:
    """Run the job once: a launcher and its ranks."""

    def __init__(self, peer: str, folder: Path, rows: Path, logs: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        logs.mkdir(parents=True, exist_ok=True)
        here, there = context.Pipe()
        self.process = context.Process(target=launcher, args=(peer, str(folder), str(rows), str(logs), there))
        self.process.start()
        self.pids: list[int] = here.recv()
        # From here on: the fork server may first have had to import the stack.
        self.began = time.monotonic()

    def strike(self, number: int, victim: str) -> bool:
        """Send the signal to the targets that are still running; return whether there was one."""
        targets = {"rank 0": self.pids[:1], "rank 1": self.pids[1:], "both ranks": self.pids}
        there = [pid for pid in targets.get(victim, [int(self.process.pid or 0)]) if alive(pid)]
        for pid in there:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(there)

    def wait(self, seconds: float) -> bool:
        """Return whether the launcher ended within `seconds`."""
        self.process.join(max(0.0, seconds))
        return self.process.exitcode is not None

    def wait_for_save(self, run: Path, step: int, seconds: float) -> bool:
        """Return whether the launcher ended before a checkpoint of `step` or later was there for so many seconds.

        A job that writes none in PATIENCE is struck without one, and counts as hanging if it does not end then.
        """
        while time.monotonic() - self.began < PATIENCE and not any(
            int(found.name.rpartition("-")[2]) >= step for found in run.glob("checkpoint-*[0-9]")
        ):
            if self.wait(0.005):
                return True
        return self.wait(seconds)

    def ended(self) -> bool:
        """Return whether launcher and ranks ended in time; kill what is left."""
        deadline = self.began + PATIENCE
        self.wait(deadline - time.monotonic())
        while any(alive(pid) for pid in self.pids) and time.monotonic() < deadline:
            time.sleep(0.05)
        hung = self.process.exitcode is None or any(alive(pid) for pid in self.pids)
        if hung:
            self.strike(signal.SIGKILL, "both ranks")
            self.process.kill()
            self.process.join()
        return not hung


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


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
    from unsloth_ddp.checkpoints import folders, manifest

    newest, _ = manifest.newest(folders.step_folders(run), manifest.verify)
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
    """Describe the uninterrupted job: duration, checksum of its weights, files of a checkpoint, kilobytes of all files."""

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
        self.can_mount = os.geteuid() == 0

    def _uninterrupted(self, number: int) -> Reference:
        folder = self.work / f"reference-{number}"
        folder.mkdir()
        logs = self.work / f"logs-reference-{number}"
        job = Job(self.peer, folder, self.rows, logs)
        assert job.ended() and job.process.exitcode == 0, f"the uninterrupted job failed; see {logs}"
        seconds = time.monotonic() - job.began
        found, last = weights(folder), folder / "run" / f"checkpoint-{STEPS}"
        names = {path.name for path in last.iterdir()}
        assert found is not None and damage(last, names) is None
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) // 1024
        return Reference(seconds, found, names, size)

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
            failed += again.process.exitcode != 0
            if offer is None and again.process.exitcode == 0:
                self.seconds = time.monotonic() - again.began
        found = weights(folder)
        return {
            "starts": starts,
            "offered": offers,
            "damaged": damaged,
            "hangs_of_starts": hangs,
            "failed_starts": failed,
            "finished": found is not None,
            "bit_identical": found == self.reference.weights,
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


def inject_faults(
    peer: str, runs: int, seed: int, work: Path, report: Callable[[dict[str, Any]], None], until: float
) -> dict[str, Any]:
    """Return the counts and every result of `runs` runs, or of as many as begin before `until` (time.time()).

    Args:
        report: gets the same after every run.
    """
    place = FaultInjection(peer, seed, work)
    facts = {
        "command": f"benchmarks/robustness/fault_injection.py --runs {runs} --seed {seed} --peer {peer}",
        "peer": peer,
        "steps": STEPS,
        "save_steps": SAVE_STEPS,
        "ranks": RANKS,
        "uninterrupted_seconds": round(place.reference.seconds, 1),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: metadata.version(name) for name in PACKAGES},
    }
    results: list[dict[str, Any]] = []
    found: dict[str, Any] = facts | counts(results) | {"each": results}
    for index in range(runs):
        if time.time() > until:
            break
        results.append(place.run(index))
        found = facts | counts(results) | {"each": results}
        report(found)
    return found


def main() -> None:
    """Read the command line, run, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no run after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peer", choices=JOBS, default="kit")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, help="a folder for the runs, kept; default: a temporary one")
    parser.add_argument("--rank", nargs=3, metavar=("PEER", "FOLDER", "ROWS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        peer, folder, rows = given.rank
        JOBS[peer](folder, rows)
        return
    work = given.work or Path(tempfile.mkdtemp(prefix="torture_"))
    work.mkdir(parents=True, exist_ok=True)

    def report(found: dict[str, Any]) -> None:
        print(found["each"][-1], flush=True)
        if given.json:
            aside = given.json.with_suffix(".partial")
            aside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            aside.replace(given.json)

    found = inject_faults(given.peer, given.runs, given.seed, work.resolve(), report, time.time() + 60 * given.minutes)
    print({name: value for name, value in found.items() if name != "each"}, flush=True)
    if not given.work:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
