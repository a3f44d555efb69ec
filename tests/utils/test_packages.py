"""A Python without the kit's packages is told in one sentence, and nothing else is changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO
from unsloth_ddp.utils.packages import PROJECT, missing_packages

COMMANDS = ["train_ddp.py", "-m unsloth_ddp.runs outputs", "-m unsloth_ddp.preflight", "notebook_to_script.py a b"]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_without_the_packages_ends_with_one_sentence(command: str) -> None:
    # -S leaves out site-packages, where the packages of the environment lie.
    done = subprocess.run([sys.executable, "-S", *command.split()], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(
        f"error: this Python ({sys.executable}) lacks accelerate, datasets, huggingface-hub and "
    )
    assert "begin the command with `uv run`" in done.stderr and done.stderr.count("\n") == 1


def test_the_packages_of_this_environment_are_found(tmp_path: Path) -> None:
    assert missing_packages(PROJECT) == []
    assert missing_packages(tmp_path / "pyproject.toml") == []
    (tmp_path / "pyproject.toml").write_text('[project]\ndependencies = ["numpy>=2", "no-such-package[extra]>=1; x"]\n')
    assert missing_packages(tmp_path / "pyproject.toml") == ["no-such-package"]


def test_other_errors_are_shown_as_python_shows_them() -> None:
    code = "import unsloth_ddp; import no_such_module"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" in done.stderr and "No module named 'no_such_module'" in done.stderr
