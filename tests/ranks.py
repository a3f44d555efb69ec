"""Run a function as N ranks of a job on this machine, as a launcher would, but without importing torch N times.

A fork server imports the stack once; every rank is forked from it with a launcher's environment variables. When
one rank fails the others are ended, as elastic launchers do.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch", "accelerate", "datasets", "peft", "transformers", "unsloth_ddp.training.trainer", "train_ddp",
    "unsloth_ddp.run.stages", "unsloth_ddp.distributed.watch.watchdog", "transformers.models.llama.modeling_llama",
    "peft.utils.transformers_weight_conversion", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "tests.frozen",
]  # fmt: skip
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


@dataclass
class Result:
    """What a job came to: one exit code and one output text a rank."""

    codes: list[int | None]
    outputs: list[str]
    seconds: float

    @property
    def output(self) -> str:
        """What all ranks printed."""
        return "\n".join(self.outputs)

    def check(self) -> Result:
        """Fail the test with everything that was printed unless every rank ended well."""
        assert self.codes == [0] * len(self.codes), f"exit codes {self.codes}\n{self.output}"
        return self


def run_ranks(
    count: int,
    target: Callable[..., None],
    *args: Any,
    folder: Path,
    environ: dict[str, str] | None = None,
    environ_of: Callable[[int], dict[str, str]] | None = None,
    timeout: float = 180,
    end: bool = True,
) -> Result:
    """Run `target(*args)` as `count` ranks with their output in `folder`; a job over `timeout` seconds is a hang.

    `end=False` leaves the other ranks of one that failed to themselves, as the launchers of other nodes would.
    `environ` is added to every rank's environment, `environ_of(rank)` to that rank's alone (to imitate nodes, say).
    """
    _start_fork_server()
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    began = time.monotonic()
    processes = []
    for rank in range(count):
        (folder / f"rank_{rank}.txt").touch()
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            **(environ or {}),
            **(environ_of(rank) if environ_of else {}),
        }
        process = _context.Process(target=_rank, args=(target, args, env, str(folder / f"rank_{rank}.txt")))
        process.start()
        processes.append(process)
    try:
        _wait_for(processes, began + timeout, end)
    finally:
        for process in processes:
            process.kill()
    outputs = [(folder / f"rank_{rank}.txt").read_text(errors="replace") for rank in range(count)]
    result = Result([p.exitcode for p in processes], outputs, time.monotonic() - began)
    assert result.seconds < timeout, f"the job hung for {timeout} s\n{result.output}"
    return result


@functools.cache
def _start_fork_server() -> None:
    """Import the stack now, so that no job's time counts it."""
    process = _context.Process(target=_nothing)
    process.start()
    process.join()


def _nothing() -> None:
    pass


def _wait_for(processes: list[Any], deadline: float, end: bool) -> None:
    running = list(processes)
    while running and time.monotonic() < deadline:
        wait([p.sentinel for p in running], timeout=deadline - time.monotonic())
        for process in [p for p in running if p.exitcode is not None]:
            running.remove(process)
            if end and process.exitcode != 0:
                for other in running:
                    other.terminate()
    for process in processes:
        process.join(timeout=1)


def _rank(target: Callable[..., None], args: tuple[Any, ...], env: dict[str, str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    for name in [n for n in os.environ if n.startswith(("ACCELERATE_", "TENSORBOARD_"))]:
        del os.environ[name]
    os.environ.update(env)
    code = 1
    try:
        target(*args)
        code = 0
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # As a script's process would: without the fork server's own clean-up.
    os._exit(code)


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def train(argv: list[str], cwd: str) -> None:
    """train_ddp.py with this command line, in this folder."""
    import train_ddp

    os.chdir(cwd)
    sys.argv = ["train_ddp.py", *argv]
    train_ddp.main()


def run_file(path: Path) -> None:
    """A Python file as the main program, in its own folder."""
    os.chdir(path.parent)
    runpy.run_path(path.name, run_name="__main__")
