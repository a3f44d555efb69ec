"""Launch a run, read what it left behind, and write results: shared by all benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


def launch_command(config: str, processes: int) -> list[str]:
    """Return the `accelerate launch` command with one of accelerate_configs/, up to the script."""
    return [*ACCELERATE, "--config_file", str(REPO / "accelerate_configs" / config), "--num_processes", str(processes)]


def run_logged(command: list[str], log: Path, limit: float, environ: dict[str, str] | None = None) -> int | str:
    """Run a command from the repository root, with its output in `log`; return its exit code, or that it took too long.

    Args:
        limit: seconds after which the command is ended.
        environ: variables to add to those of this process.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=REPO, env={**os.environ, **(environ or {})}, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            return f"over {limit} s"


def log_history(run: Path) -> list[dict[str, Any]]:
    """Return the log entries of a finished run."""
    return json.loads((run / "trainer_state.json").read_text())["log_history"]


def losses(run: Path) -> list[float]:
    """Return the logged training losses of a finished run."""
    return [entry["loss"] for entry in log_history(run) if "loss" in entry]


def reload(run: Path) -> dict[str, Any]:
    """Return the evaluation loss of the saved adapter or model, loaded without Unsloth on the first GPU."""
    command = [sys.executable, "-m", "benchmarks.common.reload", str(run.absolute())]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=environ)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-1500:]}


def make_model(
    shape: str,
    folder: Path,
    environ: dict[str, str] | None = None,
    *,
    sparse: bool = False,
    layers: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that writes a random-weight model, or one of zeros, of this shape (see models.py) to `folder`.

    Args:
        layers: of the model; None for those of the shape.
    """
    command = [sys.executable, "-m", "benchmarks.common.models", shape, str(folder.absolute())]
    command += ["--sparse"] if sparse else []
    command += ["--layers", str(layers)] if layers else []
    return subprocess.Popen(command, cwd=REPO, env={**os.environ, **(environ or {})})


def gpu_names() -> list[str]:
    """Return name and driver of each GPU of this machine; an empty list without one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return []


def write_results(path: Path, **content: Any) -> None:
    """Write results, with the command and the GPUs, to `path`; the file is replaced at once, never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"command": " ".join(sys.argv), "gpus": gpu_names(), **content}, indent=2) + "\n"
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(text)
    aside.replace(path)
