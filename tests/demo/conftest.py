"""The demo, run once for all tests of its result."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.conftest import REPO


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> SimpleNamespace:
    """The demo on two CPU processes, started as the README says, with the merged model beside it."""
    outputs = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
    command += ["train_ddp.py", "--output_dir", str(outputs), "--run_name", "demo", "--merge"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = outputs / "demo"
    return SimpleNamespace(
        text=done.stdout, errors=done.stderr, folder=folder, summary=json.loads((folder / "summary.json").read_text())
    )
