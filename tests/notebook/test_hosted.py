"""The notebooks for Kaggle and Colab: valid, with options that exist, and run on the demo on a CPU."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
import yaml

from tests.conftest import REPO
from unsloth_ddp.config.parse import parse_settings

HOSTED = {"kaggle_two_t4": ("/kaggle/working", "kaggle"), "colab": ("/content", "colab")}
every_notebook = pytest.mark.parametrize("name", HOSTED)


def cells(name: str) -> list[str]:
    """Return the code cells of a notebook."""
    notebook = nbformat.read(REPO / "notebooks" / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def config_of(name: str) -> str:
    """Return the YAML file that a cell writes."""
    (cell,) = (cell for cell in cells(name) if cell.startswith("%%writefile my_run.yaml\n"))
    return cell.split("\n", 1)[1]


@every_notebook
def test_the_notebook_is_valid_and_holds_no_output(name):
    notebook = json.loads((REPO / "notebooks" / f"{name}.ipynb").read_text())
    assert notebook["nbformat"] == 4 and len(cells(name)) >= 6
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@every_notebook
def test_every_option_of_its_commands_exists(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_run.yaml").write_text(config_of(name).replace("demo/", f"{REPO}/demo/"))
    commands = [line[1:] for cell in cells(name) for line in cell.splitlines() if line.startswith("!")]
    modules = [words for words in map(shlex.split, commands) if words[:2] == ["python", "-m"]]
    assert len(modules) >= 2
    for _, _, module, *options in modules:
        parser = importlib.import_module(f"{module}.__main__").make_parser()
        _, rest = parser.parse_known_args(options)
        parse_settings(rest)
    (launch,) = (command for command in commands if "train_ddp.py" in command)
    launcher, options = launch.split("train_ddp.py")
    assert all((REPO / word).is_file() for word in shlex.split(launcher) if word.endswith(".yaml"))
    settings = parse_settings(shlex.split(options))
    folder, run = HOSTED[name]
    assert (settings.output_dir, settings.run_name) == (f"{folder}/outputs", run)
    # The cell that reads the answers looks where the run writes.
    assert any(f"{folder}/outputs/{run}/summary.json" in cell for cell in cells(name))
    # So does the one that asks a question.
    (asked,) = (options for _, _, module, *options in modules if module == "unsloth_ddp.chat")
    assert asked[:2] == [f"{folder}/outputs/{run}", "--ask"]


@pytest.mark.slow
@every_notebook
def test_the_cells_train_the_demo(name, tmp_path):
    folder, run = HOSTED[name]
    home = tmp_path / "host"
    kit = home / "kit"
    kit.mkdir(parents=True)
    for part in ("accelerate_configs", "demo", "train_ddp.py", "unsloth_ddp"):
        (kit / part).symlink_to(REPO / part)
    config = yaml.safe_load(config_of(name))
    text = (REPO / "notebooks" / f"{name}.ipynb").read_text()
    # The demo's model on this machine's CPU, for a few steps; two processes stand for the two T4s.
    for old, new in (
        (f"model: {config['model']}", "model: demo/model"),
        ("method: qlora", "method: lora"),
        ("optim: adamw_8bit", "optim: adamw_torch"),
        ("num_train_epochs: 3", "max_steps: 4"),
        ("accelerate_configs/ddp.yaml", "accelerate_configs/cpu.yaml"),
        ("/content/drive", str(tmp_path / "drive")),
        (folder, str(home)),
    ):
        assert old in text or old == "/content/drive" or "ddp.yaml" in old
        text = text.replace(old, new)
    played = tmp_path / f"{name}.ipynb"
    played.write_text(text)
    environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("play_hosted.py")
    done = subprocess.run(
        [sys.executable, str(script), str(played)],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "training can start" in done.stdout
    found = re.search(r"Answered exactly: (\d+)% before, (\d+)% after\.", done.stdout)
    assert found, done.stdout[-3000:]
    # The question is asked afterwards; libraries print to standard error there, so what follows is the answer.
    assert done.stdout[found.end() :].strip(), done.stdout[-3000:]
    history = json.loads((home / "outputs" / run / "trainer_state.json").read_text())
    assert history["global_step"] == 4
    result = tmp_path / "drive/MyDrive/unsloth_ddp/colab" if name == "colab" else home / "outputs" / run
    assert (result / "adapter_model.safetensors").is_file()
