"""Show a run while it trains: a live display on a terminal, aligned lines in a log file or a pipe, and trackers."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from unsloth_ddp.distributed.watch.progress import Progress
from unsloth_ddp.training.shown.live_display import LiveDisplay, can_draw
from unsloth_ddp.training.shown.status import Status, View, shown_as, shown_clock, shown_number
from unsloth_ddp.utils.units import shown_bytes, shown_seconds

LINES_A_HEADER = 20
GAP = "  "


def choose_view(*, lines: bool) -> View:
    """Return the live display if standard output is a terminal that can show it, otherwise log lines."""
    return LogLines() if lines or not can_draw(sys.stdout) else LiveDisplay(sys.stdout)  # type: ignore[arg-type]


def shown_callbacks(callbacks: list[Any], trackers: tuple[type, ...]) -> list[Any]:
    """Return a trainer's callbacks without those that print dictionaries and draw bars, and with trackers as BestEffort."""
    kept = [callback for callback in callbacks if not isinstance(callback, (ProgressCallback, PrinterCallback))]
    return [BestEffort(callback) if isinstance(callback, trackers) else callback for callback in kept]


class BestEffort:
    """Pass events to a tracker (TensorBoard and others) until one fails, without ending the training."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        handler = getattr(self.tracker, name)
        return functools.partial(self._hand_on, handler) if name.startswith("on_") else handler

    def _hand_on(self, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.failed:
            return None
        try:
            return handler(*args, **kwargs)
        except Exception as error:
            self.failed = True
            name = type(self.tracker).__name__.removesuffix("Callback")
            print(f"{name} failed, so the run stops reporting to it: {' '.join(str(error).split())}", flush=True)
            return None


class LogLines(View):
    """Print the lines of one run, with a header above every LINES_A_HEADER of them."""

    def __init__(self) -> None:
        self._lines = 0
        self._header = ""

    def logged(self, status: Status) -> None:
        """Print the line of a log step."""
        cells = training_cells(status)
        header = GAP.join(f"{name:>{width}}" for name, (width, _) in cells.items())
        if self._lines % LINES_A_HEADER == 0 or header != self._header:
            self._header, self._lines = header, 0
            print(header)
        self._lines += 1
        print(GAP.join(f"{text:>{width}}" for width, text in cells.values()), flush=True)

    def evaluated(self, status: Status) -> None:
        """Print the line of an evaluation."""
        assert status.evaluation is not None
        _, loss, seconds = status.evaluation
        took = "" if seconds is None else f", {shown_seconds(seconds)}"
        accuracy = "" if status.eval_accuracy is None else f", accuracy {status.eval_accuracy:.1%}"
        place = GAP.join(f"{text:>{width}}" for width, text in place_cells(status).values())
        print(f"{place}{GAP}evaluation: loss {shown_number(loss)}{accuracy}{took}", flush=True)


def place_cells(status: Status) -> dict[str, tuple[int, str]]:
    """Return width and text of the columns for step and epoch."""
    return {
        "step": (max(4, 2 * len(str(status.steps)) + 1), f"{status.step}/{status.steps}"),
        "epoch": (6, f"{status.epoch:.2f}"),
    }


def training_cells(status: Status) -> dict[str, tuple[int, str]]:
    """Return width and text of every column of a log step's line; MFU, accuracy and margin only where they are known."""
    preferences = {}
    if status.accuracy is not None:
        # With kto, the rows of a line may all be of one kind; they have no margin then.
        preferences = {"accuracy": (8, f"{status.accuracy:.1%}"), "margin": (8, shown_number(status.margin, 3))}
    return {
        **place_cells(status),
        "loss": (8, shown_number(status.losses[-1])),
        **preferences,
        "grad norm": (9, shown_number(status.grad_norm, 3)),
        "learning rate": (13, shown_as(status.learning_rate, "{:.2e}".format)),
        "tokens/s": (9, shown_as(status.tokens_per_second, "{:,.0f}".format)),
        **({} if status.mfu is None else {"MFU": (5, f"{status.mfu:.1%}")}),
        "memory": (10, shown_as(status.memory_bytes, shown_bytes)),
        "time left": (9, shown_clock(status.seconds_left)),
    }


class ShowTraining(TrainerCallback):
    """Pass the events of a run to the view, in the main process only."""

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
            capacity_bytes=torch.cuda.get_device_properties(args.device).total_memory
            if args.device.type == "cuda"
            else None,
            phase=lambda: self.progress.phase,
        )
        self._find_checkpoint()
        self.view.begin(self.status)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count a step."""
        if self.status is not None:
            self.status.step, self.status.epoch = state.global_step, state.epoch or 0.0
            self.status.time_left.step_done(state.global_step)
            # One is complete some time after it was begun.
            self._find_checkpoint()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show the metrics of a log step or of an evaluation."""
        if self.status is None:
            return
        if "loss" in logs:
            self.status.update(logs)
            self.view.logged(self.status)
        elif "eval_loss" in logs:
            self.status.evaluation = state.global_step, logs["eval_loss"], logs.get("eval_runtime")
            self.status.eval_accuracy = logs.get("eval_rewards/accuracies")
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

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the last checkpoint."""
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
