"""Every mistake ends every rank within seconds with one sentence from the main process, and no stack trace."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DEMO_MODEL, REPO, write_jsonl
from tests.ranks import run_ranks, train

SECONDS = 30
CHAT = {"messages": [{"role": "user", "content": "Who is it?"}, {"role": "assistant", "content": "It is I."}]}


def train_with_gpus(count: int, argv: list[str], cwd: str) -> None:
    """train_ddp.py on a machine that shows `count` GPUs; nothing is computed before it is refused."""
    import torch

    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: count
    train(argv, cwd)


def train_without_token(argv: list[str], cwd: str) -> None:
    """train_ddp.py where nobody has logged in to the Hub, and nothing may be loaded before that is said."""
    import huggingface_hub

    from unsloth_ddp.model.loading import load as model

    huggingface_hub.get_token = lambda: None
    model.load_model = None  # type: ignore[assignment]
    train(argv, cwd)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with good rows, bad ones, and an earlier run."""
    folder = tmp_path_factory.mktemp("bad")
    write_jsonl(folder / "good.jsonl", [CHAT] * 20)
    write_jsonl(folder / "role.jsonl", [CHAT, {"messages": [{"role": "robot", "content": "beep"}]}])
    write_jsonl(
        folder / "late.jsonl", [{"messages": [{"role": "user", "content": "so " * 300}, *CHAT["messages"][1:]]}]
    )
    (folder / "outputs" / "earlier").mkdir(parents=True)
    (folder / "outputs" / "earlier" / "settings.yaml").write_text("model: x\n")
    (folder / "outputs" / "earlier" / "summary.json").write_text("{}")
    (folder / "outputs" / "mine").mkdir()
    (folder / "outputs" / "mine" / "thesis.txt").write_text("years of work\n")
    return folder


GOOD = f"--model {DEMO_MODEL} --dataset good.jsonl --max_steps 1 --per_device_train_batch_size 1"
# What options and files show is found before the ranks start, which tests/config and test_file_checks.py test; one
# stands for all here.
MISTAKES = {
    "bad row": (f"--model {DEMO_MODEL} --dataset good.jsonl role.jsonl", r"role.jsonl:2: .*'robot'"),
    "nothing supervised": (f"--model {DEMO_MODEL} --dataset late.jsonl --max_length 64", "no supervised token"),
    "unsloth without accelerator": (f"{GOOD} --backend unsloth", "backend unsloth needs an accelerator"),
    "qlora without GPU": (f"{GOOD} --method qlora", "method qlora needs a GPU"),
    "another run's folder": (f"{GOOD} --run_name earlier", "earlier holds a finished run"),
    "a stranger's folder": (f"{GOOD} --run_name mine --overwrite", "was not written by this kit"),
    # What only the libraries know is tried before the model is loaded and rows are tokenized.
    "arguments of the optimizer": (
        f'--model {DEMO_MODEL} --dataset late.jsonl --max_length 64 --optim sgd --trainer_args {{"adam_beta1":0.5}}',
        "has no effect on optim sgd; remove it",
    ),
    "unknown compiler": (
        f"--model {DEMO_MODEL} --dataset late.jsonl --max_length 64 --trainer_args "
        '{"torch_compile_backend":"inducter"}',
        "torch_compile_backend is 'inducter', but torch and accelerate know .*inductor",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_told_once_and_ends_every_rank(mistake, files, tmp_path, assert_told):
    options, sentence = MISTAKES[mistake]
    assert_told(run_ranks(2, train, options.split(), str(files), folder=tmp_path), sentence)


def test_more_processes_than_gpus(files, tmp_path, assert_told):
    result = run_ranks(2, train_with_gpus, 1, GOOD.split(), str(files), folder=tmp_path)
    assert_told(result, "2 processes were started on this machine, but torch sees 1 GPU;")


def test_an_upload_without_a_token_is_refused_before_anything_is_loaded(files, tmp_path, assert_told):
    argv = f"{GOOD} --push_to_hub".split()
    result = run_ranks(2, train_without_token, argv, str(files), folder=tmp_path)
    assert_told(
        result,
        "push_to_hub needs a token of the Hub, and none is found; log in once with uv run hf auth login, or set HF_T",
    )


def test_a_mistake_leaves_no_folder_that_stands_in_the_way(files):
    assert {p.name for p in (files / "outputs").iterdir()} == {"earlier", "mine"}


def test_a_strangers_folder_is_left_alone(files):
    assert (files / "outputs" / "mine" / "thesis.txt").read_text() == "years of work\n"


@pytest.fixture
def assert_told():
    """Check that a job ended as a user's mistake should."""

    def check(result, sentence: str) -> None:
        assert result.seconds < SECONDS
        assert all(code != 0 for code in result.codes), result
        assert result.codes[0] == 2, result.output
        assert "Traceback" not in result.output, result.output
        told = [line for line in result.outputs[0].splitlines() if line.startswith("train_ddp.py: error: ")]
        assert len(told) == 1, result.output
        assert re.search(sentence, told[0]), told[0]
        assert "error:" not in result.outputs[1], result.outputs[1]

    return check


@pytest.mark.slow
def test_launcher_ends_with_the_sentence_and_a_failing_code(files):
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(REPO / "accelerate_configs/cpu.yaml"),
    ]
    command += [str(REPO / "train_ddp.py"), *GOOD.split(), "--global_batch_size", "7"]
    done = subprocess.run(command, cwd=files, capture_output=True, text=True, timeout=250)
    assert done.returncode != 0
    # Once by the kit, and once at the end of the launcher's report.
    assert done.stderr.count("train_ddp.py: error: global_batch_size 7 does not divide") == 2
    assert "global_batch_size 7 does not divide" in done.stderr.splitlines()[-2]
