"""TRL's SFTConfig from the kit's settings: which of its fields are options, which are decided, which are left to the user.

Import this after the backend: with Unsloth imported, `SFTConfig` is Unsloth's own version of it.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from transformers.training_args import trainer_log_levels
from trl.trainer.sft_config import SFTConfig

from unsloth_ddp.config.parse import Settings
from unsloth_ddp.config.upstream_names import choose_trackers, nearest
from unsloth_ddp.data.batch_plan import BatchPlan
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.gradient_checkpointing import loaded_with
from unsloth_ddp.training.optimizer_check import check_optimizer
from unsloth_ddp.utils.errors import UserError

# The types that JSON and YAML have, as a user would call them. Fields with other types are left to TRL.
KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    dict: "a mapping",
    list: "a list",
}


def check_values(given: Mapping[str, Any]) -> None:
    """Refuse values of a type that a field does not have, which TRL accepts: the text "false" would count as true.

    Raises:
        UserError: naming the field and what it takes.
    """
    # Not SFTConfig's, of which Unsloth has a version of its own; what TRL adds is decided by the kit, but for one field.
    hints = {**typing.get_type_hints(TrainingArguments), "activation_offloading": bool}
    for name, value in given.items():
        kinds = _kinds(hints.get(name))
        # A whole number is a number too; true is none, although Python has it so.
        fits = type(value) in kinds or (type(value) is int and float in kinds)
        if value is not None and kinds and not fits:
            takes = " or ".join(KINDS[kind] for kind in KINDS if kind in kinds)
            raise UserError(f"trainer_args: {name} is {str(value)[:200]!r}, but it takes {takes}.")
    for name in ("log_level", "log_level_replica"):
        if name in given and given[name] not in trainer_log_levels:
            raise UserError(
                f"trainer_args: {name} is {str(given[name])[:200]!r}; it takes one of {', '.join(trainer_log_levels)}."
            )
    if given.get("dataloader_persistent_workers") and not given.get("dataloader_num_workers"):
        raise UserError(
            "trainer_args: dataloader_persistent_workers keeps processes that load rows, and there are none; give "
            "dataloader_num_workers too, or take it out."
        )


def _kinds(hint: Any) -> set[type]:
    """Return the types of KINDS that a field takes; none if it takes any other, such as a class of Transformers."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = [part for part in (typing.get_args(hint) if union else (hint,)) if part is not type(None)]
    found = {typing.get_origin(part) or part for part in parts}
    return found if found <= KINDS.keys() else set()


def make_config(settings: Settings, runtime: Runtime, plan: BatchPlan, run_folder: Path) -> Any:
    """TRL's SFTConfig for these settings, every field set: Unsloth's version of it has defaults of its own.

    To be made before the model is loaded, and kept: with ZeRO-3 it is what makes Transformers load in parts.

    Raises:
        UserError: trainer_args names no field of SFTConfig, or a value it refuses; or as
            choose_trackers.
    """
    defaults = {
        f.name: f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[operator]
        for f in dataclasses.fields(SFTConfig)
        if f.init
    }
    for name in settings.trainer_args:
        if name not in defaults:
            raise UserError(
                f"trainer_args: SFTConfig has no field {name}; {nearest(name, defaults, 'the documentation of TRL')}"
            )
    check_values(settings.trainer_args)
    check_optimizer(settings)
    if "gradient_checkpointing_kwargs" in settings.trainer_args and settings.gradient_checkpointing == "auto":
        raise UserError(
            "trainer_args: gradient_checkpointing_kwargs needs a kind to go with; give --gradient_checkpointing torch or "
            "unsloth, because auto sets its own."
        )
    strategy = settings.eval_strategy
    if strategy == "auto":
        strategy = "steps" if settings.eval_steps else "epoch"
    checkpointing = loaded_with(runtime, settings) != "none"
    # ZeRO-3 with adapters recomputes rightly only in the reentrant way (TRL issue 2514).
    reentrant = runtime.sharding == "zero3" and settings.method != "full"
    chosen = {
        "output_dir": str(run_folder),
        "run_name": run_folder.name,
        "per_device_train_batch_size": plan.per_device,
        "per_device_eval_batch_size": settings.per_device_eval_batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        # loss.py averages; with this on, Transformers would multiply by the world size a second time.
        "average_tokens_across_devices": False,
        # Models with experts would add it to every micro-batch, however many there are in a step.
        "router_aux_loss_coef": 0.0,
        "bf16": runtime.precision == "bf16",
        "fp16": runtime.precision == "fp16",
        "use_cpu": runtime.device_type == "cpu",
        "gradient_checkpointing": checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant} if checkpointing else None,
        "ddp_find_unused_parameters": settings.ddp_find_unused_parameters,
        "ddp_timeout": settings.ddp_timeout,
        # Rows are in pinned memory: a copy that the host waits for would wait for all work before it.
        "accelerator_config": {"non_blocking": runtime.device_type == "cuda"},
        # A language model's buffers are constants; sending them before each forward pass makes ranks wait for each other.
        "ddp_broadcast_buffers": False,
        "eval_strategy": strategy if settings.eval_dataset or settings.eval_fraction else "no",
        "save_strategy": settings.save_strategy,
        # checkpoint.py removes older ones; Transformers would remove the newest one before the result is written.
        "save_total_limit": None,
        "report_to": choose_trackers(
            settings.report_to, INTEGRATION_TO_CALLBACK, get_available_reporting_integrations()
        ),
        "max_length": settings.max_length,
        "packing": False,
        "padding_free": False,
        # Rows arrive tokenized, with labels; see data.py.
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "remove_unused_columns": False,
        # Reading every loss to look for NaN would make each micro-batch wait for the device.
        "logging_nan_inf_filter": False,
        "logging_first_step": True,
        "restore_callback_states_from_checkpoint": True,
        "trust_remote_code": settings.trust_remote_code,
        "log_level_replica": "error",
        # Given as true, it has log lines printed on a terminal too; there is no bar of tqdm's (see display.py).
        "disable_tqdm": False,
        "dataloader_pin_memory": runtime.device_type == "cuda",
    }
    same_name = {n: getattr(settings, n) for n in defaults if hasattr(settings, n)}
    try:
        return SFTConfig(**{**defaults, **same_name, **chosen, **settings.trainer_args, "push_to_hub": False})
    except (TypeError, ValueError) as error:
        raise UserError(f"The training options are refused by TRL: {' '.join(str(error).split())}") from None
