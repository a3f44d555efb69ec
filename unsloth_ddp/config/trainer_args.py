"""Refuse fields of TRL's SFTConfig that `trainer_args` may not set, and values that would fail late or do nothing.

The kit reads, orders, pads and packs the rows, computes the loss and evaluates by itself, so that most owned fields
would be accepted and then do nothing; the others would undo what it does.
"""

import importlib.util
import re
from typing import Any

from unsloth_ddp.config.aliases import ALIASES
from unsloth_ddp.config.declare import Bounds
from unsloth_ddp.config.options import OPTIONS, Settings
from unsloth_ddp.config.upstream_names import TYPE_NAMES, nearest, sft_config_fields
from unsloth_ddp.utils.errors import UserError

# Fields, and what decides them here.
OWNED = {
    "packing_strategy padding_free eval_packing pad_to_multiple_of":
        "use --packing; what is not packed is padded to the longest row of its micro-batch",
    "max_seq_length": "use --max_length",
    "truncation_mode": "use --overlong",
    "dataset_text_field dataset_kwargs remove_unused_columns":
        "rows are read by the names of their columns; rename them",
    "chat_template_path": "use --chat_template",
    "eos_token": "a row ends as the chat template has it; use --chat_template, or change the tokenizer's files",
    "pad_token": "change the tokenizer's files",
    "model_init_kwargs": "use the options of train_ddp.py --help",
    "assistant_only_loss completion_only_loss": "use --loss_on",
    "shuffle_dataset train_sampling_strategy length_column_name dataloader_drop_last":
        "rows are shuffled by --seed in every epoch, and each is seen once",
    "dataloader_in_order": "a resumed run continues at the right row only if micro-batches keep their order",
    "loss_type label_smoothing_factor router_aux_loss_coef average_tokens_across_devices label_names":
        "the loss is the negative log-likelihood, averaged over the supervised tokens of a step, or that of --task "
        "and --preference_loss",
    "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
    "include_for_metrics batch_eval_metrics bf16_full_eval fp16_full_eval":
        "an evaluation is the loss of the evaluation rows, in the precision of the training",
    "bf16 fp16": "use --precision",
    "use_cache": "nothing is cached in training",
    "auto_find_batch_size": "leave --per_device_train_batch_size at auto",
    "fsdp fsdp_config deepspeed parallelism_config":
        "the launcher's config decides the sharding, such as accelerate_configs/fsdp2.yaml",
    "accelerator_config ddp_backend local_rank": "the launcher and the devices decide it",
    "ddp_static_graph": "torch's DDP fails with it where gradients are accumulated or a step is repeated",
    "do_train do_eval do_predict": "a run trains, and evaluates by --eval_strategy",
    "resume_from_checkpoint ignore_data_skip": "use --resume",
    "restore_callback_states_from_checkpoint":
        "a resumed run takes over the totals and the position in a stream; use --resume",
    "save_on_each_node": "checkpoints are written for all nodes, shared folder or not",
    "save_only_model":
        "a run goes on only with the state of its optimizer; --save_strategy no writes the result alone, and "
        "--save_total_limit keeps fewer checkpoints",
    "enable_jit_checkpoint": "a signal to stop writes a checkpoint by itself",
    "hub_token": "put it into HF_TOKEN, or log in once (uv run hf auth login)",
    "hub_strategy hub_always_push hub_revision": "--push_to_hub pushes once, when the run has ended",
}  # fmt: skip
OWNED_ARGS = {name: why for names, why in OWNED.items() for name in names.split()}


# Numbers that TRL accepts whatever they are, and that fail once rows and model are loaded, or train nonsense.
NUMBERS = {
    "adam_beta1": Bounds(at_least=0, below=1),
    "adam_beta2": Bounds(at_least=0, below=1),
    "adam_epsilon": Bounds(above=0),
    "neftune_noise_alpha": Bounds(at_least=0, at_most=1_000_000),
    "dataloader_num_workers": Bounds(at_least=0, at_most=1000),
    "dataloader_prefetch_factor": Bounds(at_least=1, at_most=10_000),
    "data_seed": Bounds(at_least=0, at_most=2**32 - 1),
    "eval_delay": Bounds(at_least=0),
    "torch_empty_cache_steps": Bounds(at_least=1),
    "ddp_bucket_cap_mb": Bounds(at_least=1, at_most=1_000_000),
}


# Texts that Transformers refuses late or never.
TEXTS = {
    "log_level": ("detail", "debug", "info", "warning", "error", "critical", "passive"),
    "log_level_replica": ("detail", "debug", "info", "warning", "error", "critical", "passive"),
    "logging_strategy": ("no", "steps", "epoch"),
    "debug": ("", "underflow_overflow"),
    "dataloader_multiprocessing_context": ("fork", "spawn", "forkserver"),
    "torch_compile_mode": ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    # An evaluation has no other metric.
    "metric_for_best_model": ("loss", "eval_loss"),
}


class RefusedField(UserError):
    """A field of trainer_args that is refused; `name` is the field's."""

    def __init__(self, name: str, sentence: str) -> None:
        super().__init__(sentence)
        self.name = name


def check_trainer_args(settings: Settings) -> None:
    """Refuse fields that do not exist, are options of their own or decided by the kit, and values that cannot work.

    What only the libraries know, such as the arguments of an optimizer, is tried in training/optimizer_check.py.

    Raises:
        RefusedField: naming the first of them and what to give instead.
    """
    for name, value in settings.trainer_args.items():
        try:
            _check_field(name, value)
        except UserError as error:
            raise RefusedField(name, str(error)) from None
    _check_packages(settings.trainer_args)


def _check_field(name: str, value: Any) -> None:
    fields = sft_config_fields()
    if name in OWNED_ARGS or name in OPTIONS:
        raise UserError(f"trainer_args: {name} is set by the kit; {OWNED_ARGS.get(name, f'use --{name}')}.")
    if fields and name not in fields:
        alias = ALIASES.get(name)
        hint = f"use --{alias.option}." if alias and alias.option else nearest(name, fields, "the documentation of TRL")
        raise UserError(f"trainer_args: SFTConfig has no field {name}; {hint}")
    if value is not None:
        _check_type(name, value, fields.get(name, frozenset()))
        _check_value(name, value)


def _check_type(name: str, value: Any, type_names: frozenset[str]) -> None:
    """Refuse a value of another type, which TRL would accept: the text "false" would count as true."""
    # A whole number is a number too; true is none, although Python has it so.
    if type_names and type(value).__name__ not in type_names and not (type(value) is int and "float" in type_names):
        takes = " or ".join(words for type_name, words in TYPE_NAMES.items() if type_name in type_names)
        # YAML 1.1 takes a number without a dot before its exponent for text.
        hint = f"; in YAML write {value.replace('e', '.0e')}" if _lacks_dot(value) and "float" in type_names else ""
        raise UserError(f"trainer_args: {name} is {_shown(value)}, but it takes {takes}{hint}.")


def _lacks_dot(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,20}e[+-]?\d{1,5}", value, re.ASCII) is not None


def _check_value(name: str, value: Any) -> None:
    if name in NUMBERS:
        NUMBERS[name].check(f"trainer_args: {name}", value)
    accepted = TEXTS.get(name, ())
    if accepted and value not in accepted:
        listed = ", ".join(text for text in accepted if text)
        raise UserError(f"trainer_args: {name} is {_shown(value)}, but it takes {listed}.")
    if name == "greater_is_better" and value:
        raise UserError(
            "trainer_args: greater_is_better true keeps the checkpoint with the highest loss, the only metric of an "
            "evaluation; leave it out."
        )


def _check_packages(trainer_args: dict[str, Any]) -> None:
    """Refuse a field that needs a package which is not installed."""
    if trainer_args.get("use_liger_kernel") and importlib.util.find_spec("liger_kernel") is None:
        raise RefusedField(
            "use_liger_kernel",
            "trainer_args: use_liger_kernel needs the package liger-kernel, which is not installed; add it (uv pip "
            "install liger-kernel), or take it out.",
        )


def _shown(value: Any) -> str:
    return repr(str(value)[:200])
