"""The example notebooks, converted and trained by two CPU processes: the same weights as the notebook's one process.

Unsloth is replaced by the stand-in next to this file (its loader over Transformers and PEFT): what is shown is the
script, not Unsloth. The notebook itself runs in an IPython shell.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from making import convert_cells

from tests.ranks import free_port, run_file, run_ranks
from unsloth_ddp.notebook.convert import convert

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# What each example saves last.
SAVED = {
    "full_finetune_two_phases": "full_model/model.safetensors",
    "sft_chat_lora": "lora_model/adapter_model.safetensors",
}
# What the converter asks to check: the second phase reads what the first has saved.
WARNED = {"full_finetune_two_phases": ["read back"], "sft_chat_lora": []}
# float32; the sums of a batch are taken in another order. Measured: 2e-6 (LoRA, AdamW) and 3e-7 (full, SGD).
TOLERANCE = 2e-5


def test_every_example_is_known_here() -> None:
    # Those for Kaggle and Colab run the kit itself.
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == SAVED.keys() | {"kaggle_two_t4", "colab"}


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
        "UNSLOTH_ALLOW_CPU": "1",
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


def finish(process: subprocess.Popen[str], seconds: float = 250) -> str:
    """Return a command's output, once it has ended well."""
    output, _ = process.communicate(timeout=seconds)
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
    assert [warning.kind for warning in conversion.report.warnings] == WARNED[name]
    script = tmp_path / "script.py"
    script.write_text(conversion.script)
    output = finish(start([*TORCHRUN, "--nproc-per-node", "2", str(script)], tmp_path / "run", environment))

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
    "from rows_in_order import Rows\nrows = Rows()\nrows = rows.map(print)",
    "!echo from the shell\nprint('said once')",
]


def run_beside_standin(path: Path) -> None:
    """A script in its own folder, with the stand-ins for Unsloth and datasets."""
    sys.path.insert(0, str(HERE / "standin"))
    run_file(path)


@pytest.mark.parametrize("broken", [False, True])
def test_the_helpers_between_two_processes(tmp_path: Path, broken: bool) -> None:
    """Values shared, the main process first, one shell, one voice; an error ends every process, and says so."""
    ending = "raise RuntimeError('on purpose')" if broken else "os.environ['DONE'] = '1'"
    script = tmp_path / "script.py"
    script.write_text(convert_cells(*CELLS, ending).script)
    done = run_ranks(2, run_beside_standin, script, folder=tmp_path / "out", environ={"UNSLOTH_ALLOW_CPU": "1"})
    assert (0 not in done.codes) if broken else (done.codes == [0, 0]), done.output
    assert done.output.count("from the shell") == done.output.count("said once") == 1
    assert (tmp_path / "order").read_text() == "01"
    assert ("on purpose" in done.output) == broken


def moved(name: str, weights: dict) -> float:
    """How far training moved the weights: from zero for LoRA's second matrices, from the base model otherwise."""
    from safetensors.numpy import load_file

    if name == "sft_chat_lora":
        return max(float(abs(value).max()) for key, value in weights.items() if "lora_B" in key)
    base = load_file(ROOT / "demo" / "model" / "model.safetensors")
    return max(float(abs(weights[key] - base[key]).max()) for key in weights)


WANDB = """
import types
api = types.SimpleNamespace(api_key=None)
started = False
def init(**options):
    global started
    started = True
def log(values):
    assert started, "rank 1 has no run"
    with open("logged", "a") as file:
        file.write("x")
def login(**options):
    raise AssertionError("asks for a key")
"""
TRAINERS = """
import os, types
import torch.distributed as dist
class Callback: ...
class FakeTrainer:
    def __init__(self, args, callbacks, reward_funcs):
        self.callbacks, self.reward = callbacks, reward_funcs
    def train(self):
        control = types.SimpleNamespace(should_training_stop=False, should_save=False)
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        steps = 0
        while not control.should_training_stop and steps < 50:
            dist.barrier()  # a rank that stops alone leaves the other here
            steps += 1
            self.reward(["x"])
            for callback in self.callbacks:
                control = callback.on_step_end(None, None, control) or control
        with open("steps" + os.environ["RANK"], "w") as file:
            file.write(str(steps))
"""
CHILD = """
import os, sys
joined = [name for name in os.environ if name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]
if sys.argv[1:]:  # as a training script would: with the launcher's variables it waits for the other node
    from accelerate import PartialState
    joined += ["x"] * (PartialState(cpu=True).num_processes - 1)
print("child of", 1 + len(joined), flush=True)
"""
FROM_ANYWHERE = [
    "import os, subprocess, sys, time, types\nsys.modules['unsloth'] = types.ModuleType('unsloth')\nimport unsloth",
    f"%%writefile child.py\n{CHILD}",
    "!{sys.executable} child.py alone\nos.system(sys.executable + ' child.py')\n"
    "subprocess.run([sys.executable, 'child.py'])",
    "import wandb\nfrom huggingface_hub import notebook_login\nnotebook_login()\nwandb.login()\nwandb.init()",
    "names = ['anger', 'fear', 'joy', 'love', 'sadness', 'surprise', 'trust', 'awe']\nlabels = list(set(names))\n"
    "mode = 'w'\nclass Rows:\n    def map(self, function):\n"
    "        with open('order' + os.environ['RANK'], mode) as file:\n            file.write(' '.join(labels))\n"
    "        assert open('child.py').read()\nrows = Rows()\nrows.map(print)",
    "from trainers import Callback, FakeTrainer\nclass Limit(Callback):\n"
    "    def on_step_end(self, args, state, control, **kwargs):\n"
    "        self.steps = getattr(self, 'steps', 0) + 1\n"
    "        if self.steps > 3 + 5 * int(os.environ['RANK']):  # a clock that runs apart\n"
    "            control.should_training_stop = True\n        return control\n"
    "def reward(completions):\n    wandb.log({'n': len(completions)})\n    return [1.0]",
    "trainer = FakeTrainer(args=names, callbacks=[Limit()], reward_funcs=reward)\ntrainer.train()",
]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_agree_on_everything_that_a_notebook_leaves_to_chance(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Order of sets, commands, logins, trackers in functions, callbacks by the clock, files: one on each node."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "wandb.py").write_text(WANDB)
    (tmp_path / "modules" / "trainers.py").write_text(TRAINERS)
    script = tmp_path / "script.py"
    script.write_text(convert_cells(*FROM_ANYWHERE).script)
    given = {**environment, "PYTHONPATH": str(tmp_path / "modules"), "HF_HOME": str(tmp_path / "hub")}
    port = free_port()
    runs = []
    for node in ("0", "1"):
        rendezvous = ["--master-addr", "127.0.0.1", "--master-port", str(port), "--node-rank", node]
        command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *rendezvous, str(script)]
        runs.append(start(command, tmp_path / node, given))
    outputs = [finish(process, 500) for process in runs]

    assert [output.count("child of 1") for output in outputs] == [3, 3]  # each node's commands ran, and alone
    assert "hf auth login" in outputs[0] and "WANDB_API_KEY" in outputs[0]
    orders = [(tmp_path / node / f"order{node}").read_text() for node in ("0", "1")]
    assert orders[0] == orders[1]
    assert [(tmp_path / node / f"steps{node}").read_text() for node in ("0", "1")] == ["4", "4"]
    assert (tmp_path / "0" / "logged").read_text() == "xxxx" and not (tmp_path / "1" / "logged").exists()
