"""Group metric names in TensorBoard, add the settings, and keep a failing tracker from ending the training."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from transformers.integrations import TensorBoardCallback

from unsloth_ddp.config.options import TOPICS, Settings
from unsloth_ddp.utils.redaction import hide, printable

# Metrics of the group speed/.
SPEED = {
    "tokens_per_second", "mfu", "peak_memory_bytes", "total_flos",
    "train_runtime", "train_samples_per_second", "train_steps_per_second",
}  # fmt: skip
RANKS = "rank_"


def protect_trackers(callbacks: list[Any], trackers: tuple[type, ...], settings: Settings) -> list[Any]:
    """Return a trainer's callbacks with TensorBoard's names grouped and every tracker wrapped in BestEffort.

    Args:
        trackers: classes of the callbacks that report to a tracker.
    """
    grouped = [GroupedTensorBoard(settings) if isinstance(c, TensorBoardCallback) else c for c in callbacks]
    return [BestEffort(callback) if isinstance(callback, trackers) else callback for callback in grouped]


class GroupedTensorBoard(TensorBoardCallback):
    """Transformers' TensorBoard tracker with names in groups (train/, eval/, speed/, ranks/) and a table of settings."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the event file, and write the settings."""
        super().on_train_begin(args, state, control, **kwargs)
        if self.tb_writer is not None:
            self.tb_writer.add_text("settings", settings_table(self.settings), state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the numbers of a log line."""
        if not state.is_world_process_zero:
            return
        if self.tb_writer is None:
            # The writer was closed at the end of training; a last evaluation may follow.
            self._init_summary_writer(args)
        for name, value in (logs or {}).items():
            if isinstance(value, (int, float)):
                self.tb_writer.add_scalar(grouped_name(name), value, state.global_step)
        self.tb_writer.flush()


def grouped_name(name: str) -> str:
    """Return TensorBoard's name of a logged metric, such as speed/tokens_per_second."""
    if name in SPEED:
        return f"speed/{name}"
    for prefix, group in ((RANKS, "ranks"), ("eval_", "eval"), ("test_", "test")):
        if name.startswith(prefix):
            return f"{group}/{name.removeprefix(prefix)}"
    return f"train/{name}"


def settings_table(settings: Settings) -> str:
    """Return the settings as a Markdown table; those that differ from the defaults are bold."""
    defaults = Settings()
    lines = ["| topic | option | value |", "|---|---|---|"]
    for topic in TOPICS:
        for name in (field.name for field in dataclasses.fields(topic)):
            value = getattr(settings, name)
            shown = " ".join(map(str, value)) if isinstance(value, list) else str(value)
            shown = hide(printable(shown)).replace("|", "\\|") or "-"
            changed = value != getattr(defaults, name)
            lines.append(f"| {topic.__doc__} | {name} | {f'**{shown}**' if changed else shown} |")
    return "\n".join(lines)


class BestEffort:
    """Pass events to a tracker (TensorBoard and others) until one fails, without ending the training.

    Args:
        tracker: the callback that Transformers made for it.
    """

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
