"""What the GPU benchmarks share: the repository, launching and reloading a run, and writing down what was seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


def launch_command(config: str, processes: int) -> list[str]:
    """accelerate launch with one of accelerate_configs/ and so many processes, up to the script."""
    return [*ACCELERATE, "--config_file", str(REPO / "accelerate_configs" / config), "--num_processes", str(processes)]


def log_history(run: Path) -> list[dict[str, Any]]:
    """The log lines of a finished run."""
    return json.loads((run / "trainer_state.json").read_text())["log_history"]


def losses(run: Path) -> list[float]:
    """The logged losses of a finished run."""
    return [entry["loss"] for entry in log_history(run) if "loss" in entry]


def reload(run: Path) -> dict[str, Any]:
    """The evaluation loss of the saved adapter or model, loaded in a process without Unsloth, on the first GPU."""
    command = [sys.executable, str(REPO / "benchmarks" / "reload.py"), str(run)]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=environ)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-1500:]}


def make_model(shape: str, folder: Path, environ: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start to write a model of gpu_models.py."""
    command = [sys.executable, str(REPO / "benchmarks" / "gpu_models.py"), shape, str(folder)]
    return subprocess.Popen(command, cwd=REPO, env={**os.environ, **(environ or {})})


def gpu_names() -> list[str]:
    """Name and driver of each GPU of this machine; empty without one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    except OSError:
        return []


def write_results(path: Path, **content: Any) -> None:
    """Write what was measured, with the command and the GPUs, to `path`; a file that is there is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"command": " ".join(sys.argv), "gpus": gpu_names(), **content}, indent=2) + "\n"
    aside = path.with_name(f"{path.name}.part")
    aside.write_text(text)
    aside.replace(path)
