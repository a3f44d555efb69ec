"""The README's commands as they stand there, each run on a tiny model; those of docs/ are parsed."""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import runpy
import shlex
import subprocess
import sys

import pytest

from tests.conftest import REPO
from tests.ranks import run_ranks, train
from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.parse import parse_settings

TEXT = (REPO / "README.md").read_text()


def commands_of(text: str) -> list[str]:
    """Return the commands of a page's bash blocks, one a line, without comments."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in blocks.splitlines() if line.split("#")[0].strip()]


COMMANDS = commands_of(TEXT)
# Run by demo/test_demo.py and run/test_train_ddp.py, by this very run, by notebook/test_cli.py and test_run.py, by
# cluster/test_nodes.py (with names and addresses of its own), and by parity/test_command.py (with real launchers).
ELSEWHERE = {
    # They need the network.
    "pip install uv",
    "git clone https://github.com/your-name/unsloth-ddp && cd unsloth-ddp",
    "uv run python train_ddp.py",
    "uv run pytest -n 2",
    "uv run notebook_to_script.py input.ipynb output.py",
    "uv run accelerate launch output.py",
    "export NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1",
    "bash cluster/node.sh -m Qwen/Qwen3-8B -d my_chats.jsonl --method lora",
    "uv run python -m unsloth_ddp.parity --config recipes/qwen3_8b_lora.yaml --dataset my_chats.jsonl",
    "uv run python -m unsloth_ddp.chat outputs/RUN",
}
MODULES = [command for command in COMMANDS if "-m unsloth_ddp." in command and command not in ELSEWHERE]


def test_every_command_is_accounted_for():
    rest = set(COMMANDS) - ELSEWHERE
    known = {command for command in rest if "train_ddp.py" in command or "tensorboard" in command}
    assert rest == known | set(MODULES)
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


def run_module(name: str, argv: list[str], cwd: str) -> None:
    """python -m NAME ARGV, in this folder."""
    os.chdir(cwd)
    sys.argv = [name, *argv]
    runpy.run_module(name, run_name="__main__")


@pytest.mark.parametrize("command", MODULES)
def test_tools_run(command, tmp_path, tiny_model, uneven_rows):
    name, options = command.split("-m unsloth_ddp.")[1].split(" ", 1)
    argv = [str(REPO / word) if word.startswith("recipes/") else word for word in shlex.split(options)]
    argv = [str(uneven_rows) if word == "my_chats.jsonl" else word for word in argv]
    argv += ["--model", str(tiny_model), "--max_length", "64"]
    result = run_ranks(1, run_module, f"unsloth_ddp.{name}", argv, str(tmp_path), folder=tmp_path / "out").check()
    assert {"preflight": "training can start", "plan": "GPU"}[name] in result.output, result.output


def test_tensorboard_is_there():
    done = subprocess.run(["tensorboard", "--version_tb"], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


# Options of launchers, of the converter, of node.sh and the job files, and of the tools, which refuse unknown ones.
OTHERS = {
    "--config_file", "--num_processes", "--nproc_per_node", "--nproc", "--help", "--logdir", "--to", "--extra",
    "--tensorboard", "--check", "--diff", "--report", "--force", "--dry", "--per",
    "--compare", "--nodes", "--gpu_memory", "--locked", "--gpus", "--gpus_per_node", "--cpus", "--time", "--sharding",
    "--ipc", "--shm",
}  # fmt: skip
PAGES = {
    f"{page.stem}: {command}": command
    for page in sorted((REPO / "docs").glob("*.md"))
    for command in commands_of(page.read_text())
    if not {"...", "mine.yaml"} & set(command.split())
}


def test_the_address_of_the_repository_is_the_same_everywhere():
    files = ["README.md", *(f"notebooks/{name}.ipynb" for name in ("colab", "kaggle_two_t4"))]
    addresses = [
        set(re.findall(r"https://github\.com/([\w-]+/unsloth-ddp)", (REPO / file).read_text())) for file in files
    ]
    assert addresses == [{"your-name/unsloth-ddp"}] * 3
    # The command that replaces it in all of them.
    assert (
        "sed -i 's#your-name/unsloth-ddp#OWNER/REPO#' README.md notebooks/*.ipynb"
        in (REPO / "notebooks/README.md").read_text()
    )


def test_every_command_of_the_readme_begins_with_uv_run():
    assert re.findall(r"(?<!uv run )python -m unsloth_ddp\.\w+", TEXT) == []


@pytest.mark.parametrize("option", sorted(set(re.findall(r"--[a-z_]{3,}", TEXT))))
def test_options_named_in_the_text_exist(option):
    assert option in OTHERS or option[2:].removeprefix("no_") in {
        field.name for field in dataclasses.fields(Settings)
    } | {"config"}


def with_repository_paths(words: list[str]) -> list[str]:
    return [str(REPO / word) if word.startswith("recipes/") else word for word in words]


@pytest.mark.parametrize("command", [c for c in PAGES.values() if "train_ddp.py" in c and "cluster/" not in c])
def test_training_commands_of_the_pages_parse(command):
    launcher, options = command.split("train_ddp.py")
    configs = [word for word in shlex.split(launcher) if word.endswith(".yaml")]
    assert all((REPO / config).is_file() for config in configs)
    parse_settings(with_repository_paths(shlex.split(options)))


@pytest.mark.parametrize("command", [c for c in PAGES.values() if "-m unsloth_ddp." in c])
def test_tool_commands_of_the_pages_parse(command):
    name, *options = shlex.split(command.split("-m unsloth_ddp.")[1])
    parser = importlib.import_module(f"unsloth_ddp.{name}.__main__").make_parser()
    _, rest = parser.parse_known_args(with_repository_paths(options))
    parse_settings(rest, command=parser)
