"""Every option of a run, once: typed dataclasses, one per topic, with their defaults and what cannot be meant.

How they are read from a YAML file and the command line is in settings.py.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from unsloth_ddp.config.upstream_names import check_name, choose_trackers, known_names
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.redaction import find_secret


def option(default: Any, text: str, **metadata: Any) -> Any:
    """A dataclass field with a one-line help text; a list default is copied for every instance."""
    metadata["help"] = text
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelSettings:
    """Model"""

    model: str | None = option(None, "Hub id or folder of the base model.", path=True)
    model_revision: str | None = option(None, "Branch, tag or commit of the model on the Hub.")
    method: Literal["lora", "qlora", "full"] = option(
        "lora", "lora: adapter on 16-bit weights; qlora: adapter on 4-bit weights; full: every parameter."
    )
    backend: Literal["auto", "unsloth", "transformers"] = option(
        "auto", "auto: Unsloth where an accelerator is found, Transformers + PEFT elsewhere."
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = option(
        "auto", "Compute precision; auto: bf16 or fp16 on a GPU (whichever it has), fp32 on a CPU."
    )
    full_weights: Literal["fp32", "bf16"] = option(
        "fp32",
        "method full: what the trained weights are kept in; bf16 halves the memory and rounds small updates away.",
    )
    attn_implementation: str | None = option(None, "Attention of the transformers backend (sdpa, eager, ...).")
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.")
    use_safetensors: bool = option(True, "Refuse weights in pickle files.")


@dataclass
class LoraSettings:
    """LoRA and QLoRA"""

    lora_r: int = option(16, "Rank of the adapter.")
    lora_alpha: int = option(16, "Scale of the adapter: alpha / r.")
    lora_dropout: float = option(0.0, "Dropout before the adapter.")
    lora_target_modules: list[str] = option(
        ["all-linear"], "Modules that get an adapter; all-linear: every linear layer."
    )
    lora_modules_to_save: list[str] = option(
        [], "Modules trained in full beside the adapter (embed_tokens, lm_head, ...)."
    )
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r) instead (rank-stabilised LoRA).")


@dataclass
class DataSettings:
    """Data"""

    dataset: list[str] = option([], "Training rows: .jsonl, .json, .parquet, .csv files, or Hub ids.", path=True)
    dataset_config: str | None = option(None, "Configuration name of a Hub dataset.")
    dataset_split: str = option("train", "Split of a Hub dataset to train on.")
    eval_dataset: list[str] = option([], "Evaluation rows, given like --dataset.", path=True)
    eval_dataset_split: str = option("test", "Split of a Hub dataset given to --eval_dataset.")
    eval_fraction: float = option(
        0.0, "Fraction of --dataset set aside (seeded) for evaluation when no --eval_dataset is given."
    )
    max_length: int = option(2048, "Longest row, in tokens.")
    overlong: Literal["truncate", "drop"] = option("truncate", "What happens to rows over max_length.")
    chat_template: str | None = option(
        None, "A Jinja file, or chatml; default: the tokenizer's own template.", path=True
    )
    packing: Literal["auto", "on", "off"] = option(
        "auto",
        "Join rows to packs of up to max_length tokens, each row's loss unchanged; auto: where attention has a kernel "
        "for it. Otherwise rows are padded, with rows of like length together.",
    )
    loss_on: Literal["assistant", "all"] = option("assistant", "Which tokens are supervised: the assistant's, or all.")
    dataset_num_proc: int = option(1, "Processes that tokenize, on each node (--streaming: on the first one).")
    streaming: bool = option(
        False,
        "Read, shuffle and tokenize the training rows while training goes on, for sets that are too large to do so "
        "before; folders of files may be given too. Needs --max_steps.",
    )
    shuffle_buffer: int = option(
        10_000, "--streaming: rows of which the next one is drawn at random; 0: the order of the source."
    )


@dataclass
class BatchSettings:
    """Batch"""

    per_device_train_batch_size: int | Literal["auto"] = option(
        "auto",
        "Rows in one forward pass of one process; where rows are packed, the most packs; auto: as many as fit, within "
        "the same global batch (1 on a CPU, and with ZeRO or FSDP2).",
    )
    global_batch_size: int | None = option(
        None,
        "Rows (packs with --packing on) in one optimizer step over all processes; accumulation follows from it. "
        "Default: what divides nearest to 16 rows.",
    )
    global_batch_tokens: int | None = option(
        None,
        "Tokens in one optimizer step, instead of --global_batch_size, where rows are packed: the nearest it can be.",
    )
    gradient_accumulation_steps: int | None = option(None, "Set accumulation directly instead of --global_batch_size.")
    per_device_eval_batch_size: int = option(8, "Rows in one forward pass of one process during evaluation.")

    @property
    def rows_at_once(self) -> int:
        """per_device_train_batch_size, or 1 where it is auto and still to be found out."""
        return 1 if self.per_device_train_batch_size == "auto" else self.per_device_train_batch_size


@dataclass
class TrainingSettings:
    """Training"""

    num_train_epochs: float = option(1.0, "Passes over the training rows.")
    max_steps: int = option(-1, "Optimizer steps; a positive number overrides num_train_epochs.")
    learning_rate: float = option(2e-4, "Peak learning rate.")
    lr_scheduler_type: str = option("linear", "Schedule of the learning rate, by its Transformers name.")
    warmup_steps: float = option(0.0, "Steps of warm-up; below 1, a fraction of all steps.")
    weight_decay: float = option(0.0, "Weight decay.")
    max_grad_norm: float = option(1.0, "Clip gradients to this norm; 0: never.")
    optim: str = option("adamw_torch_fused", "Optimizer, by its Transformers name (adamw_8bit, sgd, ...).")
    gradient_checkpointing: Literal["auto", "none", "torch", "unsloth"] = option(
        "auto",
        "GradientCheckpointing activations: none is fastest, torch saves memory, unsloth also offloads them (unsloth backend); "
        "auto: the first of them that fits, tried before step 1, and the next where memory runs out later (untried: none "
        "on a CPU, torch with ZeRO or FSDP2).",
    )
    seed: int = option(42, "Seed of the adapter's initial weights, the row order and dropout.")
    ddp_find_unused_parameters: bool = option(False, "For models that skip some trainable weights in a forward pass.")
    ddp_timeout: int = option(1800, "Seconds a collective may take before the run is stopped.")
    watch_timeout: int = option(
        30, "Seconds without a sign of life after which a rank is lost and the run ends; 0: ranks are not watched."
    )
    drift_check_steps: int = option(
        100, "Optimizer steps between two comparisons of the ranks' trainable weights; 0: never."
    )
    use_cpu: bool = option(False, "Train on the CPU even where a GPU is found.")
    trainer_args: dict[str, Any] = option({}, "Any other SFTConfig field, as a mapping (JSON on the command line).")


@dataclass
class OutputSettings:
    """Output"""

    output_dir: str = option("outputs", "Folder of all runs; this run is written to <output_dir>/<run_name>/.")
    run_name: str | None = option(None, "Name of the run; default: model, method and time.")
    overwrite: bool = option(False, "Replace an earlier run of the same name.")
    resume: str = option(
        "auto",
        "auto: go on from this run's newest whole checkpoint, if it has one; no: begin anew (in the place of an earlier run "
        "only with overwrite); or a checkpoint folder.",
        path=True,
        no_is_a_word=True,
    )
    resume_anyway: bool = option(False, "Go on although settings or data changed since the checkpoint.")
    max_time: str | None = option(
        None, "Stop with a checkpoint (exit code 75) after this time: 3600 (seconds), 90m, 2h, or Slurm's D-HH:MM:SS."
    )
    logging_steps: int = option(10, "Steps between two log lines.")
    eval_strategy: Literal["auto", "no", "steps", "epoch"] = option(
        "auto", "When to evaluate; auto: at every epoch's end."
    )
    eval_steps: int | None = option(None, "Steps between two evaluations; sets eval_strategy to steps.")
    save_strategy: Literal["no", "steps", "epoch"] = option("steps", "When to write a checkpoint.")
    save_steps: int = option(500, "Steps between two checkpoints.")
    save_total_limit: int | None = option(2, "Checkpoints to keep.")
    report_to: list[str] = option(
        ["tensorboard"], "Trackers by their Transformers names (tensorboard, wandb, ...), or none."
    )
    merge: bool = option(False, "lora and qlora: also write the merged 16-bit model, to <run>/merged/.")
    push_to_hub: bool = option(False, "Upload the finished adapter or model.")
    hub_model_id: str | None = option(None, "Where to upload; default: your account and the run's name.")
    hub_private_repo: bool = option(True, "Create the Hub repository as private.")
    compare_answers: int = option(
        0, "Generate answers to this many evaluation rows before and after, and count exact ones."
    )


@dataclass
class UnslothSettings:
    """Unsloth"""

    compiled_cache_dir: str | None = option(
        None,
        "Folder of Unsloth's compiled modules; default: one of this job's own on each node's local disk.",
        path=True,
    )
    clear_compiled_cache: bool = option(False, "Empty that folder first.")


TOPICS = (
    ModelSettings,
    LoraSettings,
    DataSettings,
    BatchSettings,
    TrainingSettings,
    OutputSettings,
    UnslothSettings,
)


@dataclass
class Settings(
    UnslothSettings, OutputSettings, TrainingSettings, BatchSettings, DataSettings, LoraSettings, ModelSettings
):
    """All options of one run, flat, as they stand in a YAML file."""

    def save(self, path: Path) -> None:
        """Write the resolved settings; `--config <path>` repeats the run."""
        path.write_text(yaml.safe_dump(dataclasses.asdict(self), sort_keys=False), encoding="utf-8")


ABOVE_ZERO = (
    "lora_r", "lora_alpha", "max_length", "per_device_train_batch_size", "per_device_eval_batch_size",
    "global_batch_size", "global_batch_tokens", "gradient_accumulation_steps", "num_train_epochs", "logging_steps", "eval_steps",
    "save_steps", "save_total_limit", "dataset_num_proc", "ddp_timeout", "learning_rate",
)  # fmt: skip

ZERO_OR_ABOVE = (
    "weight_decay", "max_grad_norm", "warmup_steps", "lora_dropout", "compare_answers", "seed", "watch_timeout",
    "drift_check_steps", "shuffle_buffer",
)  # fmt: skip

# Above these a number is a slip of the pen that would end in a hang or in an error far from its cause.
AT_MOST = {
    "lora_r": 1_000_000, "max_length": 100_000_000, "per_device_train_batch_size": 100_000,
    "per_device_eval_batch_size": 100_000, "dataset_num_proc": 1000, "num_train_epochs": 1_000_000,
    "ddp_timeout": 10_000_000, "watch_timeout": 10_000_000,
    "shuffle_buffer": 100_000_000, "global_batch_size": 10_000_000, "global_batch_tokens": 1_000_000_000,
    "gradient_accumulation_steps": 1_000_000,
}  # fmt: skip


def check(settings: Settings) -> None:
    """Refuse settings that cannot be meant, with the fix.

    Raises:
        UserError: naming the first contradiction found.
    """
    _check_secrets(settings)
    if not settings.model:
        raise UserError("No model: give --model with a Hub id or a folder.")
    if not settings.dataset:
        raise UserError("No training data: give --dataset with a file or a Hub id.")
    for name in ABOVE_ZERO:
        value = getattr(settings, name)
        if value not in (None, "auto") and value <= 0:
            raise UserError(f"{name} is {value}, but it has to be above 0.")
    for name, most in AT_MOST.items():
        value = getattr(settings, name)
        if value not in (None, "auto") and value > most:
            raise UserError(f"{name} is {value}, but it has to be {most:,} or below.")
    for name in ZERO_OR_ABOVE:
        if getattr(settings, name) < 0:
            raise UserError(f"{name} is {getattr(settings, name)}, but it has to be 0 or above.")
    if settings.seed >= 2**32:
        raise UserError(f"seed is {settings.seed}, but NumPy's generators take seeds below 2**32 = {2**32}.")
    if settings.max_steps == 0:
        raise UserError("max_steps is 0, so nothing would be trained; give a positive number, or -1 to follow epochs.")
    if settings.lora_dropout >= 1:
        raise UserError(f"lora_dropout is {settings.lora_dropout}, but it is a fraction below 1.")
    if not 0 <= settings.eval_fraction < 1:
        raise UserError(f"eval_fraction is {settings.eval_fraction}, but it is a fraction from 0 to below 1.")
    if settings.eval_fraction and settings.eval_dataset:
        raise UserError(
            "eval_fraction and eval_dataset are both given, on the command line or by the recipe; keep one, with "
            "--eval_dataset none or --eval_fraction 0."
        )
    if settings.packing == "off" and settings.global_batch_tokens is not None:
        raise UserError(
            f"global_batch_tokens {settings.global_batch_tokens} needs packed rows, but packing is off; give "
            "--global_batch_size instead, or --packing auto."
        )
    if settings.merge and settings.method == "full":
        raise UserError("merge is for lora and qlora; method full already writes a whole model, so leave merge out.")
    if settings.eval_strategy in ("steps", "epoch") and not (settings.eval_dataset or settings.eval_fraction):
        raise UserError(
            f"eval_strategy is {settings.eval_strategy}, but there are no evaluation rows; give --eval_dataset or "
            "--eval_fraction."
        )
    if settings.eval_steps and settings.eval_strategy in ("no", "epoch"):
        raise UserError(
            f"eval_steps {settings.eval_steps} and eval_strategy {settings.eval_strategy} contradict; leave one out."
        )
    _check_names(settings)
    _check_streaming(settings)
    if settings.run_name is not None and not re.fullmatch(r"(?!\.{1,2}$)[^/\\\x00-\x1f]{1,200}", settings.run_name):
        raise UserError(
            f"run_name {settings.run_name[:200]!r} is not a plain folder name of at most 200 characters; "
            "use letters, digits, - and _."
        )
    _check_paths(settings)


def _check_names(settings: Settings) -> None:
    for name in ("optim", "lr_scheduler_type"):
        if getattr(settings, name) != getattr(TrainingSettings, name):
            check_name(name, getattr(settings, name))
    if settings.report_to not in (["tensorboard"], []) and (known := known_names("report_to")):
        # What is installed is known once Transformers is imported.
        choose_trackers(settings.report_to, known, known)


def _check_streaming(settings: Settings) -> None:
    if not settings.streaming:
        if settings.shuffle_buffer != DataSettings.shuffle_buffer:
            raise UserError(
                f"shuffle_buffer {settings.shuffle_buffer} is for --streaming; without it all rows are shuffled, so leave "
                "it out."
            )
        return
    if settings.max_steps <= 0:
        raise UserError(
            "streaming needs max_steps, because nobody knows how many rows will come and the learning rate follows the "
            "number of steps; give --max_steps (one pass over the rows is their number / global_batch_size)."
        )
    if settings.eval_fraction:
        raise UserError(
            f"eval_fraction {settings.eval_fraction} of rows that are streamed cannot be set aside, because their number "
            "is not known; give the evaluation rows with --eval_dataset."
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
                f"{name}_strategy is epoch, but where an epoch of streamed rows ends is not known; give --{name}_steps."
            )


def _check_secrets(settings: Settings) -> None:
    for f in dataclasses.fields(settings):
        if place := find_secret(f.name, getattr(settings, f.name)):
            raise UserError(
                f"{place} holds a secret, and settings are written to files; take it out, and give it in the environment "
                "(HF_TOKEN, WANDB_API_KEY) or log in once (hf auth login)."
            )


def _check_paths(settings: Settings) -> None:
    names = [f.name for f in dataclasses.fields(settings) if f.metadata.get("path")]
    for name in (*names, "output_dir"):
        value = getattr(settings, name)
        for path in value if isinstance(value, list) else [value] if value else []:
            look_up(name, Path(path))


def look_up(name: str, path: Path) -> Path:
    """The path in full, whether or not something is there.

    Raises:
        UserError: no file system could hold it: the home of nobody, a name too long, links in a circle.
    """
    try:
        full = path.expanduser().resolve()
        full.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(getattr(error, "strerror", error)).rstrip(".")
        raise UserError(f"{name} {str(path)[:200]} cannot be looked up: {reason}; give another.") from None
    return full
