"""Refuse settings that contradict each other or cannot be meant, before torch is imported."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsloth_ddp.config.options import OPTIONS, DataSettings, Settings, TrainingSettings
from unsloth_ddp.config.task_options import PAIR_TASKS, PREFERENCE_TASKS, REFERENCE_TASKS, TaskSettings
from unsloth_ddp.config.trainer_args import check_trainer_args
from unsloth_ddp.config.upstream_names import check_name, choose_trackers, known_names
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files.sources import Source, read_source
from unsloth_ddp.utils.redaction import find_secret


def check_settings(settings: Settings) -> None:
    """Refuse settings that cannot be meant."""
    _check_secrets(settings)
    if not settings.model:
        raise UserError("No model: give --model with a Hub id or a folder.")
    if not settings.dataset:
        raise UserError("No training data: give --dataset with a file or a Hub id.")
    for name, declared in OPTIONS.items():
        declared.check(name, getattr(settings, name))
    if settings.max_steps == 0:
        raise UserError("max_steps is 0, so nothing would be trained; give a positive number, or -1 to follow epochs.")
    if settings.packing == "off" and settings.global_batch_tokens is not None:
        raise UserError(
            f"global_batch_tokens {settings.global_batch_tokens} needs packed rows, but packing is off; give "
            "--global_batch_size instead, or --packing auto."
        )
    if settings.merge and settings.method == "full":
        raise UserError("merge is for lora and qlora; method full already writes a whole model, so leave merge out.")
    if settings.lora_trainable_tokens and settings.method != "full" and settings.backend == "unsloth":
        raise UserError(
            f"lora_trainable_tokens {' '.join(settings.lora_trainable_tokens)[:100]} needs the transformers backend; "
            "give --backend transformers, or auto."
        )
    _check_data(settings)
    _check_task(settings)
    _check_evaluation(settings)
    _check_names(settings)
    check_trainer_args(settings)
    _check_streaming(settings)
    _check_run_name(settings.run_name)
    _check_paths(settings)


def _check_run_name(name: str | None) -> None:
    if name is None:
        return
    # File systems limit the bytes of a name, and most letters beyond ASCII take two to four.
    size = len(name.encode("utf-8", "surrogatepass"))
    if size > 200:
        raise UserError(f"run_name {name[:40]!r}... has {size} bytes, and a folder name holds 200; give a shorter one.")
    if not re.fullmatch(r"(?!\.{1,2}$)[^/\\\x00-\x1f\ud800-\udfff]+", name):
        raise UserError(f"run_name {name!r} is not a plain folder name; use letters, digits, - and _.")


def _check_secrets(settings: Settings) -> None:
    for name in OPTIONS:
        if place := find_secret(name, getattr(settings, name)):
            raise UserError(
                f"{place} holds a secret, and settings are written to files; take it out, and give it in the "
                "environment (HF_TOKEN, WANDB_API_KEY) or log in once (uv run hf auth login)."
            )


def _check_data(settings: Settings) -> None:
    """Refuse names of datasets and columns that cannot be meant."""
    for texts in (settings.dataset, settings.eval_dataset):
        sources = [read_source(text) for text in texts]
        if len(sources) == 1 and (weight := sources[0].weight) is not None:
            share = f"{sources[0]._replace(weight=None, split=None)}[:{min(weight, 1):.0%}]"
            raise UserError(
                f"dataset {texts[0]}: a weight mixes several datasets, and there is one; leave :{weight:g} out, or "
                f"give {share} for that share of its rows."
            )
    if wrong := next((text for text in settings.columns if not re.fullmatch(r"[^=]+=[^=,]+", text)), None):
        raise UserError(
            f"columns {wrong} is no pair of names; give each as OLD=NEW, with spaces between them: --columns "
            "question=instruction answer=output."
        )
    old_names = [text.split("=")[0] for text in settings.columns]
    if twice := next((name for name in old_names if old_names.count(name) > 1), None):
        raise UserError(f"columns {' '.join(settings.columns)[:200]} renames {twice} twice; name it once.")


def _check_evaluation(settings: Settings) -> None:
    if settings.eval_fraction and settings.eval_dataset:
        raise UserError(
            "eval_fraction and eval_dataset are both given, on the command line or by the recipe; keep one, with "
            "--eval_dataset none or --eval_fraction 0."
        )
    if settings.eval_steps and settings.eval_strategy in ("no", "epoch"):
        raise UserError(
            f"eval_steps {settings.eval_steps} and eval_strategy {settings.eval_strategy} contradict; leave one out."
        )
    if settings.early_stopping_patience and settings.eval_strategy == "no":
        raise UserError(
            f"early_stopping_patience {settings.early_stopping_patience} counts evaluations, and eval_strategy is no; "
            "give --eval_strategy steps, or --eval_strategy epoch."
        )
    needs_rows = {
        f"eval_strategy is {settings.eval_strategy}": settings.eval_strategy in ("steps", "epoch"),
        f"eval_steps is {settings.eval_steps}": settings.eval_steps is not None,
        f"early_stopping_patience is {settings.early_stopping_patience}": settings.early_stopping_patience is not None,
        f"compare_answers is {settings.compare_answers}": settings.compare_answers > 0,
        "trainer_args: load_best_model_at_end is true": bool(settings.trainer_args.get("load_best_model_at_end")),
    }
    if not (settings.eval_dataset or settings.eval_fraction) and (
        unmet := next((s for s in needs_rows if needs_rows[s]), None)
    ):
        raise UserError(f"{unmet}, but there are no evaluation rows; give --eval_dataset or --eval_fraction.")


def _check_names(settings: Settings) -> None:
    for name in ("optim", "lr_scheduler_type"):
        if getattr(settings, name) != getattr(TrainingSettings, name):
            check_name(name, getattr(settings, name))
    if settings.report_to not in (["tensorboard"], []) and (trackers := known_names("report_to")):
        # Which of them are installed is known once Transformers is imported.
        choose_trackers(settings.report_to, trackers, trackers)


def _check_streaming(settings: Settings) -> None:
    if not settings.streaming:
        if settings.shuffle_buffer != DataSettings.shuffle_buffer:
            raise UserError(
                f"shuffle_buffer {settings.shuffle_buffer} is for --streaming; without it all rows are shuffled, so "
                "leave it out."
            )
        return
    if settings.max_steps <= 0:
        raise UserError(
            "streaming needs max_steps, because the number of rows is not known and the learning rate follows the "
            "number of steps; give --max_steps (one pass over the rows is their number / global_batch_size)."
        )
    if settings.eval_fraction:
        raise UserError(
            f"eval_fraction {settings.eval_fraction} of rows that are streamed cannot be set aside, because their "
            "number is not known; leave it out, and give the evaluation rows with --eval_dataset."
        )
    for name in settings.trainer_args:
        if name.startswith("dataloader_") and name != "dataloader_pin_memory":
            raise UserError(
                f"trainer_args: {name} does nothing for streamed rows, which processes of their own read; give their "
                "number with --dataset_num_proc."
            )
    for name in ("eval", "save"):
        if getattr(settings, f"{name}_strategy") == "epoch":
            raise UserError(
                f"{name}_strategy is epoch, but where an epoch of streamed rows ends is not known; leave it out, and "
                "give "
                f"--{name}_steps."
            )


def _check_paths(settings: Settings) -> None:
    for name, declared in OPTIONS.items():
        value = getattr(settings, name) if declared.path else None
        for path in value if isinstance(value, list) else [value] if value else []:
            full_path(name, Path(path))


def full_path(name: str, path: Path) -> Path:
    """Return the absolute path of option `name`; there need not be a file.

    Raises:
        UserError: no file system could hold it: the home of an unknown user, a name too long, links in a circle.
    """
    try:
        full = path.expanduser().resolve()
        full.exists()
    except (OSError, RuntimeError, ValueError) as error:
        problem = str(getattr(error, "strerror", error)).rstrip(".")
        raise UserError(f"{name} {str(path)[:200]} cannot be looked up: {problem}; give another.") from None
    return full


def path_and_suffix(name: str, value: str) -> tuple[str, str]:
    """Return the path in a value of option `name`, and what follows it (the slice and the weight of a dataset)."""
    source = read_source(value) if name in ("dataset", "eval_dataset") else Source(value)
    return source.name, source.suffix


def with_full_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with absolute paths, where they exist on this machine, so that they mean the same anywhere."""
    return {name: _full_if_there(name, value) if name in OPTIONS else value for name, value in options.items()}


def _full_if_there(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_full_if_there(name, item) for item in value]
    if OPTIONS[name].path != "read" or value in OPTIONS[name].words or not isinstance(value, str):
        return value
    try:
        file, suffix = path_and_suffix(name, value)
        path = Path(file).expanduser()
        return str(path.resolve()) + suffix if path.exists() else value
    except (OSError, RuntimeError, ValueError):
        return value


def _check_task(settings: Settings) -> None:
    """Refuse options that do nothing, or do not work, with the task."""
    standard, task = TaskSettings(), settings.task
    tasks_of = {
        "beta": PREFERENCE_TASKS,
        "preference_loss": ("dpo", "cpo"),
        "label_smoothing": ("dpo", "cpo"),
        "simpo_gamma": ("simpo",),
        "sft_weight": PAIR_TASKS,
        "reference": REFERENCE_TASKS,
        "reference_model": REFERENCE_TASKS,
        "reference_model_revision": REFERENCE_TASKS,
        "desirable_weight": ("kto",),
        "undesirable_weight": ("kto",),
    }
    for name, tasks in tasks_of.items():
        value = getattr(settings, name)
        if value != getattr(standard, name) and task not in tasks:
            *others, last = tasks
            task_names = f"{', '.join(others)} or {last}" if others else last
            raise UserError(f"{name} {value} is for --task {task_names}, and task is {task}; leave it out.")
    if not settings.trains_preferences:
        return
    if settings.desirable_weight == settings.undesirable_weight == 0:
        raise UserError(
            "desirable_weight and undesirable_weight are both 0, so nothing is trained; give one of them a value."
        )
    if settings.label_smoothing and settings.preference_loss in ("hinge", "ipo"):
        raise UserError(
            f"label_smoothing {settings.label_smoothing} has no effect on preference_loss {settings.preference_loss}; "
            "leave it out, or give --preference_loss sigmoid."
        )
    if settings.reference_model_revision and not settings.reference_model:
        raise UserError(
            f"reference_model_revision {settings.reference_model_revision} names no model; give --reference_model "
            "with it."
        )
    refused = {
        "backend unsloth": settings.backend == "unsloth"
        and "its fused loss returns no log-probabilities; give --backend transformers, or auto",
        "cuda_graphs on": settings.cuda_graphs == "on"
        and "a captured step sums the losses of tokens and whole answers are compared; give --cuda_graphs auto",
        "loss_on all": settings.loss_on == "all" and "only answers are compared; leave it out",
        "reference adapter_off": settings.reference == "adapter_off"
        and settings.method == "full"
        and "method full has no adapter; give --reference precomputed",
        f"reference adapter_off with reference_model {settings.reference_model}": settings.reference == "adapter_off"
        and settings.reference_model
        and "another model is no model without its adapter; leave one of them out",
        "reference precomputed": settings.reference == "precomputed"
        and settings.streaming
        and "streamed rows are not known before they are trained; leave it or --streaming out",
        "method full with streaming": settings.method == "full"
        and settings.streaming
        and not settings.reference_model
        and task in REFERENCE_TASKS
        and "its reference is computed before step 1 and streamed rows are not known then; leave --streaming out, or "
        f"give --reference_model {settings.model}, which then stays in memory beside the trained model",
    }
    for what, problem in refused.items():
        if problem:
            raise UserError(f"{what} does not work with task {task}: {problem}.")
