"""Checkpoints for real: what is written, what is offered, and that a resumed run ends like an uninterrupted one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import Result, run_ranks, train
from unsloth_ddp import manifest

# Three epochs of four steps: 13 rows in steps of 4, with dropout, an evaluation an epoch and a checkpoint a step.
WHOLE_RUN = (
    "--global_batch_size 4 --num_train_epochs 3 --lora_dropout 0.1 --eval_fraction 0.2 --logging_steps 2 "
    "--save_steps 1 --save_total_limit none --max_grad_norm 0.5 --warmup_steps 2"
)
TIMINGS = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "tokens_per_second"}
TIMINGS |= {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}


@pytest.fixture
def job(tmp_path, tiny_model, uneven_rows) -> Callable[..., Result]:
    """Run train_ddp.py on the tiny model in tmp_path/outputs/<name>; options given twice: the last counts."""

    def run(options: str, name: str, ranks: int = 1, code: int = 0, **more) -> Result:
        argv = f"--model {tiny_model} --dataset {uneven_rows} --run_name {name} --learning_rate 0.01 --max_length 64".split()
        argv += ["--gradient_checkpointing", "none", "--report_to", "none", *options.split()]
        result = run_ranks(ranks, train, argv, str(tmp_path), folder=tmp_path / f"{name}.out", **more)
        assert result.codes == [code] * ranks, f"exit codes {result.codes}\n{result.output}"
        return result

    return run


def copy_until(run: Path, step: int, name: str) -> Path:
    """The folder of a run as it was when a kill came right after `step` was saved."""
    copy = run.parent / name
    shutil.copytree(run, copy)
    for path in [*copy.glob("checkpoint-*")]:
        if int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)
    for path in ("summary.json", "adapter_model.safetensors"):
        (copy / path).unlink()
    return copy


def ends(folder: Path, step: int) -> dict:
    """Everything that a run came to, without what a clock decides."""
    state = json.loads((folder / "trainer_state.json").read_text())
    history = [{k: v for k, v in entry.items() if k not in TIMINGS} for entry in state["log_history"]]
    last = folder / f"checkpoint-{step}"
    rng = {path.name: path.read_bytes() for path in last.glob("rng_state*")}
    assert rng
    return {
        "weights": load_file(folder / "adapter_model.safetensors"),
        "optimizer": torch.load(last / "optimizer.pt", weights_only=True, map_location=lambda storage, _: storage),
        "scheduler": torch.load(last / "scheduler.pt", weights_only=True),
        "rng": rng,
        "history": history,
    }


def assert_same(found, expected, where: str = "") -> None:
    """Bit for bit, and of the same shape."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}/{index}")
    else:
        assert found == expected, where


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_ends_like_an_uninterrupted_one(job, tmp_path, ranks):
    """Killed in the middle of an epoch, at its border, before an evaluation that was due, and after the last step."""
    job(WHOLE_RUN, "whole", ranks)
    whole = tmp_path / "outputs" / "whole"
    steps = 9  # 10 training rows in steps of 4
    expected = ends(whole, steps)
    assert len([entry for entry in expected["history"] if "eval_loss" in entry]) == 3
    for step in (1, 3, 5, steps):
        resumed = copy_until(whole, step, f"from-{step}")
        printed = job(WHOLE_RUN, resumed.name, ranks).output
        assert f"Going on from {resumed}/checkpoint-{step}, step {step};" in printed
        assert_same(ends(resumed, steps), expected, f"from step {step}")
