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


@pytest.mark.parametrize(
    ("method", "rows_a_pack", "size", "busy"),
    [("lora", 1, 4, False), ("lora", 7, 4, False), ("full", 1, 4, True), ("full", 7, 4, True), ("full", 7, 2, False)],
)
def test_large_micro_batches_are_recorded_only_where_it_brings_something(
    method: str, rows_a_pack: int, size: int, busy: bool
) -> None:
    packing: Any = SimpleNamespace(starts=np.arange(0, 11 * rows_a_pack, rows_a_pack))
    train: Any = SimpleNamespace(streamed=False, packing=packing, lengths=lambda: np.full(11, 2048))
    reason = busy_without(Settings(model="m", dataset=["d"], method=method), train, size)
    assert reason == ("micro-batches of 8,192 tokens keep the GPU busy without CUDA graphs" if busy else None)


@pytest.mark.parametrize(("starts", "sequences"), [([0, 1, 2, 3], 2), ([0, 1, 3, 4], 0)])
def test_packs_of_one_row_each_are_sequences(starts: list[int], sequences: int) -> None:
    packing: Any = SimpleNamespace(starts=np.array(starts), longest=200)
    train: Any = SimpleNamespace(streamed=False, packing=packing, lengths=lambda: np.array([200, 150, 130, 1]))
    shape = shape_for(train, 2, 512)
    assert shape.sequences == sequences
    # Two rows of 200 tokens; or packs of 350 tokens, as one sequence.
    assert (shape.tokens, shape.longest) == ((512, 256) if sequences else (384, 512))


def test_streamed_rows_are_laid_out_with_boundaries() -> None:
    train: Any = SimpleNamespace(streamed=True, packing=SimpleNamespace(starts=np.array([0, 1])))
    assert shape_for(train, 2, 512).sequences == 0
