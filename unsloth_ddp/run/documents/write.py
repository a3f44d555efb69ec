"""Write what people read of a run: record.json while it runs, report and model card when it ends.

Only the main process writes. A document that cannot be written costs one printed sentence, and never the run.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from unsloth_ddp.checkpoints.identity import batch_identity
from unsloth_ddp.checkpoints.resume_point import ResumePoint
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.dataset import TokenizedRows
from unsloth_ddp.data.images.files import thumbnail
from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.loading.classes import model_class
from unsloth_ddp.model.loading.load import parameter_counts
from unsloth_ddp.model.modules import base_model
from unsloth_ddp.run.answers import Question, is_exact
from unsloth_ddp.run.documents.files import CARD_FILE, RECORD_FILE, REPORT_FILE
from unsloth_ddp.run.documents.model_card import write_card
from unsloth_ddp.run.documents.record import RunRecord, begin_record, end_record, read_run
from unsloth_ddp.run.documents.report import write_report
from unsloth_ddp.utils.errors import UserError, one_line, os_reason
from unsloth_ddp.utils.files.sources import read_source
from unsloth_ddp.utils.redaction import hide, printable
from unsloth_ddp.utils.versions import versions

if TYPE_CHECKING:
    # Importing it imports Transformers, which has to wait for Unsloth.
    from unsloth_ddp.training.trainer import DDPTrainer

# Compared answers that are kept, and characters of each text.
MOST_ANSWERS, LONGEST_ANSWER = 200, 4000


def begin(
    settings: Settings,
    runtime: Runtime,
    trainer: DDPTrainer,
    folder: Path,
    resume: ResumePoint | None,
    *,
    plain_text: bool,
) -> None:

    def write() -> None:
        part = part_facts(runtime, trainer, resume.manifest.step if resume else 0)
        facts = run_facts(settings, trainer)
        facts["data"]["plain_text"] = plain_text
        begin_record(folder, facts, part, continued=resume is not None and resume.of_this_run)

    _write(runtime, folder / RECORD_FILE, write)


def stopped(runtime: Runtime, trainer: DDPTrainer, folder: Path, cause: str, seconds: float) -> None:
    """Write the report of a run that the ranks stopped together after so many seconds of training."""
    step = trainer.state.global_step
    _write(runtime, folder / RECORD_FILE, lambda: end_record(folder, step=step, seconds=seconds, cause=cause))
    _write(runtime, folder / REPORT_FILE, lambda: write_report(_run_of(trainer, folder)))


def finished(
    runtime: Runtime, trainer: DDPTrainer, folder: Path, summary: dict[str, Any], answers: list[dict[str, Any]]
) -> None:
    """Write report and model card of a run whose result is written.

    Args:
        summary: content of summary.json, which is written after this: it says that the run is finished.
        answers: the compared answers (see answer_facts).
    """
    step, seconds = trainer.state.global_step, summary["train_seconds"]
    _write(runtime, folder / RECORD_FILE, lambda: end_record(folder, step=step, seconds=seconds, answers=answers))
    _write(runtime, folder / CARD_FILE, lambda: write_card(_run_of(trainer, folder, summary)))
    _write(runtime, folder / REPORT_FILE, lambda: write_report(_run_of(trainer, folder, summary)))


def _run_of(trainer: DDPTrainer, folder: Path, summary: dict[str, Any] | None = None) -> RunRecord:
    """Return the run as its folder describes it, with what the trainer knows and the folder need not have."""
    state = trainer.state
    return dataclasses.replace(
        read_run(folder),
        summary=summary or {},
        history=[dict(entry) for entry in state.log_history],
        step=state.global_step,
        max_steps=state.max_steps,
    )


def _write(runtime: Runtime, path: Path, write: Callable[[], Any]) -> None:
    if not runtime.ranks.is_main:
        return
    try:
        write()
    except UserError as error:
        print(f"{path} is not written: {error}", flush=True)
    except OSError as error:
        print(f"{path} cannot be written: {os_reason(error)}.", flush=True)
    except Exception as error:  # a document is not worth a run
        sentence = hide(printable(one_line(error)))
        print(f"{path} is not written, because of an error of the kit: {type(error).__name__}: {sentence}.", flush=True)


# ---- what record.json keeps ----


def run_facts(settings: Settings, trainer: DDPTrainer) -> dict[str, Any]:
    """Return what is known of the model, the rows and the steps of a run, in plain values."""
    data = trainer.data
    total, trainable = parameter_counts(trainer.model)
    config, name = base_model(trainer.model).config, str(settings.model)
    plan, units = trainer.plan, data.train.units
    return {
        "model": {
            "parameters": total,
            "trainable": trainable,
            "local": is_file(name),
            # Of Transformers, to load the model with.
            "auto_class": model_class(config, settings).__name__,
            # Towers and projectors of a 4-bit model, among others.
            "unquantized": getattr(getattr(config, "quantization_config", None), "llm_int8_skip_modules", None),
            # What chat and export compare the base model with.
            "weights": trainer.checkpoints.identity.get("model_weights"),
            "license": base_license(name, settings.model_revision),
        },
        "data": {
            "hub": [name for name in (read_source(text).name for text in settings.dataset) if not is_file(name)],
            "train": _counts(data.train),
            "evaluation": _counts(data.evaluation) if data.evaluation else None,
            "packing": data.packing.reason if data.train.packing is not None else None,
            "packs": len(data.train.packing) if data.train.packing is not None else None,
            "streamed": data.train.streamed,
            "first_image": first_image(data.train),
        },
        "steps": plan.steps(units, settings.num_train_epochs, settings.max_steps),
        "steps_per_epoch": None if data.train.streamed else plan.steps_per_epoch(units),
    }


def first_image(rows: TokenizedRows) -> str | None:
    """Return a thumbnail of the first image of the rows as a data URI; None if there is none, or it cannot be read."""
    shown = np.flatnonzero(rows.pixels()) if rows.processing is not None else np.array([])
    if not len(shown):
        return None
    try:
        return thumbnail(rows.rows[int(shown[0])]["images"][0])
    except UserError:
        return None


def part_facts(runtime: Runtime, trainer: DDPTrainer, first_step: int) -> dict[str, Any]:
    """Return how this part of a run is run; the names are those of summary.json where that has the value too."""
    cuda = runtime.device_type == "cuda"
    hardware = {"cpus": os.cpu_count(), "platform": platform.platform()}
    if cuda:
        hardware |= {"gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory, "cuda": torch.version.cuda}
    return {
        "first_step": first_step,
        "command": [hide(word) for word in sys.argv[1:]],
        **runtime.layout(),
        "device_type": runtime.device_type,
        "gradient_checkpointing": trainer.step.rung.kind,
        **batch_identity(trainer.plan),
        "versions": versions(),
        "hardware": hardware,
    }


def base_license(model: str, revision: str | None) -> dict[str, str] | None:
    """Return license, license_name and license_link of the base model's card; None if no card is on this machine."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    path: Any = Path(model) / "README.md"
    if not is_file(model):
        path = try_to_load_from_cache(model, "README.md", revision=revision)
    try:
        if not isinstance(path, (str, Path)) or not Path(path).is_file():
            return None
        card = ModelCard.load(Path(path), ignore_metadata_errors=True).data.to_dict()
    except Exception:  # YAML that is broken in any way; a card is not needed
        return None
    fields = {name: card.get(name) for name in ("license", "license_name", "license_link")}
    named = {name: value for name, value in fields.items() if isinstance(value, str)}
    return named if "license" in named else None


def answer_facts(questions: list[Question], old_answers: list[str], new_answers: list[str]) -> list[dict[str, Any]]:
    """Return the compared answers, each with the question's turns; the first MOST_ANSWERS, long texts cut."""
    together = list(zip(questions, old_answers, new_answers, strict=True))[:MOST_ANSWERS]
    return [
        {
            "turns": [{"role": turn["role"], "text": _shortened(str(turn.get("content") or ""))} for turn in q.turns],
            **({"images": [Path(image).name[:100] for image in q.images]} if q.images else {}),
            "expected": _shortened(q.answer),
            "before": _shortened(old),
            "after": _shortened(new),
            "exact_before": is_exact(q, old),
            "exact_after": is_exact(q, new),
        }
        for q, old, new in together
    ]


def _shortened(text: str) -> str:
    return hide(text)[:LONGEST_ANSWER]


def _counts(rows: TokenizedRows) -> dict[str, int]:
    counts = rows.counts
    return {name: getattr(counts, name) for name in ("rows", "tokens", "supervised", "truncated", "dropped", "longest")}
