"""Show a run while it trains: a live display on a terminal, aligned lines in a log file or a pipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from unsloth_ddp.distributed.progress import Progress
from unsloth_ddp.training.live_display import LiveDisplay, can_draw
from unsloth_ddp.training.log_lines import LogLines
from unsloth_ddp.training.status import Status


class View(Protocol):
    """Display a run; only the main process has a view."""

    def begin(self, status: Status) -> None:
        """Show the state before the first step; `status` is updated in place from now on."""

    def logged(self, status: Status) -> None:
        """Show the metrics of a log step."""

    def evaluated(self, status: Status) -> None:
        """Show an evaluation."""

    def end(self) -> None:
        """Stop drawing; may be called twice."""


def choose_view(*, lines: bool) -> View:
    """Return the live display if standard output is a terminal that can show it, otherwise log lines.

    Args:
        lines: print lines on a terminal too.
    """
    return LogLines() if lines or not can_draw(sys.stdout) else LiveDisplay(sys.stdout)  # type: ignore[arg-type]


def without_bars(callbacks: list[Any]) -> list[Any]:
    """Return a trainer's callbacks without those of Transformers that print dictionaries and draw bars."""
    return [callback for callback in callbacks if not isinstance(callback, (ProgressCallback, PrinterCallback))]


class ShowTraining(TrainerCallback):
    """Pass the events of a run to the view, in the main process only.

    Args:
        last_checkpoint: returns the newest complete checkpoint of the run.
    """

    def __init__(self, view: View, progress: Progress, last_checkpoint: Callable[[], Path | None]) -> None:
        self.view = view
        self.progress = progress
        self.last_checkpoint = last_checkpoint
        self.status: Status | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to show the run, which may be resumed."""
        if not state.is_world_process_zero:
            return
        self.status = Status(
            name=str(args.run_name),
            steps=state.max_steps,
            epochs=None if args.max_steps > 0 else args.num_train_epochs,
            step=state.global_step,
            epoch=state.epoch or 0.0,
            losses=[entry["loss"] for entry in state.log_history if "loss" in entry],
            evaluation=_last_evaluation(state.log_history),
            capacity_bytes=_capacity(args.device),
            phase=lambda: self.progress.phase,
        )
        self._find_checkpoint()
        self.view.begin(self.status)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step."""
        if self.status is not None:
            self.status.step, self.status.epoch = state.global_step, state.epoch or 0.0
            self.status.time_left.step_done(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the metrics of a log step or of an evaluation."""
        if self.status is None:
            return
        if "loss" in logs:
            self.status.update(logs)
            self.view.logged(self.status)
        elif "eval_loss" in logs:
            self.status.evaluation = state.global_step, logs["eval_loss"], logs.get("eval_runtime")
            self.view.evaluated(self.status)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Count a batch of an evaluation."""
        if self.status is not None:
            done = self.status.evaluated[0] if self.status.evaluated else 0
            batches = len(eval_dataloader) if hasattr(eval_dataloader, "__len__") else None
            self.status.evaluated = done + 1, batches

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the end of an evaluation."""
        if self.status is not None:
            self.status.evaluated = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note a checkpoint, unless it could not be written."""
        if self.status is not None:
            self._find_checkpoint()

    def _find_checkpoint(self) -> None:
        folder = self.last_checkpoint()
        if self.status is not None and folder is not None:
            known = self.status.checkpoint
            if known is None or known[0] != folder.name:
                # The checkpoint that a resumed run begins with is older than this process.
                self.status.checkpoint = folder.name, time.monotonic() - _age(folder)


def _last_evaluation(history: list[dict[str, Any]]) -> tuple[int, float, float | None] | None:
    """Return step, loss and seconds of the last evaluation that was logged."""
    entry = next((entry for entry in reversed(history) if "eval_loss" in entry), None)
    return None if entry is None else (entry["step"], entry["eval_loss"], entry.get("eval_runtime"))


def _age(folder: Path) -> float:
    """Return the seconds since a checkpoint was written; 0 if another process has just removed it."""
    try:
        return max(0.0, time.time() - folder.stat().st_mtime)
    except OSError:
        return 0.0


def _capacity(device: torch.device) -> float | None:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
