"""Build TRL's SFTConfig from the settings: fields that are options, fields that are fixed, and fields left to the user.

Import this after the backend: with Unsloth imported, `SFTConfig` is Unsloth's own version of it.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from transformers.integrations import INTEGRATION_TO_CALLBACK, get_available_reporting_integrations
from trl.trainer.sft_config import SFTConfig

from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.upstream_names import choose_trackers
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.gradient_checkpointing import kinds_here, reentrant
from unsloth_ddp.training.optimizer_check import check_optimizer
from unsloth_ddp.utils.errors import UserError


def check_compiler(trainer_args: Mapping[str, Any]) -> None:
    """Refuse a backend of torch.compile that torch or accelerate does not know; it would fail at the first step."""
    backend = trainer_args.get("torch_compile_backend")
    backends = [name for name in torch._dynamo.list_backends(None) if name.upper() in DynamoBackend.__members__]
    if backend is not None and backend not in backends:
        raise UserError(
            f"trainer_args: torch_compile_backend is {str(backend)[:200]!r}, but torch and accelerate know "
            f"{', '.join(backends)}; give one of them, or leave it out for inductor."
        )


def check_precision(config: Any, settings: Settings, runtime: Runtime) -> None:
    """Refuse a precision that the trainer has changed in its SFTConfig."""
    used = "bf16" if config.bf16 else "fp16" if config.fp16 else "fp32"
    # bf16 weights need no autocast, so Unsloth switches it off for them.
    bf16_weights = settings.method == "full" and settings.full_weights == "bf16"
    if used != runtime.precision and not bf16_weights:
        raise UserError(
            f"precision {runtime.precision} is not available: Unsloth trains this model in {used}; use "
            f"--precision {used}, or --backend transformers."
        )


def make_config(settings: Settings, runtime: Runtime, plan: BatchPlan, run_folder: Path) -> Any:
    """Return TRL's SFTConfig for these settings, with every field set, because Unsloth's version has other defaults.

    Call it before the model is loaded and keep the result: with ZeRO-3, Transformers partitions the model while loading
    only as long as the config exists.

    Raises:
        UserError: the libraries refuse a value; also as raised by check_compiler, check_optimizer and choose_trackers.
    """
    defaults = {
        f.name: f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[operator]
        for f in dataclasses.fields(SFTConfig)
        if f.init
    }
    check_compiler(settings.trainer_args)
    check_optimizer(settings)
    chosen = _chosen(settings, runtime, plan, run_folder)
    same_name = {n: getattr(settings, n) for n in defaults if hasattr(settings, n)}
    try:
        return SFTConfig(**{**defaults, **same_name, **chosen, **settings.trainer_args, "push_to_hub": False})
    except (TypeError, ValueError) as error:
        raise UserError(f"TRL refuses the training options: {' '.join(str(error).split())}") from None


def _chosen(settings: Settings, runtime: Runtime, plan: BatchPlan, run_folder: Path) -> dict[str, Any]:
    """Return the fields that the kit sets, whatever options have their names."""
    strategy: str = settings.eval_strategy
    if strategy == "auto":
        strategy = "steps" if settings.eval_steps else "epoch"
    save: dict[str, Any] = {"save_strategy": settings.save_strategy}
    if settings.early_stopping_patience:
        # Each evaluated step is saved, since the best one becomes the result.
        save = {"save_strategy": strategy, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
        save |= {"save_steps": settings.eval_steps} if settings.eval_steps else {}
    checkpointing = kinds_here(runtime, settings)[0] != "none"
    return {
        "output_dir": str(run_folder),
        "run_name": run_folder.name,
        "per_device_train_batch_size": plan.per_device,
        "per_device_eval_batch_size": settings.per_device_eval_batch_size,
        "gradient_accumulation_steps": plan.accumulation,
        # loss.py averages; with this on, Transformers would multiply by the world size a second time.
        "average_tokens_across_devices": False,
        # MoE models would add the full auxiliary loss to every micro-batch, however many a step has.
        "router_aux_loss_coef": 0.0,
        "bf16": runtime.precision == "bf16",
        "fp16": runtime.precision == "fp16",
        "use_cpu": runtime.device_type == "cpu",
        "gradient_checkpointing": checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant(runtime, settings)} if checkpointing else None,
        "ddp_find_unused_parameters": settings.ddp_find_unused_parameters,
        "ddp_timeout": settings.ddp_timeout,
        # Rows are in pinned memory; a blocking copy would wait for all work queued on the GPU.
        "accelerator_config": {
            "non_blocking": runtime.device_type == "cuda",
            # Without this a rank would hold the gradients of all weights between micro-batches. torch would also expect
            # gradients of an output head that it never gathered, because fused losses read its weight directly.
            "gradient_accumulation_kwargs": {"sync_each_batch": runtime.sharding == "fsdp2"},
        },
        # A language model's buffers are constants; a broadcast before each forward pass would make ranks wait.
        "ddp_broadcast_buffers": False,
        "eval_strategy": strategy if settings.eval_dataset or settings.eval_fraction else "no",
        **save,
        # Checkpoints removes older ones; Transformers would remove the newest one before the result is written.
        "save_total_limit": None,
        "report_to": choose_trackers(
            settings.report_to, INTEGRATION_TO_CALLBACK, get_available_reporting_integrations()
        ),
        "max_length": settings.max_length,
        "packing": False,
        "padding_free": False,
        # Rows arrive tokenized, with labels.
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "remove_unused_columns": False,
        # Reading every loss to look for NaN would make each micro-batch wait for the device.
        "logging_nan_inf_filter": False,
        # With auto the callback LogSteps sets them once the number of steps is known.
        "logging_steps": 1 if settings.logging_steps == "auto" else settings.logging_steps,
        "logging_first_step": True,
        "restore_callback_states_from_checkpoint": True,
        "trust_remote_code": settings.trust_remote_code,
        "log_level_replica": "error",
        # If the user sets it to true, log lines are printed on a terminal too; tqdm is never used (see display.py).
        "disable_tqdm": False,
        "dataloader_pin_memory": runtime.device_type == "cuda",
    }
