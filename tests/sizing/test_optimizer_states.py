"""What optimizers keep is what is counted for them: each takes a step on a CPU, and its states are weighed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.training_args import OptimizerNames

from unsloth_ddp.sizing.optimizer_states import optimizer_bytes
from unsloth_ddp.sizing.trial import bytes_added_by_steps

# Their packages are not installed, or are for other machines.
ELSEWHERE = ("xla", "npu", "anyprecision", "galore", "lomo", "grok", "schedule_free", "apollo", "stable")
# Their states are in memory that only bitsandbytes for a GPU can have.
ON_GPUS = ("paged_ademamix_32bit", "paged_ademamix_8bit")
# These compile their step, for seconds.
COMPILED = ("adamw_torch_8bit", "adamw_torch_4bit")
HERE = [o.value for o in OptimizerNames if not any(word in o.value for word in ELSEWHERE) and o.value not in ON_GPUS]


def slow_where_compiled(names: list[str]) -> list[Any]:
    """Parameters of a test, of which those that take long are left to the slow group."""
    return [pytest.param(name, marks=pytest.mark.slow if name in COMPILED else ()) for name in names]


def weighed(state: Any) -> int:
    """Bytes of the tensors in a state, those that are packed by their parts."""
    if isinstance(state, dict):
        return sum(weighed(value) for value in state.values())
    if not torch.is_tensor(state):
        return 0
    if hasattr(state, "__tensor_flatten__"):
        return sum(weighed(getattr(state, name)) for name in state.__tensor_flatten__()[0])
    return state.numel() * state.element_size()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", slow_where_compiled(HERE))
def test_an_optimizer_keeps_what_is_counted(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), optim=name, use_cpu=True, report_to=[])
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
    weight = torch.nn.Parameter(torch.randn(512, 1024, dtype=dtype))
    weight.grad = torch.randn_like(weight)
    optimizer = kind([weight], **options)
    optimizer.step()
    bytes_a_number = weighed(optimizer.state[weight]) / weight.numel()
    # Tables of the values that packed numbers stand for come on top, and rows and columns with adafactor.
    assert bytes_a_number == pytest.approx(optimizer_bytes(name, dtype.itemsize), rel=0.005, abs=0.02)


@pytest.mark.parametrize(
    "name", slow_where_compiled(["adamw_8bit", "rmsprop_bnb_8bit", "adamw_torch_8bit", "adamw_torch"])
)
def test_what_is_kept_for_a_whole_model_is_counted_with_its_embedding(name: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(64, 128), torch.nn.Linear(128, 256, bias=False)).to(torch.bfloat16)
    trainer = Trainer(model, TrainingArguments(output_dir=str(tmp_path), optim=name, use_cpu=True, report_to=[]))
    optimizer = trainer.create_optimizer()
    model(torch.arange(64)).sum().backward()
    optimizer.step()
    state_bytes = sum(weighed(state) for state in optimizer.state.values())
    # Two tables of 256 fp32 numbers for each weight that is packed.
    counted = bytes_added_by_steps(model, name, ddp_sends=False)
    assert state_bytes == pytest.approx(counted, abs=2 * 2 * 256 * 4 + 8)


def test_what_cannot_be_tried_counts_as_adam_in_fp32() -> None:
    assert [optimizer_bytes(name, 2) for name in ("paged_ademamix_32bit", "stable_adamw", "nobodys")] == [12, 8, 8]
