"""Check a checkpoint's trainer_state.json before Transformers makes the state of a run of it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from unsloth_ddp.checkpoints.manifest import Damaged, Manifest
from unsloth_ddp.utils.errors import os_reason
from unsloth_ddp.utils.files.safe import read_regular

FILE_NAME = "trainer_state.json"
# A million log lines have a third of this.
MOST_BYTES = 1 << 30


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value >= 0


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_callbacks(value: Any) -> bool:
    """Return whether these are the states of callbacks: one of each class, or a list of them."""
    if not isinstance(value, dict):
        return False
    states = [callback for state in value.values() for callback in (state if isinstance(state, list) else [state])]
    parts = [state.get(name) for state in states if isinstance(state, dict) for name in ("args", "attributes")]
    return len(parts) == 2 * len(states) and all(isinstance(part, dict) for part in parts)


INTERVALS = (
    "epoch", "logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs", "best_global_step",
)  # fmt: skip
# Losses can be NaN: a step that overflows in fp16 has such a loss and changes no weight.
CHECKS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("global_step", "max_steps"), _is_whole),
    **dict.fromkeys(INTERVALS, lambda value: value is None or _is_count(value)),
    **dict.fromkeys(("num_input_tokens_seen", "total_flos"), _is_count),
    "log_history": lambda value: isinstance(value, list) and all(isinstance(entry, dict) for entry in value),
    "best_metric": lambda value: value is None or _is_number(value),
    "best_model_checkpoint": lambda value: value is None or isinstance(value, str),
    "stateful_callbacks": _are_callbacks,
}


def _are_totals(saved: Any) -> bool:
    """Return whether this is what the kit itself keeps there (training/callbacks.py, SavedTotals).

    totals   sums by name; those of losses can be NaN, and numbers of tokens are whole
    pending  as many sums of each rank, the number of tokens last
    stream   a position in streamed rows
    """
    if not isinstance(saved, dict) or saved["args"].keys() - {"totals", "pending", "stream"}:
        return False
    totals = saved["args"].get("totals", {})
    pending, stream = saved["args"].get("pending"), saved["args"].get("stream")
    pending, stream = [] if pending is None else pending, {} if stream is None else stream
    if not (isinstance(totals, dict) and isinstance(pending, list) and isinstance(stream, dict)):
        return False
    if not all(isinstance(sums, list) and len(sums) == len(pending[0]) >= 3 for sums in pending):
        return False
    tokens = [value for name, value in totals.items() if "tokens" in name]
    return (
        all(map(_is_number, [*totals.values(), *(value for sums in pending for value in sums)]))
        and all(map(_is_count, [*tokens, *(sums[-1] for sums in pending)]))
        and all(value == round(value) for value in tokens)
        and stream.keys() <= {"epoch", "row", "seen", "used"}
        and all(_is_whole(value) for name, value in stream.items() if name != "seen" or value is not None)
    )


def check_trainer_state(folder: Path, manifest: Manifest) -> None:
    """Refuse a state that does not belong to the manifest, or that no run has written.

    Raises:
        Damaged: naming the first field that is wrong.
    """
    from transformers import TrainerState

    steps = manifest.run.get("steps")
    if isinstance(steps, int) and manifest.step > steps:
        raise Damaged(f"its manifest has step {manifest.step:,} of a run of {steps:,}")
    try:
        state = json.loads(read_regular(folder / FILE_NAME, MOST_BYTES))
    except OSError as error:
        raise Damaged(f"{FILE_NAME} cannot be read: {os_reason(error)}") from None
    except (ValueError, RecursionError):
        raise Damaged(f"{FILE_NAME} is not JSON") from None
    if not isinstance(state, dict):
        raise Damaged(f"{FILE_NAME} holds no mapping")
    if wrong := first_wrong(state, [field.name for field in dataclasses.fields(TrainerState)]):
        raise Damaged(f"{wrong} in {FILE_NAME} has a value that no run writes")
    if state.get("global_step") != manifest.step:
        raise Damaged(f"global_step in {FILE_NAME} is {str(state.get('global_step'))[:40]} and not {manifest.step}")


def first_wrong(state: Mapping[str, Any], fields: Collection[str]) -> str | None:
    """Return the first field of a state that is not known or has an impossible value; None if all are possible."""
    for name, value in state.items():
        if name not in fields or not CHECKS.get(name, lambda _: True)(value):
            return name[:100]
    saved = (state.get("stateful_callbacks") or {}).get("SavedTotals")
    return None if saved is None or _are_totals(saved) else "SavedTotals"
