"""The example notebooks, converted and trained by two CPU processes: the same weights as the notebook's one process.

Unsloth is replaced by the stand-in next to this file (its loader over Transformers and PEFT): what is shown is the
script, not Unsloth. The notebook itself runs in an IPython shell.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from making import convert_cells

from unsloth_ddp.notebook.convert import convert

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# What each example saves last.
SAVED = {
    "full_finetune_two_phases": "full_model/model.safetensors",
    "sft_chat_lora": "lora_model/adapter_model.safetensors",
}
# float32; the sums of a batch are taken in another order. Measured: 2e-6 (LoRA, AdamW) and 3e-7 (full, SGD).
TOLERANCE = 2e-5


def test_every_example_is_known_here() -> None:
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == SAVED.keys()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """No network, no GPU, one thread a process; TRL's loss kernel interpreted."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD", "LOCAL", "MASTER"))
    }
    return {
        **clean,
        "PYTHONPATH": str(HERE / "standin"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path_factory.mktemp("datasets")),
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "USE_TF": "0",
    }


def start(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a command in a folder that has the demo next to it."""
    folder.mkdir(parents=True)
    (folder / "demo").symlink_to(ROOT / "demo")
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    """A command's output, once it has ended well."""
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 0, output[-4000:]
    return output


def shortened(name: str, folder: Path) -> Path:
    """The notebook with two steps a phase: a step takes three seconds where Triton is interpreted."""
    copy = folder / f"{name}.ipynb"
    copy.write_text(re.sub(r"max_steps=\d+", "max_steps=2", (ROOT / "notebooks" / copy.name).read_text()))
    return copy


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """A folder in which each notebook has run as a notebook, both at the same time."""
    folder = tmp_path_factory.mktemp("notebooks")
    runs = []
    for name in SAVED:
        command = [sys.executable, str(HERE / "play_notebook.py"), str(shortened(name, folder))]
        runs.append(start(command, folder / name, environment))
    for process in runs:
        finish(process)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
def test_two_processes_train_what_the_notebook_trains(
    name: str, played: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    from safetensors.numpy import load_file

    conversion = convert(played / f"{name}.ipynb")
    assert conversion.report.warnings == []
    script = tmp_path / "script.py"
    script.write_text(conversion.script)
    launcher = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert launcher is not None
    output = finish(start([launcher, "--nproc-per-node", "2", str(script)], tmp_path / "run", environment))

    plain, ddp = load_file(played / name / SAVED[name]), load_file(tmp_path / "run" / SAVED[name])
    assert plain.keys() == ddp.keys()
    worst = max(float(abs(plain[key] - ddp[key]).max()) for key in plain)
    assert worst < TOLERANCE, worst
    assert moved(name, plain) > 20 * TOLERANCE  # it trained: the comparison is about something
    assert output.count("train_runtime") == (1 if name == "sft_chat_lora" else 3)  # one process logs and prints
    print(f"{name}: largest difference {worst:.1e}, largest change {moved(name, plain):.1e}")


CELLS = [
    "import sys, types\nsys.modules['unsloth'] = types.ModuleType('unsloth')\nimport unsloth",
    "import os, subprocess, time\n"
    "os.environ['SHARED'] = subprocess.check_output(['echo', os.environ['RANK']], text = True)\n"
    "assert os.environ['SHARED'] == '0\\n', os.environ['SHARED']",
    "mode = 'a'\nclass Rows:\n    def map(self, function):\n        time.sleep(1 - int(os.environ['RANK']))\n"
    "        with open('order', mode) as file:\n            file.write(os.environ['RANK'])\n"
    "rows = Rows()\nrows.map(print)",
    "!echo from the shell\nprint('said once')",
]


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_the_helpers_between_two_processes(tmp_path: Path, environment: dict[str, str], broken: bool) -> None:
    """Values shared, the main process first, one shell, one voice; an error ends every process, and says so."""
    ending = "raise RuntimeError('on purpose')" if broken else "os.environ['DONE'] = '1'"
    script = tmp_path / "script.py"
    script.write_text(convert_cells(*CELLS, ending).script)
    launcher = shutil.which("torchrun", path=str(Path(sys.executable).parent))
    assert launcher is not None
    process = start([launcher, "--nproc-per-node", "2", str(script)], tmp_path / "run", environment)
    output, _ = process.communicate(timeout=120)
    assert (process.returncode != 0) == broken, output[-3000:]
    assert output.count("from the shell") == output.count("said once") == 1
    assert (tmp_path / "run" / "order").read_text() == "01"
    assert ("on purpose" in output) == broken


def moved(name: str, weights: dict) -> float:
    """How far training moved the weights: from zero for LoRA's second matrices, from the base model otherwise."""
    from safetensors.numpy import load_file

    if name == "sft_chat_lora":
        return max(float(abs(value).max()) for key, value in weights.items() if "lora_B" in key)
    base = load_file(ROOT / "demo" / "model" / "model.safetensors")
    return max(float(abs(weights[key] - base[key]).max()) for key in weights)
