"""Commands that a notebook starts: with which environment, which programs, and which train by themselves."""

import os
import subprocess

import pytest
from making import LOAD, TRAIN, body, convert_cells, helpers, kinds

from unsloth_ddp.notebook.types import NotebookError


@pytest.mark.parametrize(
    ("cell", "made"),
    [
        ("os.system('python x.py')", "run_shell('python x.py')"),
        ("subprocess.run(['a'], check=True)", "subprocess.run(['a'], check=True, env=child_environment())"),
        ("subprocess.check_output('a')", "subprocess.check_output('a', env=child_environment())"),
        ("p = subprocess.Popen(['a'], env=mine)", "subprocess.Popen(['a'], env=child_environment(mine))"),
        ("p = subprocess.Popen(['a'], env=os.environ)", "subprocess.Popen(['a'], env=child_environment())"),
        ("def f():\n    return run(['a'])\nf()", "return run(['a'], env=child_environment())"),
        ("!python x.py", 'run_shell("python x.py")'),
        ("print(os.popen('a').read())", "os.popen(own_shell('a')).read()"),
        ("p = os.popen(mode='r', cmd='a')", "os.popen(mode='r', cmd=own_shell('a'))"),
        ("x = subprocess.getoutput('a ' + b, encoding='utf-8')", "getoutput(own_shell('a ' + b), encoding='utf-8')"),
        ("def f():\n    return getstatusoutput('a')[0]\nf()", "return getstatusoutput(own_shell('a'))[0]"),
        ("def f():\n    return popen('a')\nf()", "return popen(own_shell('a'))"),
    ],
)
def test_commands_do_not_get_the_launcher_s_variables(cell: str, made: str) -> None:
    imports = (
        "import os, subprocess\nfrom os import popen\nfrom subprocess import getstatusoutput, run\nmine, b = {}, ''"
    )
    done = convert_cells(imports, LOAD, cell, TRAIN)
    assert made in body(done) and "def child_environment" in done.script


def test_the_environment_of_a_command() -> None:
    launcher = [
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME",
        "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE",
    ]  # fmt: skip
    kept = {"PATH": "x", "HF_TOKEN": "y", "RANKS": "z", "NAME": "n", "CUDA_VISIBLE_DEVICES": "0"}
    environment = helpers("child_environment")["child_environment"]
    assert environment({**dict.fromkeys(launcher, "1"), **kept}) == kept


def test_a_command_that_takes_no_environment_removes_the_variables_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "KEPT"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setitem(os.environ, "PMIX_no-name", "7")  # unset would fail on it and end the shell
    command = helpers("own_shell")["own_shell"]("echo $RANK $MASTER_PORT $TORCHELASTIC_RUN_ID $KEPT; exit 3")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, "7\n", "")


def test_arguments_that_are_not_spelled_out_are_pointed_at() -> None:
    done = convert_cells("import os", LOAD, "words = ['a']\nos.popen(*words)", TRAIN)
    assert kinds(done) == ["shell"] and "own_shell" in done.script


@pytest.mark.parametrize(
    "command",
    [
        "!torchrun --nproc-per-node 2 train.py",
        "!accelerate launch train.py",
        "!llamafactory-cli train x.yaml",
        "!cd x && deepspeed run.py",
        "!python -u finetune_lora.py --x 1",
        "%%bash\ncd x\ntorchrun y.py",
        "import os\nos.system('accelerate launch x.py')",
    ],
)
@pytest.mark.parametrize("load", [LOAD, "x = 1"])
def test_a_notebook_whose_only_training_is_a_command_is_refused(command: str, load: str) -> None:
    with pytest.raises(NotebookError, match=r"its only training is the command `.*` in cell 2, .* run that command"):
        convert_cells(load, command)


def test_a_command_that_trains_beside_a_trainer_is_pointed_at() -> None:
    assert kinds(convert_cells(LOAD, "!python train.py", TRAIN)) == ["command"]
    assert kinds(convert_cells(LOAD, "!python prepare.py\n!git clone x", TRAIN)) == []


@pytest.mark.parametrize(
    ("cell", "made"),
    [
        ("%mkdir -p {folder}/a", 'run_shell(f"mkdir -p {folder}/a")'),
        ("%rm -rf x", 'run_shell("rm -rf x")'),
        ("%cp a b", 'run_shell("cp a b")'),
        ("mkdir -p x", 'run_shell("mkdir -p x")'),
        ("huggingface-cli download x", 'run_shell("huggingface-cli download x")'),
        ("git clone https://x", 'run_shell("git clone https://x")'),
        ('%%bash -s "$folder"\necho $1', 'run_shell("echo $1", f"\\"{folder}\\"")'),
        ("%%script python3\nprint(1)", 'run_shell("print(1)", program="python3")'),
        ("%%python\nprint('x')", 'run_shell("print(\'x\')", program="python3")'),
        ("%%sx\necho x", 'run_shell("echo x")'),
        ("%%!\necho x", 'run_shell("echo x")'),
        ("get_ipython().system('echo ' 'x')", 'run_shell("echo x")'),
        # Only the notebook knows the value.
        ("get_ipython().system('echo ' f'{folder}')", "run_shell('echo ' f'{folder}')"),
    ],
)
def test_commands_as_notebooks_write_them(cell: str, made: str) -> None:
    assert made in body(convert_cells(LOAD, "folder = 'f'", cell, TRAIN)).replace(
        "f'\"{folder}\"'", 'f"\\"{folder}\\""'
    )


def test_installs_without_a_sign_are_installs() -> None:
    done = convert_cells("pip install trl==1\nconda install x", LOAD, TRAIN)
    assert "#     trl==1" in done.script and "install trl" not in body(done)


def test_a_cell_that_is_switched_off_stays_off() -> None:
    assert "# print(1)" in body(convert_cells(LOAD, "%%script false --no-raise-error\nprint(1)", TRAIN))


@pytest.mark.parametrize(
    ("cell", "use"),
    [
        ("%%python --bg --proc server\nserve()", "server.terminate()"),
        ("%%bash --out text\necho x", "print(text)"),
        ("%%R -o frame\nframe <- 1", "dataset = frame"),
        ("%%capture seen\nx = 1", "def show():\n    print(seen.stdout)"),
    ],
)
def test_names_of_cells_that_are_not_in_the_script_are_pointed_at(cell: str, use: str) -> None:
    done = convert_cells(LOAD, cell, use, TRAIN)
    assert [e.cell for e in done.report.warnings if e.kind == "name"] == [3]


def test_arguments_and_programs_reach_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    run_shell = helpers("run_shell")["run_shell"]
    assert run_shell("echo $1 in; exit 3", '"a b"') == 3
    run_shell("print('from python')", program="python3")
    assert capfd.readouterr().out == "a b in\nfrom python\n"


@pytest.mark.parametrize(
    ("made", "started"),
    [
        ("from sagemaker.modules.train import ModelTrainer\njob = ModelTrainer(source_code=x)", "job.train(wait=True)"),
        (
            "from sagemaker.huggingface import HuggingFace\njob = HuggingFace(entry_point='t.py')",
            "job.fit({'train': x})",
        ),
        ("from kubeflow.trainer import TrainerClient\njob = TrainerClient()", "job.train(trainer=x)"),
    ],
)
def test_a_training_on_machines_of_a_service_is_refused(made: str, started: str) -> None:
    said = r"its only training, `job\.\w+\(\)` in cell 3, runs on machines of a service; choose the number"
    with pytest.raises(NotebookError, match=said):
        convert_cells("import transformers\nx = 1", made, started)


def test_a_training_at_a_service_beside_one_here_is_started_once() -> None:
    made = "from sagemaker.modules.train import ModelTrainer\njob = ModelTrainer(source_code=x)"
    done = convert_cells(LOAD, "dataset = [1]", TRAIN, made, "job.train()")
    assert "if IS_MAIN:\n    job.train()" in body(done) and kinds(done) == ["paid call"]
