"""Show a run while it trains: aligned lines, below them its progress on a terminal, and trackers."""

import functools
import sys
from collections.abc import Callable
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from unsloth_ddp.distributed.watch.progress import Progress
from unsloth_ddp.training.shown.live_display import LiveDisplay, can_draw
from unsloth_ddp.training.shown.status import Status, shown_as, shown_clock, shown_number
from unsloth_ddp.utils.units import shown_bytes, shown_seconds

LINES_A_HEADER = 20
GAP = "  "
# Columns that a terminal has in the line of progress.
IN_PROGRESS = ("epoch", "time left")


def choose_display(*, lines: bool) -> LiveDisplay | None:
    """Return the display of progress if standard output is a terminal that can show it."""
    return None if lines or not can_draw(sys.stdout) else LiveDisplay(sys.stdout)  # type: ignore[arg-type]


def shown_callbacks(callbacks: list[Any], trackers: tuple[type, ...]) -> list[Any]:
    """Return a trainer's callbacks without those that print dictionaries or draw bars, with trackers as BestEffort."""
    remaining = [callback for callback in callbacks if not isinstance(callback, (ProgressCallback, PrinterCallback))]
    return [BestEffort(callback) if isinstance(callback, trackers) else callback for callback in remaining]


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


class ShowTraining(TrainerCallback):
    """Print the lines of a run, with a header above every LINES_A_HEADER of them, in the main process only."""

    def __init__(self, display: LiveDisplay | None, progress: Progress) -> None:
        self.display = display
        self.progress = progress
        self.status: Status | None = None
        self._lines = 0
        self._header = ""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to show the run, which may be resumed."""
        if not state.is_world_process_zero:
            return
        self.status = Status(state.max_steps, state.global_step, state.epoch or 0.0, phase=lambda: self.progress.phase)
        if self.display is not None:
            self.display.begin(self.status)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.status is not None:
            self.status.step, self.status.epoch = state.global_step, state.epoch or 0.0
            self.status.time_left.step_done(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the line of a log step or of an evaluation."""
        if self.status is None:
            return
        left_out = IN_PROGRESS if self.display is not None else ()
        if "loss" in logs:
            # The host launches steps ahead of the GPU, and has waited for it only now.
            self.status.time_left.step_done(state.global_step)
            self._print_line(without(training_cells(self.status, logs), left_out))
        elif "eval_loss" in logs:
            place = joined(without(place_cells(self.status), left_out))
            print(f"{place}{GAP}{describe_evaluation(logs)}", flush=True)

    def _print_line(self, cells: dict[str, tuple[int, str]]) -> None:
        header = joined({name: (width, name) for name, (width, _) in cells.items()})
        if self._lines % LINES_A_HEADER == 0 or header != self._header:
            self._header, self._lines = header, 0
            print(header)
        self._lines += 1
        print(joined(cells), flush=True)

    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Count a batch of an evaluation."""
        if self.status is not None:
            evaluated = self.status.evaluated[0] if self.status.evaluated else 0
            batches = len(eval_dataloader) if hasattr(eval_dataloader, "__len__") else None
            self.status.evaluated = evaluated + 1, batches

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the end of an evaluation."""
        if self.status is not None:
            self.status.evaluated = None

    def end(self) -> None:
        """Stop drawing."""
        if self.display is not None:
            self.display.end()


def place_cells(status: Status) -> dict[str, tuple[int, str]]:
    """Return width and text of the columns for step and epoch."""
    return {
        "step": (max(4, 2 * len(str(status.steps)) + 1), f"{status.step}/{status.steps}"),
        "epoch": (6, f"{status.epoch:.2f}"),
    }


def training_cells(status: Status, logs: dict[str, float]) -> dict[str, tuple[int, str]]:
    """Return width and text of every column of a log step's line; MFU, accuracy and margin where they are known."""
    preferences = {}
    if "rewards/accuracies" in logs:
        # With kto, the rows of a line may all be of one kind; they have no margin then.
        margin = shown_number(logs.get("rewards/margins"), 3)
        preferences = {"accuracy": (8, f"{logs['rewards/accuracies']:.1%}"), "margin": (8, margin)}
    return {
        **place_cells(status),
        "loss": (8, shown_number(logs["loss"])),
        **preferences,
        "grad norm": (9, shown_number(logs.get("grad_norm"), 3)),
        "learning rate": (13, shown_as(logs.get("learning_rate"), "{:.2e}".format)),
        "tokens/s": (9, shown_as(logs.get("tokens_per_second"), "{:,.0f}".format)),
        **({"MFU": (5, f"{logs['mfu']:.1%}")} if "mfu" in logs else {}),
        "memory": (10, shown_as(logs.get("peak_memory_bytes"), shown_bytes)),
        "time left": (9, shown_clock(status.seconds_left)),
    }


def describe_evaluation(logs: dict[str, float]) -> str:
    """Return what the line of an evaluation says."""
    accuracy = f", accuracy {logs['eval_rewards/accuracies']:.1%}" if "eval_rewards/accuracies" in logs else ""
    took = f", {shown_seconds(logs['eval_runtime'])}" if "eval_runtime" in logs else ""
    return f"evaluation: loss {shown_number(logs['eval_loss'])}{accuracy}{took}"


def without(cells: dict[str, tuple[int, str]], names: tuple[str, ...]) -> dict[str, tuple[int, str]]:
    """Return the cells of the other columns."""
    return {name: cell for name, cell in cells.items() if name not in names}


def joined(cells: dict[str, tuple[int, str]]) -> str:
    """Return cells as a line."""
    return GAP.join(f"{text:>{width}}" for width, text in cells.values())
