"""Start a short job of two processes, of the kit or of TRL, whose processes can be killed.

The launcher behaves like an elastic launcher without importing torch anew. `fault_injection` starts and kills these
jobs. As a command this runs one rank, whose place in the job is in the environment:

    python -m benchmarks.robustness.killable_job PEER FOLDER ROWS
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.runs import REPO

RANKS = 2
ROWS, GLOBAL_BATCH, EPOCHS, SAVE_STEPS = 48, 4, 2, 2
STEPS = ROWS // GLOBAL_BATCH * EPOCHS
# A job that is over this has hung; elastic launchers give their ranks 30 s.
PATIENCE = 240.0
PRELOAD = ["torch", "accelerate", "datasets", "peft", "transformers", "unsloth_ddp.training.trainer", "train_ddp"]


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
    checkpoint = get_last_checkpoint(str(run)) if run.is_dir() else None
    trainer.train(resume_from_checkpoint=True if checkpoint else None)
    trainer.save_model()
    # Says that the model is written, as the kit's does.
    if trainer.args.process_index == 0:
        (run / "summary.json").write_text("{}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


JOBS: dict[str, Callable[[str, str], None]] = {"kit": kit_job, "cuda_graphs": cuda_graphs_job, "trl": trl_job}
ON_GPUS = ("cuda_graphs",)


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
    command = [sys.executable, "-m", "benchmarks.robustness.killable_job", peer, folder, rows]
    out = (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    return os.posix_spawn(
        command[0], command, {**os.environ, **environ}, file_actions=[out, (os.POSIX_SPAWN_DUP2, 1, 2)]
    )


def free_port() -> int:
    """Return a port for this process's job, below those that the system gives to connections of jobs beside it."""
    port = 20_000 + os.getpid() % 10_000
    while True:
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
        port += 1


def launcher(peer: str, folder: str, rows: str, logs: str, pids: Any) -> None:
    """Act as an elastic launcher: start the ranks, end all when one fails, forward signals, kill after 30 s."""
    port = free_port()
    # Shells start what runs in the background with SIGINT ignored, and the ranks would take that for a wish.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    children: list[int] = []
    for rank in range(RANKS):
        environ = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_RUN_ID": "torture", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        log = f"{logs}/rank_{rank}.txt"
        children.append(new_process(peer, folder, rows, environ, log) if peer in ON_GPUS else os.fork())
        if children[-1] == 0:
            rank_process(peer, folder, rows, environ, log)
    pids.send(children)
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: signals.append(n))
    running, failed, deadline = set(children), False, None
    while running:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.discard(pid)
                failed = failed or status != 0
        if (signals or failed) and deadline is None:
            deadline = time.monotonic() + 30
            for pid in running:
                os.kill(pid, signals[0] if signals else signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    os._exit(1 if failed or signals else 0)


# A process of multiprocessing may be polled by one thread at a time, and starting one polls all others.
POLLING = threading.Lock()


class Job:
    """Run a peer's job once: a launcher and its ranks."""

    def __init__(self, peer: str, folder: Path, rows: Path, logs: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        logs.mkdir(parents=True, exist_ok=True)
        receiver, sender = context.Pipe()
        self.process = context.Process(target=launcher, args=(peer, str(folder), str(rows), str(logs), sender))
        with POLLING:
            self.process.start()
        self.pids: list[int] = receiver.recv()
        # From here on: the fork server may first have had to import the stack.
        self.began = time.monotonic()

    def strike(self, number: int, victim: str) -> bool:
        """Send the signal to the targets that are still running; return whether there was one."""
        targets = {"rank 0": self.pids[:1], "rank 1": self.pids[1:], "both ranks": self.pids}
        running = [pid for pid in targets.get(victim, [int(self.process.pid or 0)]) if alive(pid)]
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return bool(running)

    def wait(self, seconds: float) -> bool:
        """Return whether the launcher ended within `seconds`."""
        multiprocessing.connection.wait([self.process.sentinel], max(0.0, seconds))
        return self.exit_code is not None

    @property
    def exit_code(self) -> int | None:
        """The launcher's exit code; None while it runs."""
        with POLLING:
            return self.process.exitcode

    def wait_for_save(self, run: Path, step: int, seconds: float) -> bool:
        """Return whether the launcher ended before a checkpoint of `step` or later was there for so many seconds.

        A job that writes none in PATIENCE is struck without one, and counts as hanging if it does not end then.
        """
        while time.monotonic() - self.began < PATIENCE and not any(
            int(folder.name.rpartition("-")[2]) >= step for folder in run.glob("checkpoint-*[0-9]")
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
        hung = self.exit_code is None or any(alive(pid) for pid in self.pids)
        if hung:
            for victim in ("both ranks", "launcher"):
                self.strike(signal.SIGKILL, victim)
            self.wait(10)
        return not hung


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


if __name__ == "__main__":
    JOBS[sys.argv[1]](*sys.argv[2:])
