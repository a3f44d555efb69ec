from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from unsloth_ddp.config.options import Settings
from unsloth_ddp.training.meter import Meter, OwnWorkTimer, Totals, peak_memory_bytes
from unsloth_ddp.training.step_choice import busy_without, shape_for
from unsloth_ddp.training.trainer import DDPTrainer


class Evaluation:
    """Evaluate batches with a memory that holds `recordings` of a step, or the batch."""

    def __init__(self, recordings: int) -> None:
        self.recordings = recordings
        self.recorded = SimpleNamespace(release=self.release)
        self.compute_loss_context_manager = nullcontext

    def release(self) -> bool:
        had, self.recordings = self.recordings, 0
        return had > 0

    def compute_loss(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        if self.recordings or inputs["size"] > 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return torch.tensor(3.0)

    _evaluate_batch = DDPTrainer._evaluate_batch


def test_an_evaluation_without_memory_takes_that_of_the_recordings() -> None:
    evaluation = Evaluation(recordings=2)
    assert evaluation._evaluate_batch(None, {"size": 1}, torch.ones(())).item() == 3.0
    assert evaluation.recordings == 0


def test_an_evaluation_that_does_not_fit_without_recordings_fails() -> None:
    with pytest.raises(torch.cuda.OutOfMemoryError):
        Evaluation(recordings=1)._evaluate_batch(None, {"size": 2}, torch.ones(()))


def test_the_peak_is_that_of_a_replay_where_it_is_higher() -> None:
    device = torch.device("cpu")
    meter = Meter(lambda own: own[None], 1, device, OwnWorkTimer(device), Totals())
    assert meter.peak_bytes() == peak_memory_bytes("cpu")
    meter.replayed_bytes = 10 * peak_memory_bytes("cpu")
    assert meter.collect(level=0)["peak_memory_bytes"] == meter.replayed_bytes


def packs_of(tokens: list[int], rows_a_pack: int = 1) -> Any:
    """Return packs of so many tokens, and the filler."""
    packing = SimpleNamespace(starts=np.arange(len(tokens) + 1) * rows_a_pack, longest=max(tokens))
    return SimpleNamespace(streamed=False, packing=packing, lengths=lambda: np.array([*tokens, 1]))


@pytest.mark.parametrize(
    ("method", "tokens", "rows_a_pack", "size", "reason"),
    [
        ("lora", [2048] * 10, 1, 4, None), ("lora", [2048] * 10, 7, 4, None),
        ("full", [2048] * 10, 1, 4, "micro-batches of 8,192 tokens keep the GPU busy without CUDA graphs"),
        ("full", [2048] * 10, 7, 4, "micro-batches of 8,192 tokens keep the GPU busy without CUDA graphs"),
        ("full", [2048] * 10, 7, 2, None),
        # Mostly fill, but the backend's would wait for the host as long.
        ("lora", [300, 2048] * 5, 1, 4, None),
        ("lora", [1000, 2048] * 8, 1, 8, "micro-batches of 12,192 tokens on average would be padded to 16,384"),
        ("lora", [1000, 2048] * 8, 3, 8, "micro-batches of 12,192 tokens on average would be padded to 16,384"),
        ("lora", [1900, 2048] * 8, 1, 8, None),
    ],
)  # fmt: skip
def test_micro_batches_are_recorded_only_where_it_brings_something(
    method: str, tokens: list[int], rows_a_pack: int, size: int, reason: str | None
) -> None:
    settings = Settings(model="m", dataset=["d"], method=method, max_length=2048)
    assert busy_without(settings, packs_of(tokens, rows_a_pack), size) == reason


def test_single_rows_are_no_sequences_where_one_is_far_longer_than_all() -> None:
    # 8 times the longest would be 16,384 tokens, where the memory search tried 4,148.
    shape = shape_for(packs_of([2048, *[300] * 50]), 8, 2048)
    assert (shape.sequences, shape.tokens, shape.longest) == (0, 4224, 2048)
    shape = shape_for(packs_of([2048, *[1900] * 50]), 8, 2048)
    assert (shape.sequences, shape.tokens, shape.longest) == (8, 16384, 2048)


@pytest.mark.parametrize(("starts", "sequences"), [([0, 1, 2, 3], 2), ([0, 1, 3, 4], 0)])
def test_packs_of_one_row_each_are_sequences(starts: list[int], sequences: int) -> None:
    packing: Any = SimpleNamespace(starts=np.array(starts), longest=250)
    train: Any = SimpleNamespace(streamed=False, packing=packing, lengths=lambda: np.array([250, 240, 130, 1]))
    shape = shape_for(train, 2, 512)
    assert shape.sequences == sequences
    # Two rows of up to 256 tokens; or packs of 490 tokens, as one sequence.
    assert (shape.tokens, shape.longest) == (512, 256 if sequences else 512)


def test_streamed_rows_are_laid_out_with_boundaries() -> None:
    train: Any = SimpleNamespace(streamed=True, packing=SimpleNamespace(starts=np.array([0, 1])))
    assert shape_for(train, 2, 512).sequences == 0
