"""A run whose weights hold NaN ends before it saves them, and keeps the checkpoints from before."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.jobs import manifest_steps
from tests.ranks import train
from unsloth_ddp.training.broken_weights import first_broken

OPTIONS = "--global_batch_size 4 --max_steps 4 --logging_steps 100"


class Weights(nn.Module):
    """Trained weights of several types, one of them empty, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(3, 2))
        self.b = nn.Parameter(torch.full((4,), 3e38, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.ones(0))
        self.frozen = nn.Parameter(torch.tensor([math.nan]), requires_grad=False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["a", "b"])
def test_the_first_trained_weight_that_is_not_finite_is_found(name: str, value: float) -> None:
    model = Weights()
    assert first_broken(model, 0) is None
    with torch.no_grad():
        getattr(model, name).view(-1)[1] = value
    assert first_broken(model, 0) == name


@pytest.mark.parametrize(
    ("rank", "shard", "broken"),
    [
        (0, [1.0, math.nan, 1.0, 1.0], "a"),
        (1, [1.0, math.inf, 1.0, 1.0], "a"),
        # Of the 6 numbers of the weight the second rank holds 2.
        (1, [1.0, 1.0, math.nan, math.inf], None),
        (2, [math.nan, math.nan, math.nan, math.nan], None),
    ],
)
def test_with_zero3_a_rank_looks_at_its_own_part_without_what_fills_it_up(
    rank: int, shard: list[float], broken: str | None
) -> None:
    model: Any = Weights()
    # DeepSpeed leaves the parameter itself empty.
    model.a.data = torch.ones(0)
    model.a.ds_tensor, model.a.ds_numel = torch.tensor(shard), 6
    assert first_broken(model, rank) == broken


def train_into_infinity(argv: list[str], cwd: str, step: int) -> None:
    """train_ddp.py, where rank 1's first trained weights become infinite in this step."""
    import os

    from transformers import TrainerCallback

    from unsloth_ddp.training.trainer import DDPTrainer

    class Break(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == step and os.environ["RANK"] == "1":
                weight: Any = next(p for p in model.parameters() if p.requires_grad)
                getattr(weight, "_local_tensor", weight).data.fill_(math.inf)

    make = DDPTrainer.__init__

    def begin_broken(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.add_callback(Break())

    DDPTrainer.__init__ = begin_broken  # type: ignore[method-assign]
    train(argv, cwd)


@pytest.mark.parametrize(
    ("save", "environ", "steps_saved"),
    [("--save_steps 1", {}, [1]), ("--save_strategy no", {}, []), ("--save_steps 1", {"UNSLOTH_FSDP2": "1"}, [1])],
)
def test_a_run_with_broken_weights_ends_before_it_saves_them(
    job: Any, place: Path, save: str, environ: dict[str, str], steps_saved: list[int]
) -> None:
    name = f"broken{len(environ)}{len(steps_saved)}"
    printed = job(f"{OPTIONS} {save}", name, 2, code=1, target=train_into_infinity, args=(2,), environ=environ).output
    run = place / "outputs" / name
    after = 2 if steps_saved else 4
    assert (
        printed.count(f"error: After step {after} the trained weights contain NaN or infinity (first in base_model.")
        == 1
    )
    last = f"{run}/checkpoint-1 is the last complete checkpoint" if steps_saved else "there is no checkpoint"
    assert f"{last}. Start again with another --run_name and a lower --learning_rate" in printed
    assert manifest_steps(run) == steps_saved
    assert not [*run.glob("*.safetensors"), *run.glob("summary.json")]


def test_a_loss_that_is_no_number_ends_the_run_at_its_log_line(job: Any, place: Path) -> None:
    printed = job(f"{OPTIONS} --logging_steps 1 --learning_rate 1e30", "diverged", code=1).output
    assert "error: After step 2 the trained weights contain NaN or infinity" in printed
