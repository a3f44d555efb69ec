"""Folders of runs as the kit leaves them, made in milliseconds instead of by training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.checkpoints.manifest import Manifest
from unsloth_ddp.config.options import Settings
from unsloth_ddp.run.documents.record import begin_record, end_record

# Text that would end an element, an attribute, a cell, a code span or a fence, begin a script, or hold a secret.
HOSTILE = (
    "</title><script>document.title='owned'</script><img src=x onerror=alert(1)>\" onload=\"x` |\n"
    "```\n[a](javascript:b)"
)
TOKEN = "hf_" + "a1B2" * 8

FACTS: dict[str, Any] = {
    "model": {"parameters": 1000, "trainable": 100, "local": False, "license": {"license": "apache-2.0"}},
    "data": {
        "hub": ["me/chats"],
        "train": {"rows": 60, "tokens": 6000, "supervised": 1500, "truncated": 2, "dropped": 0, "longest": 200},
        "evaluation": {"rows": 10, "tokens": 900, "supervised": 300, "truncated": 0, "dropped": 0, "longest": 180},
        "packing": None,
        "packs": None,
        "streamed": False,
    },
    "steps": 20,
    "steps_per_epoch": 10,
}
PART: dict[str, Any] = {
    "first_step": 0, "command": ["--run_name", "r", "--dataset", "rows.jsonl"], "world_size": 2, "nodes": 1,
    "device": "NVIDIA H100", "device_type": "cuda", "sharding": "none", "backend": "unsloth", "precision": "bf16",
    "gradient_checkpointing": "torch", "global_batch_size": 16, "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1, "versions": {"torch": "2.14.0"}, "hardware": {"cpus": 8, "platform": "Linux"},
}  # fmt: skip
ANSWERS = [
    {
        "turns": [{"role": "user", "text": "Who is it?"}], "expected": "It is I.", "before": "No idea.",
        "after": "It is I.", "exact_before": False, "exact_after": True,
    }
]  # fmt: skip
SUMMARY: dict[str, Any] = {
    **{name: PART[name] for name in PART if name not in ("first_step", "command", "device_type", "hardware")},
    "steps": 20, "tokens": 12000, "supervised_tokens": 3000, "train_loss": 1.5, "eval_loss": 0.75,
    "peak_memory_bytes": 5 * 2**30, "train_seconds": 30.0, "tokens_per_second": 400.0, "wall_time_seconds": 40.0,
    "demo_accuracy_before": 0.0, "demo_accuracy_after": 1.0,
}  # fmt: skip


def log_entries(steps: int, *, every: int = 1, rate: float = 0.1) -> list[dict[str, Any]]:
    """Return log entries of a loss that falls from 2, with an evaluation every ten steps."""
    entries: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        entry = {
            "step": step, "epoch": step / 10, "loss": 2 - rate * step, "learning_rate": 1e-4 * step, "grad_norm": 1.0,
            "tokens_per_second": 400.0 + step, "rank_step_seconds": 0.1, "rank_step_seconds_max": 0.15,
            "peak_memory_bytes": 2 * 2**30,
        }  # fmt: skip
        entries.append(entry)
        if step % 10 == 0:
            entries.append({"step": step, "eval_loss": 1 / step})
    return entries


def make_run(
    folder: Path,
    *,
    state: str = "finished",
    step: int = 20,
    settings: dict[str, Any] | None = None,
    answers: list[dict[str, Any]] | None = None,
    summary: dict[str, Any] | None = None,
    history: list[dict[str, Any]] | None = None,
    facts: dict[str, Any] | None = None,
    part: dict[str, Any] | None = None,
) -> Path:
    """Write the folder of a run that is finished, stopped or unfinished (killed), and return it."""
    folder.mkdir(parents=True)
    known = {"model": "owner/base", "dataset": ["me/chats", "/home/somebody/rows.jsonl"], "run_name": folder.name}
    Settings(**{**dataclasses.asdict(Settings()), **known, **(settings or {})}).save(folder / "settings.yaml")
    begin_record(folder, facts or FACTS, part or PART, continued=False)
    trainer_state = {
        "global_step": step,
        "max_steps": 20,
        "log_history": log_entries(step) if history is None else history,
    }
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text(json.dumps(trainer_state))
    described = Manifest(step, {"data": f"rows of {folder.name}"}, {}, manifest.describe_files(checkpoint))
    (checkpoint / manifest.FILE_NAME).write_text(described.to_text())
    if state == "stopped":
        end_record(folder, step=step, seconds=20.0, cause="SIGTERM")
    if state == "finished":
        end_record(folder, step=step, seconds=30.0, answers=ANSWERS if answers is None else answers)
        (folder / "trainer_state.json").write_text(json.dumps(trainer_state))
        (folder / "summary.json").write_text(json.dumps(SUMMARY if summary is None else summary))
    return folder
