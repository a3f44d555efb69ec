"""Check what the callback passes to the display of a run."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unsloth_ddp.distributed.watch.progress import Progress
from unsloth_ddp.training.shown.display import ShowTraining
from unsloth_ddp.training.shown.status import Status


class Seen:
    """A view that keeps what it is told."""

    def begin(self, status: Status) -> None:
        self.status = status

    def logged(self, status: Status) -> None: ...

    def evaluated(self, status: Status) -> None: ...

    def end(self) -> None: ...


ARGS: Any = SimpleNamespace(run_name="r", max_steps=0, num_train_epochs=3, device=torch.device("cpu"))


def begun(history: list[dict[str, Any]], checkpoint: Any) -> Status:
    state = SimpleNamespace(is_world_process_zero=True, max_steps=30, global_step=12, epoch=1.2, log_history=history)
    view = Seen()
    ShowTraining(view, Progress(), lambda: checkpoint).on_train_begin(ARGS, state, None)
    return view.status


def test_a_resumed_run_begins_with_what_it_had(tmp_path) -> None:
    checkpoint = tmp_path / "checkpoint-10"
    checkpoint.mkdir()
    os.utime(checkpoint, (0, time.time() - 600))
    history = [
        {"step": 5, "loss": 3.0},
        {"step": 5, "eval_loss": 2.5, "eval_runtime": 0.5},
        {"step": 10, "loss": 2.0},
        {"step": 10, "eval_loss": 1.5, "eval_runtime": 0.25},
        {"step": 12, "loss": 1.0},
    ]
    status = begun(history, checkpoint)
    assert (status.step, status.steps, status.losses) == (12, 30, [3.0, 2.0, 1.0])
    assert status.evaluation == (10, 1.5, 0.25)
    assert status.checkpoint is not None and status.checkpoint[0] == "checkpoint-10"
    assert time.monotonic() - status.checkpoint[1] == pytest.approx(600, abs=30)


def test_a_new_run_has_no_evaluation_and_a_checkpoint_may_vanish(tmp_path) -> None:
    assert begun([], None).evaluation is None
    status = begun([], tmp_path / "checkpoint-9")
    assert status.checkpoint is not None and time.monotonic() - status.checkpoint[1] < 30
