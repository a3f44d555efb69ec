"""The README's commands, as they stand there: each is run, on a tiny model where it names one from the Hub."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess

import pytest

from tests.conftest import REPO
from tests.ranks import run_ranks, train
from unsloth_ddp.options import Settings

TEXT = (REPO / "README.md").read_text()
BLOCKS = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)).replace("\\\n", " ")
COMMANDS = [line.split("  #")[0].strip() for line in BLOCKS.splitlines() if line.strip()]
# Run elsewhere, literally: test_demo.py and test_train.py, this very run, and test_cli.py with test_run.py.
ELSEWHERE = {
    "uv run accelerate launch train_ddp.py",
    "uv run pytest",
    "uv run notebook_to_script.py input.ipynb output.py",
    "uv run accelerate launch output.py",
}


def test_every_command_is_accounted_for():
    rest = set(COMMANDS) - ELSEWHERE
    assert rest == {command for command in rest if "train_ddp.py" in command or "tensorboard" in command}
    assert set(COMMANDS) >= ELSEWHERE


@pytest.mark.parametrize("command", [c for c in COMMANDS if "train_ddp.py" in c and c not in ELSEWHERE])
def test_training_commands_run(command, tmp_path, tiny_model, uneven_rows):
    launcher, options = command.split("train_ddp.py")
    configs = [word for word in shlex.split(launcher) if word.endswith(".yaml")]
    assert all((REPO / config).is_file() for config in configs)
    argv = [str(REPO / word) if word.startswith("recipes/") else word for word in shlex.split(options)]
    argv = [str(uneven_rows) if word == "my_chats.jsonl" else word for word in argv]
    argv += ["--model", str(tiny_model), "--max_steps", "1", "--max_length", "64", "--run_name", "readme"]
    run_ranks(2, train, argv, str(tmp_path), folder=tmp_path / "out").check()
    assert (tmp_path / "outputs/readme/adapter_model.safetensors").is_file()


def test_tensorboard_is_there():
    done = subprocess.run(["tensorboard", "--version_tb"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("option", sorted(set(re.findall(r"--[a-z_]{3,}", TEXT))))
def test_options_named_in_the_text_exist(option):
    launchers = {"--config_file", "--num_processes", "--nproc_per_node", "--help", "--logdir", "--to"}
    notebook = {"--tensorboard", "--seed", "--check", "--diff", "--report", "--force", "--dry", "--per", "--nproc"}
    if option not in launchers | notebook:
        assert option[2:] in {field.name for field in dataclasses.fields(Settings)} | {"config"}
