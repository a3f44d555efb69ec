"""Short jobs on the tiny model: the options of a run with all its checkpoints, and what such a run came to."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.ranks import train
from unsloth_ddp.checkpoints import manifest

# Three epochs of three steps, with dropout, an evaluation an epoch and a checkpoint a step.
WHOLE_RUN = (
    "--global_batch_size 4 --num_train_epochs 3 --lora_dropout 0.1 --eval_fraction 0.2 --logging_steps 2 "
    "--save_steps 1 --save_total_limit none --max_grad_norm 0.5 --warmup_steps 2"
)
LAST = 9  # 10 training rows in steps of 4
TIMINGS = {
    "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "tokens_per_second",
    "rank_step_seconds", "rank_step_seconds_max", "peak_memory_bytes",
}  # fmt: skip
TIMINGS |= {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}


def copy_until(run: Path, step: int, name: str) -> Path:
    """The folder of a run as it was when a kill came right after `step` was saved."""
    copy = run.parent / name
    shutil.copytree(run, copy)
    for path in [*copy.glob("checkpoint-*")]:
        if int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)
    (copy / "summary.json").unlink()
    for name in ("adapter_model.safetensors", "model.safetensors"):
        (copy / name).unlink(missing_ok=True)
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


def manifest_steps(run: Path) -> list[int]:
    """The steps of the complete checkpoints of a run; there must be no other."""
    return sorted(manifest.verify(folder).step for folder in run.glob("checkpoint*"))


def signal_the_job_in(step: int) -> None:
    """Let this rank and its workers get SIGTERM at the end of a step, as schedulers send it to all processes."""
    from unsloth_ddp.distributed.signals import StopRequest

    os.setpgid(0, 0)
    ask, asked = StopRequest.start_poll, itertools.count(1)

    def ask_and_signal(self: StopRequest) -> None:
        if next(asked) == step:
            os.killpg(0, signal.SIGTERM)
        ask(self)

    StopRequest.start_poll = ask_and_signal  # type: ignore[method-assign]


def train_and_signal_the_job(argv: list[str], cwd: str) -> None:
    """train_ddp.py whose processes get SIGTERM in the first step."""
    signal_the_job_in(1)
    train(argv, cwd)
