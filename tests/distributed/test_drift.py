"""Weights compared over ranks: any changed bit or order shows, equal weights pass, and the rank is named."""

from __future__ import annotations

import os
import timeit
from types import SimpleNamespace

import pytest
import torch

from tests.ranks import run_ranks, train
from unsloth_ddp.distributed import drift
from unsloth_ddp.distributed.drift import checksums, combine, find_outliers
from unsloth_ddp.utils.errors import RunError


def number(tensor: torch.Tensor) -> int:
    return int(checksums([tensor])[0])


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the lowest bit of its last element turned over."""
    bits = tensor.clone()
    bits.view(drift.INTEGERS[tensor.element_size()])[-1] ^= 1
    return bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_change_shows(dtype, monkeypatch):
    monkeypatch.setattr(drift, "CHUNK", 64)
    tensor = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype)
    other = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    changed = {
        "negated": -tensor,
        "reversed": tensor.flip(0),
        "permuted": tensor[other],
        "one bit": flipped(tensor),
        "two chunks exchanged": torch.cat([tensor[64:128], tensor[:64], tensor[128:]]),
        "zeroed": torch.zeros_like(tensor),
        "signed zero": torch.cat([-torch.zeros_like(tensor[:1]), tensor[1:]]),
    }
    expected = number(tensor)
    assert expected == number(tensor.clone()) == number(tensor.reshape(3, 100))
    seen = {name: number(value) for name, value in changed.items()}
    assert len({expected, *seen.values()}) == len(changed) + 1, seen


def test_shape_chunks_and_order_of_tensors():
    large, small = torch.randn(drift.CHUNK + 5), torch.randn(7, 3)
    both = checksums([large, small.t()])
    assert both.tolist() == [number(large), number(small.t().contiguous())]
    assert combine(both) != combine(both.flip(0))


@pytest.mark.parametrize(
    ("values", "odd", "usual"),
    [([1, 2], [1], 0), ([1, 2, 2], [0], 1), ([3, 3, 4, 3], [2], 0), ([1, 2, 3], [1, 2], 0)],
)
def test_who_is_the_odd_one_out(values, odd, usual):
    assert find_outliers(values) == (odd, usual)


def test_the_cost_is_small():
    weights = [torch.randn(2048, 16) for _ in range(400)]
    # The quickest of several, as other processes may slow one down.
    assert min(timeit.repeat(lambda: combine(checksums(weights)), number=1, repeat=5)) < 1.0


def test_copies_of_a_sharded_model_are_compared_part_by_part():
    """Ranks 0 and 2 hold the first part, 1 and 3 the second; this is rank 1, and rank 3 differs in the last tensor."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 1, bias=False))

    def gather(value):
        if isinstance(value, int):
            return [1, value, 1, value + drifted]
        return [[1, 2], value, [1, 2], [value[0], value[1] + drifted]]

    ranks = SimpleNamespace(world_size=4)
    found: dict = {"ranks": ranks, "sharding": "fsdp2", "gather": gather, "locations": [f"rank {n}" for n in range(4)]}
    check = drift.DriftCheck(model, SimpleNamespace(**found, copies=2), 2)  # type: ignore[arg-type]
    assert check.due(3) and check.skipped is None, "the first step of a start is compared, whatever the interval"
    drifted = 0
    check.check(3)
    assert check.due(4) and not check.due(5)
    drifted = 1
    with pytest.raises(
        RunError, match=r"^rank 3 has other weights than rank 1 after step 4, first in 1.weight \(1 of 2 "
    ):
        check.check(4)
    plain = drift.DriftCheck(model, SimpleNamespace(**found, copies=1), 2)  # type: ignore[arg-type]
    assert plain.skipped == "fsdp2" and not plain.due(4)
    plain.check(4)


def train_and_perturb(step: int, rank: int, argv: list[str], cwd: str) -> None:
    """train_ddp.py, in which one rank's weights change by themselves at a step."""
    from transformers import TrainerCallback

    from unsloth_ddp.training.trainer import DDPTrainer

    class Perturb(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == step and int(os.environ["RANK"]) == rank:
                weight = [w for n, w in model.named_parameters() if w.requires_grad][-1]
                with torch.no_grad():
                    weight.view(-1)[0] += 1e-3

    init = DDPTrainer.__init__

    def with_callback(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.add_callback(Perturb())

    DDPTrainer.__init__ = with_callback
    train(argv, cwd)


@pytest.fixture
def job(tmp_path, tiny_model, uneven_rows):
    """A short run in which `rank` drifts at a step (-1: never)."""

    def run(step: int, rank: int, ranks: int, options: str):
        argv = f"--model {tiny_model} --dataset {uneven_rows} --max_length 64 --save_strategy no --run_name r".split()
        argv += [*options.split(), "--gradient_checkpointing", "none"]
        return run_ranks(ranks, train_and_perturb, step, rank, argv, str(tmp_path), folder=tmp_path / "out")

    return run


@pytest.mark.parametrize(("rank", "ranks"), [(1, 2), pytest.param(0, 3, marks=pytest.mark.slow)])
def test_a_rank_that_drifts_is_named(job, rank, ranks):
    result = job(3, rank, ranks, "--max_steps 8 --drift_check_steps 2")
    told = [line for line in result.output.splitlines() if line.startswith("train_ddp.py: error:")]
    assert len(told) == 1 and result.codes[0] == 1, result.output
    usual = 1 if rank == 0 else 0
    assert f"rank {rank} (node 0, host " in told[0] and f"other weights than rank {usual} after step 4" in told[0]
    assert "lora_B" in told[0] and "Traceback" not in result.output


def test_a_short_run_whose_ranks_drift_ends_before_its_result_is_written(job, tmp_path):
    result = job(1, 1, 2, "--max_steps 3")
    assert "rank 1 (node 0, host " in result.output and "other weights than rank 0 after step 3" in result.output
    assert result.codes[0] == 1 and not list(tmp_path.rglob("adapter_model.safetensors"))


@pytest.mark.slow
def test_equal_ranks_pass_and_the_check_can_be_left_out(job):
    job(-1, 0, 2, "--max_steps 4 --drift_check_steps 1 --method full").check()
    job(1, 1, 2, "--max_steps 4 --drift_check_steps 0 --overwrite").check()
