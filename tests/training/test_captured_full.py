"""Train every parameter on two processes from captured micro-batches; on a CPU a graph computes what it replays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import save_llama
from tests.ranks import run_ranks, train
from tests.training.test_gradient_exchange import storages

TOLERANCE = 1e-6
OPTIONS = (
    "--method full --precision fp32 --optim sgd --learning_rate 0.5 --lr_scheduler_type constant --max_grad_norm 0 "
    "--max_steps 3 --packing on --global_batch_size 4 --max_length 64 --logging_steps 1 --save_strategy no "
    "--report_to none --drift_check_steps 1 --seed 5"
)


def train_captured(argv: list[str], cwd: str) -> None:
    """Run train_ddp.py with captured micro-batches in fp32, as if the CPU had CUDA graphs; note each exchange."""
    from unsloth_ddp.training.step import capture_trial, captured_step, first_rung, gradient_exchange

    def in_fp32(model: Any, forward: Any, autocast: Any, dtype: Any, *more: Any) -> captured_step.CapturedStep:
        return captured_step.CapturedStep(model, forward, autocast, torch.float32, *more)

    average, replay = gradient_exchange.GradientExchange.average, captured_step.CapturedStep.run
    # A small model has several buckets too.
    gradient_exchange.BUCKET_BYTES = 2**16
    noted: dict[str, Any] = {"replayed": 0, "exchanges": 0, "in_place": True, "bytes": 0}

    def noted_average(self: gradient_exchange.GradientExchange) -> None:
        addresses = storages(p.grad for p in self.bucket_of)
        average(self)
        after = storages(p.grad for p in self.bucket_of)
        noted["in_place"] &= addresses == after == storages(self.buffers.flat)
        noted["exchanges"] += 1
        noted["bytes"] = sum(after.values())

    def noted_replay(self: captured_step.CapturedStep, *arguments: Any) -> Any:
        noted["replayed"] += 1
        assert storages(self.gradients.flat)
        return replay(self, *arguments)

    gradient_exchange.GradientExchange.average = noted_average  # type: ignore[method-assign]
    captured_step.CapturedStep.run = noted_replay  # type: ignore[method-assign]
    capture_trial.CapturedStep = in_fp32  # type: ignore[misc,assignment]
    first_rung.obstacle_to_capture = lambda *_: None
    first_rung.FirstRung._why_not_captured = lambda *_: None  # type: ignore[method-assign]
    first_rung.use_capture_stream = lambda device: None
    train(argv, cwd)
    import os

    name = argv[argv.index("--run_name") + 1]
    Path(cwd, "outputs", name, f"noted_{os.environ['RANK']}.json").write_text(json.dumps(noted))


@pytest.fixture(scope="module")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a two-layer Llama with random weights, whose output head is its embedding."""
    return save_llama(tmp_path_factory.mktemp("tied"), max_position_embeddings=256, tie_word_embeddings=True)


@pytest.mark.slow
def test_captured_full_training_on_two_processes_is_that_of_one(
    tmp_path: Path, tied_model: Path, uneven_rows: Path
) -> None:
    initial = load_file(tied_model / "model.safetensors")

    def updates(name: str, processes: int, target: Any) -> torch.Tensor:
        argv = f"--model {tied_model} --dataset {uneven_rows} --run_name {name} {OPTIONS}".split()
        run_ranks(processes, target, argv, str(tmp_path), folder=tmp_path / f"{name}.out").check()
        weights = load_file(tmp_path / "outputs" / name / "model.safetensors")
        assert weights.keys() == initial.keys()
        return torch.cat([(weights[key] - initial[key]).flatten().double() for key in sorted(weights)])

    single = updates("one", 1, train)
    assert single.norm() > 0.1
    for name, target in (("ordinary", train), ("captured", train_captured)):
        two = updates(name, 2, target)
        assert (two - single).norm() / single.norm() < TOLERANCE, name
    assert json.loads((tmp_path / "outputs/captured/summary.json").read_text())["cuda_graphs"] is True
    trained = sum(weight.numel() * 4 for weight in initial.values())
    for rank in range(2):
        noted = json.loads((tmp_path / f"outputs/captured/noted_{rank}.json").read_text())
        # Each rank has two micro-batches a step, one in the last step of the epoch, and one in the check before.
        assert noted == {"replayed": 2 + 1 + 2 + 1, "exchanges": 3, "in_place": True, "bytes": trained}
