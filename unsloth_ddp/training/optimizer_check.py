"""Build the optimizer and the learning rate schedule on a small module, before rows and model are loaded.

Each optimizer and each schedule has packages and keywords of its own, so trying is the only complete check. Import this
after the backend: Unsloth has to be imported before Transformers.
"""

import dataclasses
import json
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.training_args import OptimizerNames, ParallelMode

from unsloth_ddp.config.options import Settings
from unsloth_ddp.utils.errors import UserError, one_line

# Examples for the schedules that require keywords.
SCHEDULE_EXAMPLES = {
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 100},
}


class _Builder(Trainer):
    """Hold only the attributes that Trainer.create_optimizer reads."""

    def __init__(self, args: Any, model: torch.nn.Module) -> None:
        self.args, self.model = args, model
        self.optimizer = self.optimizer_cls_and_kwargs = None


def check_optimizer(settings: Settings) -> None:
    """Refuse an optimizer or a schedule that cannot be built, or cannot train with several micro-batches and ranks."""
    if "lomo" in settings.optim or settings.optim.endswith("layerwise"):
        raise UserError(
            f"optim {settings.optim} changes weights during the backward pass, before gradients are summed over "
            "micro-batches and processes; use another optimizer, such as adamw_8bit or adafactor."
        )
    low_rank = settings.optim.startswith(("galore", "apollo"))
    if settings.trainer_args.get("optim_target_modules") and not low_rank:
        raise UserError(
            f"trainer_args: optim_target_modules has no effect on optim {settings.optim}; remove it, or use an "
            "optimizer of the galore or apollo family."
        )
    optimizer = _built(settings, settings.trainer_args)
    for name in ("optim_args", "adam_beta1", "adam_beta2", "adam_epsilon"):
        value = settings.trainer_args.get(name)
        if value is None:
            continue
        # Compare a number with a changed one, because the given one may be the default.
        other = None if name == "optim_args" else value / 2 + 1e-9
        if _state(optimizer) == _state(_built(settings, {**settings.trainer_args, name: other})):
            raise UserError(
                f"trainer_args: {name} {str(value)[:100]!r} has no effect on optim {settings.optim}; remove it, or "
                "give what this optimizer reads."
            )
    _check_schedule(settings)


def _built(settings: Settings, trainer_args: dict[str, Any]) -> torch.optim.Optimizer:
    defaults = {
        f.name: f.default for f in dataclasses.fields(TrainingArguments) if f.default is not dataclasses.MISSING
    }
    from_settings = {name: getattr(settings, name) for name in ("learning_rate", "weight_decay", "warmup_steps")}
    args = SimpleNamespace(**{
        **defaults, **from_settings, **trainer_args,
        "optim": OptimizerNames(settings.optim),
        "parallel_mode": ParallelMode.NOT_PARALLEL,
        "gradient_accumulation_steps": 1,
        # The given names are those of the real model's modules.
        "optim_target_modules": "all-linear" if trainer_args.get("optim_target_modules") else None,
    })  # fmt: skip
    try:
        return _Builder(args, torch.nn.Sequential(torch.nn.Linear(8, 8))).create_optimizer()
    except Exception as error:
        given_args = {name: value for name, value in trainer_args.items() if name.startswith(("adam_", "optim_"))}
        beside = f" with trainer_args {json.dumps(given_args)[:200]}" if given_args else ""
        raise UserError(
            f"optim {settings.optim} cannot be built{beside}: {one_line(error).rstrip('.')}; fix that, or use another "
            "optim."
        ) from None


def _state(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def _check_schedule(settings: Settings) -> None:
    schedule_kwargs = settings.trainer_args.get("lr_scheduler_kwargs") or {}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=settings.learning_rate)
    try:
        schedule = get_scheduler(
            settings.lr_scheduler_type,
            optimizer,
            num_warmup_steps=1,
            num_training_steps=100,
            scheduler_specific_kwargs=schedule_kwargs,
        )
        if isinstance(schedule, LambdaLR):
            _follow(schedule, optimizer)
    except Exception as error:
        example = SCHEDULE_EXAMPLES.get(settings.lr_scheduler_type)
        fix = (
            f"give, for example, --trainer_args '{json.dumps({'lr_scheduler_kwargs': example})}'"
            if example
            else "correct them"
        )
        raise UserError(
            f"lr_scheduler_type {settings.lr_scheduler_type} does not work with lr_scheduler_kwargs "
            f"{schedule_kwargs or 'left out'} ({one_line(error)}); {fix}."
        ) from None


def _follow(schedule: LambdaLR, optimizer: torch.optim.Optimizer) -> None:
    """Run the schedule for 100 steps, because it reads most of its keywords only after the warm-up.

    Raises:
        ValueError: a learning rate is negative or not a finite number.
    """
    for _ in range(100):
        optimizer.step()
        schedule.step()
        rate = schedule.get_last_lr()[0]
        if not (isinstance(rate, (int, float)) and 0 <= rate < math.inf):
            raise ValueError(f"the learning rate becomes {rate}")
