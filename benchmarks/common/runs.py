"""Launch a run, read what it left behind, and write results: shared by all benchmarks."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unsloth_ddp.parity import weights
from unsloth_ddp.parity.processes import kill_tree
from unsloth_ddp.utils.files.json import write_json

REPO = Path(__file__).resolve().parents[2]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


def launch_command(config: str, processes: int) -> list[str]:
    """Return the `accelerate launch` command with one of accelerate_configs/, up to the script."""
    return [*ACCELERATE, "--config_file", str(REPO / "accelerate_configs" / config), "--num_processes", str(processes)]


def torchrun(processes: int) -> list[str]:
    """Return the command of torch's launcher on this machine, up to the script."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]


def run_logged(
    command: list[str], log: Path, limit: float, environ: dict[str, str] | None = None, cwd: Path = REPO
) -> int | str:
    """Run a command with its output in `log`; return its exit code, or that it took too long.

    Args:
        limit: seconds after which the command is killed, with everything that it started.
        environ: variables to add to those of this process.
    """
    environ = {**os.environ, **(environ or {})}
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=cwd, env=environ, stdout=file, stderr=subprocess.STDOUT)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        kill_tree(process)
        return f"over {limit:g} s"


def train(
    command: list[str], name: str, work: Path, limit: float, environ: dict[str, str] | None = None
) -> dict[str, Any]:
    """Run train_ddp.py to its end, in outputs/`name` of `work` and with its output in `name`.log.

    Args:
        command: up to the options of the run, without its output folder and its name.
        limit, environ: as of run_logged.

    Returns:
        name, command, exit_code and seconds; of a finished run its losses and summary, of another the end of its log.
    """
    command = [*command, "--output_dir", str(work / "outputs"), "--run_name", name]
    began, log, folder = time.perf_counter(), work / f"{name}.log", work / "outputs" / name
    code = run_logged(command, log, limit, environ)
    result: dict[str, Any] = {"name": name, "command": " ".join(command[1:]), "exit_code": code}
    result["seconds"] = round(time.perf_counter() - began, 1)
    if code or not (folder / "summary.json").is_file():
        return {**result, "log": log.read_text()[-4000:]}
    return {**result, "losses": losses(folder), "summary": json.loads((folder / "summary.json").read_text())}


def train_here(argv: list[str], **replaced: Callable[..., Any]) -> None:
    """Run train_ddp.py in this process, with functions of unsloth_ddp.run.stages replaced.

    Args:
        replaced: by name; each gets the function that it replaces before the arguments of the call.
    """
    import train_ddp
    from unsloth_ddp.run import stages

    for name, function in replaced.items():
        setattr(stages, name, functools.partial(function, getattr(stages, name)))
    sys.argv = ["train_ddp.py", *argv]
    train_ddp.main()


def log_history(run: Path) -> list[dict[str, Any]]:
    """Return the log entries of a finished run."""
    return json.loads((run / "trainer_state.json").read_text())["log_history"]


def losses(run: Path) -> list[float]:
    """Return the logged training losses of a finished run."""
    return [entry["loss"] for entry in log_history(run) if "loss" in entry]


def update_difference(work: Path, name: str, reference: str, initial: Path | None = None) -> float:
    """Return the difference of a run's weight update from that of a reference, over the norm of the latter.

    Args:
        work: of both runs, as in train().
        initial: folder of the model before training; None for adapters.
    """
    outputs = work / "outputs"
    return weights.update_difference(outputs / reference, outputs / name, initial, steps=1)[0]


def reload(run: Path) -> dict[str, Any]:
    """Return the evaluation loss of the saved adapter or model, loaded without Unsloth on the first GPU."""
    command = [sys.executable, "-m", "benchmarks.common.reload", str(run.absolute())]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    process = subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=environ)
    return json.loads(process.stdout.splitlines()[-1]) if process.returncode == 0 else {"error": process.stderr[-1500:]}


def make_model(
    shape: str, folder: Path, environ: dict[str, str] | None = None, *, sparse: bool = False, layers: int | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that writes a random-weight model, or one of zeros, of this shape (see models.py) to `folder`.

    Args:
        layers: of the model; None for those of the shape.
    """
    command = [sys.executable, "-m", "benchmarks.common.models", shape, str(folder.absolute())]
    command += ["--sparse"] if sparse else []
    command += ["--layers", str(layers)] if layers else []
    return subprocess.Popen(command, cwd=REPO, env={**os.environ, **(environ or {})})


def have_model(shape: str, folder: Path, environ: dict[str, str] | None = None) -> None:
    """Write the model of this shape unless it is there.

    Raises:
        SystemExit: it could not be made.
    """
    # The tokenizer is written last.
    exists = (folder / "tokenizer_config.json").is_file()
    if not exists and make_model(shape, folder, environ).wait():
        raise SystemExit(f"no model of shape {shape} could be made")


def gpu_names() -> list[str]:
    """Return name and driver of each GPU of this machine; an empty list without one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return []


def write_results(path: Path, **content: Any) -> None:
    """Write results, with the command and the GPUs, to `path`; the file is replaced at once, never half written."""
    write_json(path, {"command": " ".join(sys.argv), "gpus": gpu_names(), **content})
