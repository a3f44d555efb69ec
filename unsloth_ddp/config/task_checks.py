"""Refuse options that do nothing, or do not work, with the task."""

from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.task_options import PAIR_TASKS, PREFERENCE_TASKS, REFERENCE_TASKS, TaskSettings
from unsloth_ddp.utils.errors import UserError


def check_task(settings: Settings) -> None:
    """Refuse options that do nothing, or do not work, with the task.

    Raises:
        UserError: naming the option and its fix.
    """
    standard, task = TaskSettings(), settings.task
    own = {
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
    for name, tasks in own.items():
        value = getattr(settings, name)
        if value != getattr(standard, name) and task not in tasks:
            *others, last = tasks
            wanted = f"{', '.join(others)} or {last}" if others else last
            raise UserError(f"{name} {value} is for --task {wanted}, and task is {task}; leave it out.")
    if not settings.trains_preferences:
        return
    if settings.desirable_weight == settings.undesirable_weight == 0:
        raise UserError(
            "desirable_weight and undesirable_weight are both 0, so nothing is trained; give one of them a value."
        )
    if settings.label_smoothing and settings.preference_loss in ("hinge", "ipo"):
        raise UserError(
            f"label_smoothing {settings.label_smoothing} has no effect on preference_loss {settings.preference_loss}; leave "
            "it out, or give --preference_loss sigmoid."
        )
    if settings.reference_model_revision and not settings.reference_model:
        raise UserError(
            f"reference_model_revision {settings.reference_model_revision} names no model; give --reference_model with it."
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
        and "its reference is computed before step 1 and streamed rows are not known then; leave --streaming out, or give "
        f"--reference_model {settings.model}, which then stays in memory beside the trained model",
    }
    for what, reason in refused.items():
        if reason:
            raise UserError(f"{what} does not work with task {task}: {reason}.")
