"""Declare every option of a run once: typed dataclasses, one per topic, with defaults and declarations.

Contradictions between options are refused in checks.py; parse.py reads options from a YAML file and the command line.
"""

import dataclasses
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import yaml

from unsloth_ddp.config.declare import Option, option
from unsloth_ddp.config.task_options import PAIR_TASKS, ImageSettings, TaskSettings
from unsloth_ddp.utils.files.safe import write_new_file


@dataclass(frozen=True)
class ModelSettings:
    """Model"""

    model: str | None = option(None, "Hub id or folder of the base model.", "refuse", path="read")
    model_revision: str | None = option(None, "Branch, tag or commit of the model on the Hub.", "refuse")
    method: Literal["lora", "qlora", "full"] = option(
        "lora", "lora: adapter on 16-bit weights; qlora: adapter on 4-bit weights; full: every parameter.", "refuse"
    )
    backend: Literal["auto", "unsloth", "transformers"] = option(
        "auto",
        "auto: Unsloth on a GPU; Transformers + PEFT on a CPU, and for what trains better with it (images, pairs, "
        "FP8, gpt-oss).",
        "refuse",
        resolved=True,
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = option(
        "auto",
        "Compute precision; auto: bf16 on a GPU that supports it, fp16 on others, fp32 on a CPU.",
        "refuse",
        resolved=True,
    )
    full_weights: Literal["fp32", "bf16"] = option(
        "fp32",
        "Data type of the trained weights with --method full; bf16 halves their memory but loses small updates to "
        "rounding.",
        "refuse",
    )
    train_towers: bool | Literal["tower", "projector"] = option(
        False,
        "Train what stands beside the text decoder of an image-text model too: true (both), tower, or projector. Rows "
        "of text do not reach it.",
        "refuse",
        bare="true",
    )
    attn_implementation: str | None = option(
        None, "Attention implementation of the transformers backend (sdpa, eager, ...).", "report"
    )
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.", "allow")
    use_safetensors: bool = option(True, "Refuse weights in pickle files.", "allow")


@dataclass(frozen=True)
class LoraSettings:
    """LoRA and QLoRA"""

    lora_r: int = option(16, "Rank of the adapter.", "refuse", above=0, at_most=1_000_000)
    lora_alpha: int = option(16, "Alpha of the adapter, which is scaled by alpha / r.", "refuse", above=0)
    lora_dropout: float = option(0.0, "Dropout before the adapter.", "refuse", at_least=0, below=1)
    lora_target_modules: list[str] = option(
        ["all-linear"],
        "Modules that get an adapter; all-linear: every linear layer of the text decoder, except routers. A leaf name "
        "(q_proj) reaches the same layers, a name with a dot any module whose path ends with it.",
        "refuse",
    )
    lora_target_parameters: list[str] = option(
        [],
        "Parameters outside linear layers that get an adapter: the experts of a mixture of experts "
        "(mlp.experts.down_proj, ...); all-experts: all of them.",
        "refuse",
    )
    lora_modules_to_save: list[str] = option(
        [], "Modules trained in full in addition to the adapter (embed_tokens, lm_head, ...).", "refuse"
    )
    lora_trainable_tokens: list[str] = option(
        [],
        "Tokens of the tokenizer whose rows of the embedding and the output head are trained in addition to the "
        "adapter, such as new ones (<doc>, ...).",
        "refuse",
    )
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r) instead (rank-stabilised LoRA).", "refuse")


@dataclass(frozen=True)
class DataSettings:
    """Data"""

    # A resume compares the rows, their tokens and labels, whichever of these options they come from.
    dataset: list[str] = option(
        [],
        "Training rows: .jsonl, .json, .parquet, .csv files, or Hub ids. NAME[:10%] takes a slice, NAME@SUBSET[SPLIT] "
        "a subset and split of a Hub dataset, NAME:3 beside NAME:1 three rows of the first for one of the other.",
        "allow",
        path="read",
    )
    dataset_config: str | None = option(
        None, "Subset (configuration) of the Hub datasets that are named without one.", "allow"
    )
    dataset_revision: list[str] = option(
        [],
        "Branch, tag or commit of each Hub dataset, in the order in which --dataset and --eval_dataset first name "
        "them.",
        "allow",  # compared for streamed rows only: the others are compared themselves
    )
    dataset_split: str = option("train", "Split of the Hub datasets to train on that are named without one.", "allow")
    eval_dataset: list[str] = option([], "Evaluation rows, given like --dataset.", "allow", path="read")
    eval_dataset_split: str = option("test", "Split of a Hub dataset given to --eval_dataset.", "allow")
    eval_fraction: float = option(
        0.0,
        "Fraction of --dataset set aside (seeded) for evaluation when no --eval_dataset is given.",
        "allow",
        at_least=0,
        below=1,
    )
    columns: list[str] = option(
        [],
        "Columns of the rows to read under other names: question=instruction answer=output (a mapping in a YAML file).",
        "allow",
    )
    max_length: int = option(2048, "Longest row, in tokens.", "refuse", above=0, at_most=100_000_000)
    overlong: Literal["truncate", "drop"] = option("truncate", "Truncate or drop rows over max_length.", "refuse")
    chat_template: str | None = option(
        None,
        "Jinja file, chatml, or training (TRL's training variant of the template); default: the tokenizer's template.",
        "allow",
        path="read",
        words=("chatml", "training"),
    )
    chat_template_kwargs: dict[str, Any] = option(
        {},
        "Values for the chat template beside messages and tools, such as {enable_thinking: false}, as a mapping "
        "(JSON on the command "
        "line); a column chat_template_kwargs, or one of a name that the template reads, gives those of a row.",
        "allow",
    )
    reasoning_in_content: bool = option(
        False,
        "Where the chat template leaves out the reasoning of an answer (reasoning_content and the like): give it "
        "under the key that the "
        "template reads, or write it into the content, between the model's tokens for it or <think> and </think>.",
        "allow",
    )
    packing: Literal["auto", "on", "off"] = option(
        "auto",
        "Pack rows into sequences of up to max_length tokens without changing the loss of a row; auto: if attention "
        "has a kernel for it. Otherwise rows are padded and grouped by length.",
        "refuse",
        bare="on",
        resolved=True,
    )
    loss_on: Literal["assistant", "all"] = option(
        "assistant", "Compute the loss on the assistant's tokens or on all tokens.", "refuse"
    )
    dataset_num_proc: int | None = option(
        None,
        "Tokenizer processes on each node (with --streaming: on the first node only) [one per 1,000 rows, at most half "
        "the cores and 8; 1 with --streaming].",
        "allow",
        above=0,
        at_most=1000,
    )
    streaming: bool = option(
        False,
        "Read, shuffle and tokenize the training rows during training, for datasets that are too large to prepare "
        "beforehand. Also accepts folders of files. Needs --max_steps.",
        "allow",
    )
    shuffle_buffer: int = option(
        10_000,
        "With --streaming, draw the next row at random from this many rows; 0: keep the order of the source.",
        "refuse",
        at_least=0,
        at_most=100_000_000,
        resolved=True,
    )


@dataclass(frozen=True)
class BatchSettings:
    """Batch"""

    per_device_train_batch_size: int | Literal["auto"] = option(
        "auto",
        "Rows in one forward pass of one process; with packing, the maximum number of packs; auto: as many as fit, "
        "within the global batch (with ZeRO or FSDP2 by an estimate; 1 on a CPU).",
        "report",
        above=0,
        at_most=100_000,
        resolved=True,
    )
    global_batch_size: int | None = option(
        None,
        "Rows (packs with --packing on) in one optimizer step over all processes; sets gradient accumulation. "
        "Default: the valid size nearest to 16 rows.",
        "refuse",
        above=0,
        at_most=10_000_000,
        resolved=True,
    )
    global_batch_tokens: int | None = option(
        None,
        "Approximate number of tokens in one optimizer step, with packing; replaces --global_batch_size.",
        "allow",  # global_batch_size is compared
        above=0,
        at_most=1_000_000_000,
    )
    gradient_accumulation_steps: int | None = option(
        None,
        "Gradient accumulation steps; replaces --global_batch_size.",
        "report",
        above=0,
        at_most=1_000_000,
        resolved=True,
    )
    per_device_eval_batch_size: int = option(
        8, "Rows in one forward pass of one process during evaluation.", "allow", above=0, at_most=100_000
    )

    @property
    def rows_at_once(self) -> int:
        """Return per_device_train_batch_size, or 1 while auto is not resolved."""
        return 1 if self.per_device_train_batch_size == "auto" else self.per_device_train_batch_size


@dataclass(frozen=True)
class TrainingSettings:
    """Training"""

    # A resume compares the number of steps that follows from these two.
    num_train_epochs: float = option(1.0, "Passes over the training rows.", "allow", above=0, at_most=1_000_000)
    max_steps: int = option(-1, "Optimizer steps; a positive number overrides num_train_epochs.", "allow", at_least=-1)
    learning_rate: float = option(2e-4, "Peak learning rate.", "keep", above=0)
    lr_scheduler_type: str = option("linear", "Schedule of the learning rate, by its Transformers name.", "refuse")
    warmup_steps: float = option(0.0, "Steps of warm-up; below 1, a fraction of all steps.", "refuse", at_least=0)
    weight_decay: float = option(0.0, "Weight decay.", "keep", at_least=0)
    max_grad_norm: float = option(1.0, "Clip gradients to this norm; 0: never.", "refuse", at_least=0)
    optim: str = option("adamw_torch_fused", "Optimizer, by its Transformers name (adamw_8bit, sgd, ...).", "keep")
    gradient_checkpointing: Literal["auto", "none", "torch", "unsloth"] = option(
        "auto",
        "Recompute activations in the backward pass: none is fastest, torch saves memory, unsloth also offloads them "
        "(unsloth backend); auto: the first that fits in a trial before step 1, and the next one, then more passes, if "
        "memory runs out later (with ZeRO or FSDP2 by an estimate, none or torch; on a CPU without a trial).",
        "report",
        bare="auto",
    )
    cuda_graphs: Literal["auto", "on", "off"] = option(
        "auto",
        "Compile the layers and replay each micro-batch as one CUDA graph, which removes kernel launch overhead; auto: "
        "with packed rows in bf16 and gradient checkpointing none or torch, if a trial gives the same loss and "
        "gradients, is faster, and the run is long enough.",
        "report",
        bare="on",
        resolved=True,
    )
    fp8: bool = option(
        False,
        "With --method lora or qlora, multiply by the frozen weights in FP8, forward and backward; adapters, head, "
        "norms and attention stay in 16 bit. Needs compute capability 8.9 or higher.",
        "refuse",
    )
    seed: int = option(
        42,
        "Seed of the adapter's initial weights, the row order and dropout.",
        "refuse",
        at_least=0,
        at_most=2**32 - 1,  # NumPy's generators take no larger ones.
    )
    ddp_find_unused_parameters: bool = option(
        False, "For models that skip some trainable weights in a forward pass.", "allow"
    )
    ddp_timeout: int = option(
        1800, "Seconds a collective may take before the run is stopped.", "allow", above=0, at_most=10_000_000
    )
    watch_timeout: int = option(
        30,
        "Seconds without a heartbeat after which a rank counts as lost and the run ends; 0: disable the watchdog.",
        "allow",
        at_least=0,
        at_most=10_000_000,
    )
    drift_check_steps: int = option(
        100,
        "Optimizer steps between comparisons of the trainable weights of all ranks, beside those before saves; 0: "
        "never.",
        "allow",
        at_least=0,
    )
    use_cpu: bool = option(False, "Train on the CPU even where a GPU is found.", "allow")
    trainer_args: dict[str, Any] = option(
        {}, "Any other SFTConfig field, as a mapping (JSON on the command line).", "refuse"
    )


@dataclass(frozen=True)
class OutputSettings:
    """Output"""

    output_dir: str = option(
        "outputs",
        "Folder of all runs; this run is written to <output_dir>/<run_name>/.",
        "allow",
        path="written",
        new_run=False,
    )
    run_name: str | None = option(None, "Name of the run; default: model, method and time.", "allow", new_run=False)
    overwrite: bool = option(False, "Replace an earlier run of the same name.", "allow", new_run=False)
    resume: str = option(
        "auto",
        "auto: continue from this run's newest complete checkpoint, if any; no: start from step 0 (replacing an "
        "earlier run only with --overwrite); or a checkpoint folder.",
        "allow",
        path="read",
        words=("auto", "no"),
        bare="auto",
        new_run=False,
    )
    resume_anyway: bool = option(
        False, "Continue although settings or data changed since the checkpoint.", "allow", new_run=False
    )
    trust_checkpoint: bool = option(
        False,
        "Allow resuming from a checkpoint outside the run's folder whose files can run code when they are loaded: "
        "those of DeepSpeed (ZeRO), and those in torch's distributed checkpoint format.",
        "allow",
        new_run=False,
    )
    max_time: str | None = option(
        None,
        "Stop with a checkpoint (exit code 75) after this time: 3600 (seconds), 90m, 2h, or Slurm's D-HH:MM:SS.",
        "allow",
        new_run=False,
    )
    logging_steps: int | Literal["auto"] = option(
        "auto",
        "Steps between two log lines; auto: 10, less in runs of under 100 steps. The first and the last step are "
        "always logged.",
        "allow",
        above=0,
    )
    eval_strategy: Literal["auto", "no", "steps", "epoch"] = option(
        "auto", "When to evaluate; auto: at the end of each epoch; no: only the trained model, at the end.", "allow"
    )
    eval_steps: int | None = option(
        None, "Steps between two evaluations; sets eval_strategy to steps.", "allow", above=0
    )
    early_stopping_patience: int | None = option(
        None,
        "Stop when the evaluation loss has not fallen for this many evaluations, with a checkpoint at each one; the "
        "result is that of the lowest loss.",
        "keep",
        above=0,
    )
    save_strategy: Literal["no", "steps", "epoch"] = option("steps", "When to write a checkpoint.", "allow")
    save_steps: int = option(500, "Steps between two checkpoints.", "allow", above=0)
    save_seconds: int | None = option(
        None, "Also write a checkpoint when this many seconds have passed since the last one.", "allow", above=0
    )
    save_total_limit: int | None = option(2, "Checkpoints to keep.", "allow", above=0, new_run=False)
    report_to: list[str] = option(
        ["tensorboard"], "Trackers by their Transformers names (tensorboard, wandb, ...), or none.", "allow"
    )
    merge: bool = option(False, "With LoRA or QLoRA, also write the merged 16-bit model to <run>/merged/.", "allow")
    push_to_hub: bool = option(False, "Upload the finished adapter or model.", "allow")
    hub_model_id: str | None = option(
        None, "Hub repository to upload to; default: your account and the run's name.", "allow"
    )
    hub_private_repo: bool = option(True, "Create the Hub repository as private.", "allow")
    compare_answers: int = option(
        0,
        "Number of evaluation rows to answer before and after training (up to 256 tokens each), counting exact "
        "matches.",
        "allow",
        at_least=0,
    )


@dataclass(frozen=True)
class UnslothSettings:
    """Unsloth"""

    compiled_cache_dir: str | None = option(
        None,
        "Folder of Unsloth's compiled modules; default: a folder for this job on each node's local disk.",
        "allow",
        path="read",
    )
    clear_compiled_cache: bool = option(False, "Empty that folder first.", "allow")


@dataclass(frozen=True)
class Settings(
    UnslothSettings,
    OutputSettings,
    TrainingSettings,
    BatchSettings,
    ImageSettings,
    DataSettings,
    TaskSettings,
    LoraSettings,
    ModelSettings,
):
    """All options of one run, flat, as they stand in a YAML file."""

    @property
    def longest_example(self) -> int:
        """Return the most trained tokens of a training row, which may be two answers of up to max_length tokens."""
        return self.max_length * (2 if self.task in PAIR_TASKS else 1)

    @property
    def longest_pack(self) -> int:
        """Return the most tokens of a row as it is packed; a labelled answer has its mismatched row beside it."""
        return self.max_length * (2 if self.trains_preferences else 1)

    @property
    def of_reference(self) -> Self | None:
        """Return the settings that load --reference_model as the model is loaded; None without one.

        An adapter is the smallest one, which changes nothing before it is trained.
        """
        if self.reference_model is None:
            return None
        small: dict[str, Any] = {"lora_r": 1, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]}
        small |= {"lora_target_parameters": [], "lora_modules_to_save": [], "lora_trainable_tokens": []}
        small |= {"train_towers": False}
        return dataclasses.replace(
            self,
            model=self.reference_model,
            model_revision=self.reference_model_revision,
            gradient_checkpointing="none",
            **small,
        )

    def save(self, path: Path) -> None:
        """Write the resolved settings; `--config <path>` repeats the run."""
        write_new_file(path, yaml.safe_dump(dataclasses.asdict(self), sort_keys=False))


# In the order of --help, which is that of the fields: the topics, and every option with its declaration and its type.
TOPICS: tuple[type, ...] = Settings.__bases__[::-1]
OPTIONS: dict[str, Option] = {f.name: f.metadata["option"] for f in dataclasses.fields(Settings)}
TYPES: dict[str, Any] = typing.get_type_hints(Settings)


def options_with(**declaration: Any) -> tuple[str, ...]:
    """Return the names of the options whose declaration holds these values, such as on_resume="refuse"."""
    return tuple(
        name
        for name, option in OPTIONS.items()
        if all(getattr(option, key) == value for key, value in declaration.items())
    )
