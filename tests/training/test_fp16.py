"""Training in fp16, the path of GPUs without bf16 (T4, V100): autocast and a gradient scaler, here on the CPU.

accelerate makes a scaler on GPUs only; `train_in_fp16` gives it torch's scaler for the CPU, and nothing else differs.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_ranks, train
from tests.training.test_loss_averaging import options

# fp16 has 11 bits: measured are differences of 8e-4 of the largest update.
TOLERANCE = 4e-3


def train_in_fp16(argv: list[str], cwd: str, first_scale: float) -> None:
    """Train with precision fp16 and a gradient scaler that begins with this scale."""
    from accelerate import Accelerator

    from unsloth_ddp.distributed import runtime

    runtime._choose_precision = lambda *_: "fp16"
    begin = Accelerator.__init__

    def with_scaler(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        assert self.mixed_precision == "fp16"
        self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", init_scale=first_scale)

    Accelerator.__init__ = with_scaler
    train(argv, cwd)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_model, uneven_rows):
    """Train in a layout once; returns the run's folder."""
    cwd = tmp_path_factory.mktemp("fp16")

    def run(name: str, processes: int, per_device: int, *more: str, scale: float | None = 2.0**14) -> Path:
        argv = [*options(tiny_model, uneven_rows, per_device, name), *more]
        target = (train, argv, str(cwd)) if scale is None else (train_in_fp16, argv, str(cwd), scale)
        if not (cwd / "outputs" / name / "summary.json").exists():
            run_ranks(processes, *target, folder=cwd / f"{name}.out").check()
        return cwd / "outputs" / name

    return run


def update_difference(first: Path, other: Path) -> float:
    """Return the largest difference of two adapters as a share of the largest weight of B, which begins at zero."""
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (first, other))
    largest = max(a[name].abs().max().item() for name in a if "lora_B" in name)
    assert largest > 1e-3
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a) / largest


@pytest.mark.parametrize("exchange", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_step_is_that_of_fp32_and_of_any_layout(trained, exchange):
    """Scaled gradients are averaged by DistributedDataParallel, or by the kit's own exchange."""
    single, exact = trained("one", 1, 8), trained("fp32", 1, 8, scale=None)
    double = trained(f"two_{exchange}", 2, 2, *([] if exchange else ["--ddp_find_unused_parameters"]))
    assert json.loads((double / "summary.json").read_text())["precision"] == "fp16"
    assert 0 < update_difference(single, exact) < TOLERANCE
    assert update_difference(single, double) < TOLERANCE


def test_steps_that_overflow_are_left_out_on_every_rank_and_counted(trained):
    run = trained("overflow", 2, 2, "--drift_check_steps", "1", scale=2.0**60)
    weights = load_file(run / "adapter_model.safetensors")
    assert all(not tensor.any() for name, tensor in weights.items() if "lora_B" in name)
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    printed = "".join(path.read_text() for path in (run.parent.parent / "overflow.out").glob("rank_*.txt"))
    assert printed.count("The gradients of 3 of 3 steps overflowed in fp16 and changed no weight.") == 1


def test_a_resumed_run_goes_on_with_its_scale(trained):
    def state() -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        scaler = torch.load(run / "checkpoint-3" / "scaler.pt", weights_only=True)
        return scaler, load_file(run / "adapter_model.safetensors")

    saving = ["--save_strategy", "steps", "--save_steps", "1"]
    run = trained("resumed", 1, 8, *saving)
    scaler, weights = state()
    assert scaler["scale"] == 2.0**14 and scaler["_growth_tracker"] == 3
    shutil.rmtree(run / "checkpoint-3")
    for name in ("summary.json", "adapter_model.safetensors"):
        (run / name).unlink()
    # Another first scale, which the checkpoint replaces.
    trained("resumed", 1, 8, *saving, scale=2.0**3)
    again, same = state()
    assert again == scaler
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def train_as_4_bit(argv: list[str], cwd: str, first_scale: float) -> None:
    """Train in fp16 with a model that says of itself that its weights have 4 bits, which needs a GPU to be true."""
    from unsloth_ddp.run import stages

    load = stages.load_model

    def load_marked(*args):
        model, tokenizer = load(*args)
        model.base_model.model.is_loaded_in_4bit = True
        return model, tokenizer

    stages.load_model = load_marked
    train_in_fp16(argv, cwd, first_scale)


def test_adapters_of_4_bit_weights_are_trained_in_fp32(tiny_model, uneven_rows, tmp_path):
    """In bf16, to which TRL rounds them, their gradients cannot be scaled."""
    argv = options(tiny_model, uneven_rows, 8, "marked")
    run_ranks(1, train_as_4_bit, argv, str(tmp_path), 2.0**14, folder=tmp_path / "marked.out").check()
    weights = load_file(tmp_path / "outputs/marked/adapter_model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert max(weight.abs().max().item() for name, weight in weights.items() if "lora_B" in name) > 1e-3
