"""Write what people read of a run: record.json while it runs, report and model card when it ends.

Only the main process writes. A document that cannot be written costs one printed sentence, and never the run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_ddp.checkpoints.resume_point import ResumePoint
from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.run.documents.facts import part_facts, run_facts
from unsloth_ddp.run.documents.files import CARD_FILE, RECORD_FILE, REPORT_FILE
from unsloth_ddp.run.documents.model_card import write_card
from unsloth_ddp.run.documents.record import RunRecord, begin_record, end_record, read_run
from unsloth_ddp.run.documents.report import write_report
from unsloth_ddp.utils.errors import UserError, one_line, os_reason
from unsloth_ddp.utils.redaction import hide, printable

if TYPE_CHECKING:
    # Importing it imports Transformers, which has to wait for Unsloth.
    from unsloth_ddp.training.trainer import DDPTrainer


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
        answers: the compared answers (see facts.answer_facts).
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
