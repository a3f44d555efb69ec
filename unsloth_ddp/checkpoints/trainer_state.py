"""Check a checkpoint's trainer_state.json before Transformers makes the state of a run of it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from unsloth_ddp.checkpoints.manifest import Damaged, Manifest
from unsloth_ddp.utils.errors import os_reason
from unsloth_ddp.utils.files.safe import read_regular

FILE_NAME = "trainer_state.json"
# A million log lines have a third of this.
MOST_BYTES = 1 << 30
Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value) and value >= 0


def _is_whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _fields(**checks: Check) -> Check:
    """Return the check of a mapping with no other fields than these."""
    return lambda value: (
        isinstance(value, dict)
        and value.keys() <= checks.keys()
        and all(checks[name](item) for name, item in value.items())
    )


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_state(value: Any) -> bool:
    return isinstance(value, dict) and _is_mapping(value.get("args")) and _is_mapping(value.get("attributes"))


_interval = _or_none(_is_count)
# Losses can be NaN: a step that overflows in fp16 has such a loss and changes no weight.
CHECKS: Mapping[str, Check] = {
    "epoch": _or_none(_is_count),
    "global_step": _is_whole,
    "max_steps": _is_whole,
    **dict.fromkeys(("logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs"), _interval),
    **dict.fromkeys(("num_input_tokens_seen", "total_flos"), _is_count),
    "log_history": _list_of(_is_mapping),
    "best_metric": _or_none(_is_number),
    "best_global_step": _or_none(_is_whole),
    "best_model_checkpoint": _or_none(lambda value: isinstance(value, str)),
    "stateful_callbacks": lambda value: (
        isinstance(value, dict) and all(_is_state(one) or _list_of(_is_state)(one) for one in value.values())
    ),
}


def _is_totals(value: Any) -> bool:
    """Return whether these are sums by name; those of losses can be NaN, and numbers of tokens are whole."""
    return (
        isinstance(value, dict)
        and all(map(_is_number, value.values()))
        and all(_is_count(item) and item == round(item) for name, item in value.items() if "tokens" in name)
    )


def _is_pending(value: Any) -> bool:
    """Return whether these are as many sums of each rank, the number of tokens last."""
    return (
        _list_of(_list_of(_is_number))(value)
        and len({len(sums) for sums in value}) <= 1
        and all(len(sums) >= 3 and _is_count(sums[-1]) for sums in value)
    )


# What the kit itself keeps there (training/callbacks.py, SavedTotals).
TOTALS = _fields(
    totals=_is_totals,
    pending=_or_none(_is_pending),
    stream=_or_none(_fields(epoch=_is_whole, row=_is_whole, seen=_or_none(_is_whole), used=_is_whole)),
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
    if wrong := first_wrong(state, (field.name for field in dataclasses.fields(TrainerState))):
        raise Damaged(f"{wrong} in {FILE_NAME} has a value that no run writes")
    if state.get("global_step") != manifest.step:
        raise Damaged(f"global_step in {FILE_NAME} is {str(state.get('global_step'))[:40]} and not {manifest.step}")


def first_wrong(state: Mapping[str, Any], known: Iterable[str]) -> str | None:
    """Return the first field of a state that is not known or has an impossible value; None if all are possible."""
    names = set(known)
    for name, value in state.items():
        if name not in names or not CHECKS.get(name, lambda _: True)(value):
            return name[:100]
    saved = (state.get("stateful_callbacks") or {}).get("SavedTotals")
    return None if saved is None or (_is_mapping(saved) and TOTALS(saved["args"])) else "SavedTotals"
