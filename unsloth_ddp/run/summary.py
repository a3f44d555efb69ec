"""Describe a run before its first step, and summarize it after the last."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unsloth_ddp.checkpoints.identity import batch_identity
from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.questionable import questionable_settings
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.sharding import describe_sharding
from unsloth_ddp.model.adapter.experts import describe_experts
from unsloth_ddp.model.loading.load import parameter_counts
from unsloth_ddp.model.towers import describe_beside_text
from unsloth_ddp.run.documents.files import LOCK_FILE, SUMMARY_FILE
from unsloth_ddp.run.documents.record import read_run
from unsloth_ddp.run.next_steps import chat_command
from unsloth_ddp.run.upload import upload
from unsloth_ddp.sizing.ladder import StepDecision
from unsloth_ddp.sizing.micro_batch import with_micro_batch
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.json import write_json
from unsloth_ddp.utils.tables import render_pairs
from unsloth_ddp.utils.units import counted, shown_seconds
from unsloth_ddp.utils.versions import versions

if TYPE_CHECKING:
    # Importing it imports Transformers, which has to wait for Unsloth.
    from unsloth_ddp.training.trainer import DDPTrainer


def describe_run(
    settings: Settings, runtime: Runtime, trainer: DDPTrainer, decision: StepDecision, run_folder: Path
) -> str:
    """Return the table that the main process prints before step 1."""
    data, model, task, rung = trainer.data, trainer.model, trainer.step.task, decision.rung
    total, trainable = parameter_counts(model)
    experts, beside_text = describe_experts(model), describe_beside_text(model)
    beside = "" if settings.method == "full" else ", adapter included"
    cuda = runtime.device_type == "cuda"
    described = describe_sharding(runtime.sharding, runtime.offload, runtime.copies, runtime.ranks.world_size)
    sharding = {"sharding": described} if runtime.sharding != "none" else {}
    return render_pairs(
        {
            "processes": f"{runtime.ranks.world_size} on {counted(runtime.ranks.nodes, 'node')}",
            "device": runtime.device_name,
            **sharding,
            "backend": runtime.backend,
            "precision": runtime.precision + (", products with frozen weights in FP8" if settings.fp8 else ""),
            "model": f"{settings.model} ({total:,} parameters{beside})",
            "method": f"{settings.method} ({trainable:,} trainable parameters, {trainable / total:.2%})",
            **({"beside the text": beside_text} if beside_text else {}),
            **({"experts": experts} if experts else {}),
            **({"loss": task.described} if task.described else {}),
            **describe_rows(settings, data, head_chooses=task.head_chooses),
            "optimizer": describe_optimizer(settings, runtime),
            "activations": f"gradient checkpointing {rung.kind}: {decision.rung_reason}",
            **({"CUDA graphs": f"{'on' if rung.captured else 'off'}: {decision.graphs}"} if cuda else {}),
            **describe_steps(settings, data, decision),
            "written to": str(run_folder),
        }
    )


def describe_optimizer(settings: Settings, runtime: Runtime) -> str:
    """Return the optimizer, also where accelerate replaces it by DeepSpeed's, and its learning rate."""
    on_cpu = " as DeepSpeed's CPU Adam" if runtime.offload != "none" and runtime.sharding != "fsdp2" else ""
    return f"{settings.optim}{on_cpu}, learning rate {settings.learning_rate:g}, {describe_schedule(settings)}"


def describe_schedule(settings: Settings) -> str:
    """Return the learning rate's schedule and warm-up in words."""
    warmup = settings.warmup_steps
    if not warmup:
        return f"{settings.lr_scheduler_type} schedule, no warm-up"
    length = f"warm-up of {warmup:.0%} of the steps" if warmup < 1 else counted(int(warmup), "warm-up step")
    return f"{settings.lr_scheduler_type} schedule, {length}"


def questionable(settings: Settings, data: TrainingData, decision: StepDecision) -> list[str]:
    """Return a sentence for each setting that leaves little to learn from this run."""
    rows, plan = data.train, with_micro_batch(data.plan, decision.rung.rows)
    rows_per_unit = rows.counts.rows / rows.units
    return questionable_settings(
        settings,
        steps=plan.steps(rows.units, settings.num_train_epochs, settings.max_steps),
        steps_per_epoch=None if rows.streamed else plan.steps_per_epoch(rows.units),
        rows=None if rows.streamed else rows.counts.rows,
        rows_per_step=plan.global_batch * rows_per_unit,
        truncated=rows.counts.truncated,
        unsupervised=rows.counts.unsupervised,
        cut_answers=rows.counts.cut_answers,
    )


def describe_rows(settings: Settings, data: TrainingData, *, head_chooses: bool) -> dict[str, str]:
    """Return the table's lines on rows, supervised tokens and packing."""
    rows, counts = data.train, data.train.counts
    amount = f"{counted(counts.tokens, 'token')}, longest {counts.longest:,}"
    training = f"{counts.rows:,} ({amount})"
    supervised = f"{counts.supervised:,} ({counts.supervised / counts.tokens:.1%} of all)"
    if rows.streamed:
        buffer = settings.shuffle_buffer
        order = f"shuffled among {counted(buffer, 'row')} at a time" if buffer else "in their order"
        training = f"streamed, {order}; the first {counts.rows:,} have {amount}"
        supervised = f"{counts.supervised / counts.tokens:.1%} of the first rows' tokens"
    if head_chooses:
        supervised += "; the output head computes only these"
    if counts.truncated:
        training += f"; {counts.truncated:,} over max_length {settings.max_length} truncated"
    if counts.dropped:
        training += f"; {counts.dropped:,} over max_length {settings.max_length} dropped"
    why = "" if settings.packing == "off" else f": {data.packing.reason}"
    packing = f"off{why}; rows of similar length are padded together"
    if rows.packing is not None:
        number = "packs" if rows.streamed else counted(len(rows.packing), "pack")
        packing = f"on: {data.packing.reason}; {number} of up to {rows.packing.longest:,} tokens, "
        packing += f"{rows.packing.fill:.0%} full"
        packing += "; prompts of pairs are computed once" if data.packing.prompts_once else ""
    return {
        "training rows": training,
        "evaluation rows": f"{data.evaluation.counts.rows:,}" if data.evaluation else "none",
        "supervised tokens": supervised,
        "packing": packing,
    }


def describe_steps(settings: Settings, data: TrainingData, decision: StepDecision) -> dict[str, str]:
    """Return the table's lines on the global batch and the steps."""
    rows, counts, plan = data.train, data.train.counts, with_micro_batch(data.plan, decision.rung.rows)
    steps = plan.steps(rows.units, settings.num_train_epochs, settings.max_steps)
    steps_per_epoch = plan.steps_per_epoch(rows.units)
    # The first rows of a stream need not fill a step.
    filled = rows.units / plan.global_batch if rows.streamed else steps_per_epoch
    unit, of_rows = ("row", "")
    if rows.packing is not None:
        unit, of_rows = "pack", f" (about {counted(round(counts.rows / filled), 'row')})"
    return {
        "global batch": f"{counted(plan.per_device, unit)} a device x {plan.accumulation} accumulation x "
        f"{counted(plan.processes, 'process')} = {counted(plan.global_batch, unit)}{of_rows}",
        "tokens a step": f"{'about ' if rows.streamed else ''}{counts.tokens / filled:,.0f} on average",
        "steps": f"{steps:,}" + ("" if rows.streamed else f" ({steps_per_epoch:,} an epoch)"),
    }


def summarize(settings: Settings, runtime: Runtime, trainer: DDPTrainer, seconds: float) -> dict[str, Any]:
    """Return the content of summary.json, the same on every rank; every rank calls this after training.

    Memory is that of the fullest GPU, in bytes: until the first step (loading, sharding), and from there on. "seconds"
    in it are those of the parts of the preparation, and "compiled_after_warm_up" counts functions that torch.compile
    compiled after the first steps, both of this rank (see Progress and CountCompilations); the argument is what
    training took.
    """
    packing, totals = trainer.data.train.packing, trainer.meter.totals
    loading, peak = (
        max(values)
        for values in zip(*runtime.gather((trainer.peak_before_steps, trainer.meter.peak_bytes())), strict=True)
    )
    return {
        **runtime.layout(),
        "packing": packing is not None,
        "packs": len(packing) if packing is not None and not trainer.data.train.streamed else None,
        "gradient_checkpointing": trainer.step.rung.kind,
        "cuda_graphs": trainer.step.ladder[0].captured,
        "passes_a_micro_batch": trainer.step.rung.passes,
        **batch_identity(trainer.plan),
        "steps": trainer.state.global_step,
        "tokens": totals.tokens,
        "supervised_tokens": totals.supervised_tokens,
        "train_loss": trainer.meter.train_loss,
        "peak_memory_bytes": peak,
        "peak_memory_bytes_loading": loading,
        "settings": dataclasses.asdict(settings),
        "versions": versions(),
        "compiled_after_warm_up": trainer.compilations.after_warm_up,
        "seconds": {name: round(value, 1) for name, value in runtime.progress.seconds.items()},
        "train_seconds": seconds,
        "tokens_per_second": (totals.tokens - trainer.tokens_before) / seconds,
        "eval_loss": _final_eval_loss(trainer),
    }


def _final_eval_loss(trainer: DDPTrainer) -> float | None:
    """Return the evaluation loss of the trained model; evaluate now unless the last step did. None without rows."""
    if trainer.eval_dataset is None:
        return None
    # The best model may not be that of the last step.
    if not trainer.args.load_best_model_at_end:
        for entry in reversed(trainer.state.log_history):
            if "eval_loss" in entry and entry.get("step") == trainer.state.global_step:
                return entry["eval_loss"]
    return trainer.evaluate()["eval_loss"]


def _seconds_of_all_parts(folder: Path, summary: dict[str, Any]) -> float:
    """Return the training time that the report and the table of runs show; this part's where the record is damaged."""
    try:
        return read_run(folder).seconds or summary["train_seconds"]
    except UserError:
        return summary["train_seconds"]


def finish(settings: Settings, folder: Path, summary: dict[str, Any]) -> None:
    """Write summary.json, print the result, and upload it if asked to."""
    write_json(folder / SUMMARY_FILE, summary)
    (folder / LOCK_FILE).unlink(missing_ok=True)
    losses = [f"{name} {summary[name]:.4f}" for name in ("train_loss", "eval_loss") if summary[name] is not None]
    took = shown_seconds(_seconds_of_all_parts(folder, summary))
    speed = f"{summary['tokens_per_second']:,.0f} tokens/s"
    print(f"Done: {counted(summary['steps'], 'step')} in {took}, {', '.join(losses)}, {speed}.")
    # On lines of their own, to be copied whole from a narrow terminal.
    print(f"Everything is in:\n  {folder}")
    images = ", with --image FILE to show it an image" if (folder / "processor_config.json").is_file() else ""
    print(f"To talk to it{images}:\n  {chat_command(folder, trust=settings.trust_remote_code)}", flush=True)
    if settings.push_to_hub:
        print(f"Uploaded to {upload(settings, folder)}", flush=True)
