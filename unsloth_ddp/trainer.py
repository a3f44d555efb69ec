"""One SFTTrainer subclass that wires loss averaging, the batch plan and telemetry into Transformers' loop.

Import this after the backend: with Unsloth imported, `trl.SFTTrainer` is Unsloth's own version of it. Each method
below replaces one step of the loop and says what upstream does there instead.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer
from trl.trainer.sft_config import SFTConfig

from unsloth_ddp.attention import keys_for_packs, prepare_for_packs
from unsloth_ddp.batch import BalancedOrder, BatchPlan
from unsloth_ddp.checkpoint import make_cpu_checkpoints_readable
from unsloth_ddp.data import Collate, Flatten, PadRight, TokenizedRows
from unsloth_ddp.errors import UserError
from unsloth_ddp.loss import logits_to_step_loss, step_divisor, supervised_tokens
from unsloth_ddp.model import DTYPES
from unsloth_ddp.runtime import Runtime
from unsloth_ddp.settings import Settings
from unsloth_ddp.telemetry import TOKENS, Meter, Totals, peak_memory_bytes, real_tokens, summarize

logger = logging.getLogger("unsloth_ddp")

# SFTConfig fields that the kit computes or that would undo what it does.
OWNED_ARGS = {
    "average_tokens_across_devices", "packing", "padding_free", "dataset_kwargs", "remove_unused_columns", "bf16",
    "fp16", "use_cpu", "gradient_accumulation_steps", "per_device_train_batch_size", "output_dir", "run_name",
    "train_sampling_strategy", "dataloader_drop_last", "push_to_hub", "hub_token", "assistant_only_loss",
    "completion_only_loss", "max_length", "label_smoothing_factor", "auto_find_batch_size", "accelerator_config",
}  # fmt: skip


def make_config(settings: Settings, runtime: Runtime, plan: BatchPlan, run_folder: Path) -> Any:
    """TRL's SFTConfig for these settings, every field set: Unsloth's version of it has defaults of its own.

    To be made before the model is loaded, and kept: with ZeRO-3 it is what makes Transformers load in parts.

    Raises:
        UserError: trainer_args names no field of SFTConfig, one the kit owns, or a value it refuses.
    """
    defaults = {
        f.name: f.default if f.default is not dataclasses.MISSING else f.default_factory()  # type: ignore[operator]
        for f in dataclasses.fields(SFTConfig)
        if f.init
    }
    for name in settings.trainer_args:
        if name in OWNED_ARGS or hasattr(settings, name):
            raise UserError(
                f"trainer_args: {name} is decided by the kit; use the option of train_ddp.py --help instead."
            )
        if name not in defaults:
            raise UserError(f"trainer_args: SFTConfig has no field {name}; see the documentation of TRL's SFTConfig.")
    strategy = settings.eval_strategy
    if strategy == "auto":
        strategy = "steps" if settings.eval_steps else "epoch"
    checkpointing = settings.gradient_checkpointing != "none"
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
        "bf16": runtime.precision == "bf16",
        "fp16": runtime.precision == "fp16",
        "use_cpu": runtime.device_type == "cpu",
        "gradient_checkpointing": checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant} if checkpointing else None,
        "ddp_find_unused_parameters": settings.ddp_find_unused_parameters,
        "ddp_timeout": settings.ddp_timeout,
        "eval_strategy": strategy if settings.eval_dataset or settings.eval_fraction else "no",
        "save_strategy": settings.save_strategy,
        "report_to": [] if settings.report_to == ["none"] else settings.report_to,
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
        # A bar that is not on a terminal would fill a log file with its redraws.
        "log_level_replica": "error",
        "disable_tqdm": not sys.stderr.isatty(),
        "dataloader_pin_memory": runtime.device_type == "cuda",
    }
    same_name = {n: getattr(settings, n) for n in defaults if hasattr(settings, n)}
    try:
        return SFTConfig(**{**defaults, **same_name, **chosen, **settings.trainer_args, "push_to_hub": False})
    except (TypeError, ValueError) as error:
        raise UserError(f"The training options are refused by TRL: {' '.join(str(error).split())}") from None


def make_trainer(
    settings: Settings,
    runtime: Runtime,
    plan: BatchPlan,
    config: Any,
    model: Any,
    tokenizer: Any,
    rows: TokenizedRows,
    eval_rows: TokenizedRows | None,
) -> DDPTrainer:
    """The trainer of one run; TensorBoard events go to <run>/tensorboard/."""
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(Path(config.output_dir) / "tensorboard"))
    # How many packs make a step is known since the rows are.
    config.per_device_train_batch_size, config.gradient_accumulation_steps = plan.per_device, plan.accumulation
    if rows.packing is not None:
        prepare_for_packs(runtime)
    trainer = DDPTrainer(model, config, rows, eval_rows, tokenizer, runtime, settings, plan)
    used = "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else "fp32"
    # bf16 weights need no autocast, so Unsloth switches it off for them.
    if used != runtime.precision and not (settings.method == "full" and settings.full_weights == "bf16"):
        raise UserError(
            f"precision {runtime.precision} cannot be had: Unsloth trains this model in {used}; use --precision {used}, "
            "or --backend transformers."
        )
    return trainer


class SavedTotals(TrainerCallback, ExportableState):
    """Keeps the run's totals inside every checkpoint, so that they go on when it is resumed.

    `pending` holds the sums of all ranks since the last log line, which the totals do not hold yet.
    """

    def __init__(self, totals: dict[str, Any] | None = None, pending: list[float] | None = None) -> None:
        self.totals = Totals(**(totals or {}))
        self.pending = pending

    def state(self) -> dict[str, Any]:
        """What Transformers writes to trainer_state.json and gives back to __init__."""
        return {"args": {"totals": dataclasses.asdict(self.totals), "pending": self.pending}, "attributes": {}}


class DDPTrainer(SFTTrainer):
    """SFTTrainer whose step is the token mean over every rank and accumulation step, whatever the layout."""

    def __init__(
        self,
        model: Any,
        args: Any,
        train: TokenizedRows,
        evaluation: TokenizedRows | None,
        tokenizer: Any,
        runtime: Runtime,
        settings: Settings,
        plan: BatchPlan,
    ) -> None:
        self.runtime = runtime
        self.settings = settings
        self.plan = plan
        self.train_rows, self.eval_rows = train, evaluation
        super().__init__(
            model=model,
            args=args,
            train_dataset=train.dataset,
            eval_dataset=evaluation.dataset if evaluation else None,
            processing_class=tokenizer,
            data_collator=Collate(PadRight(tokenizer.pad_token_id), Flatten(keys_for_packs(runtime, model))),
            callbacks=[SavedTotals()],
        )
        # Unsloth's __init__ filters out rows without supervised tokens, and with them the filler; it knows no packs.
        self.train_dataset, self.eval_dataset = train.examples, evaluation.dataset if evaluation else None
        assert self.args.gradient_accumulation_steps == plan.accumulation, "the trainer changed the batch plan"
        # A model that does not take the divisor would divide by its own count.
        self.model_divides = bool(self.model_accepts_loss_kwargs)
        self.model_accepts_loss_kwargs = True
        if self.is_fsdp_enabled and runtime.precision != "fp32":
            # accelerate's own policy reduces gradients and returns losses in 16 bit.
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=DTYPES[runtime.precision], reduce_dtype=torch.float32
            )
        self.meter = Meter(self._gather_sums, self.args.device)
        self.tokens_before = 0
        self.peak_before_steps = 0

    def _gather_sums(self, sums: Tensor) -> Tensor:
        return self.accelerator.gather(sums.unsqueeze(0))

    @property
    def _saved(self) -> SavedTotals:
        # Looked up each time: resuming replaces the callback by a new one.
        return next(c for c in self.callback_handler.callbacks if isinstance(c, SavedTotals))

    @property
    def totals(self) -> Totals:
        """Exact sums over all ranks since the run began, checkpoints included."""
        return self._saved.totals

    # ---- rows: upstream shuffles with the global RNG and sees some rows twice to even out the ranks ----

    def _get_train_sampler(self, train_dataset: Any = None) -> BalancedOrder:
        rows, seed = self.train_rows, self.args.seed if self.args.data_seed is None else self.args.data_seed
        return BalancedOrder(self.plan, rows.lengths(), seed, padded=rows.packing is None)

    def _get_eval_sampler(self, eval_dataset: Any) -> BalancedOrder:
        # One step of all the rows: those of like length share a batch.
        assert self.eval_rows is not None
        rows, at_once = self.eval_rows, self.args.per_device_eval_batch_size
        plan = BatchPlan(at_once, math.ceil(rows.units / (at_once * self.args.world_size)), self.args.world_size)
        return BalancedOrder(plan, rows.lengths(), None, padded=True)

    # ---- loss: upstream divides by its own count and multiplies by the world size ----

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """The micro-batches of one optimizer step and the divisor of their losses (see loss.py)."""
        batches = []
        for _ in range(num_batches):
            try:
                batches.append(next(epoch_iterator))
            except StopIteration:
                break
        if not batches:
            return batches, None
        return batches, step_divisor(batches, self.args.world_size, self._sum_over_ranks)

    def _sum_over_ranks(self, count: Tensor) -> Tensor:
        return self.accelerator.reduce(count.to(self.args.device), reduction="sum")

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Summed token losses of a micro-batch / divisor; TRL's per-batch metrics, which wait for the device, are left out."""
        labels, divisor = inputs["labels"], num_items_in_batch
        if not self.model_divides:
            logits = model(
                **{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False
            ).logits
            loss = logits_to_step_loss(logits, labels, divisor)
        elif self.runtime.backend == "unsloth":
            # Unsloth's own compute_loss prepares inputs for some models and hands the divisor to its fused loss.
            loss = super().compute_loss(model, dict(inputs), num_items_in_batch=divisor)
        else:
            loss = self._transformers_loss(model, inputs, divisor)
        # Not model.training: DeepSpeed's engine says that it trains while it evaluates.
        if torch.is_grad_enabled():
            self.meter.add(loss * divisor, supervised_tokens(labels), real_tokens(inputs))
        return (loss, None) if return_outputs else loss

    def _transformers_loss(self, model: Any, inputs: dict[str, Tensor], divisor: Tensor) -> Tensor:
        extra: dict[str, Any] = {"use_cache": False, "num_items_in_batch": divisor}
        if self.runtime.device_type == "cuda":
            # TRL's fused head never builds the (batch, sequence, vocabulary) logits; its kernel needs a GPU.
            extra["fused_lm_head"] = True
        return model(**inputs, **extra).loss

    # Straight to Transformers: Unsloth's versions drop evaluation rows without supervised tokens, the filler among
    # them, and TRL's prepare rows that are prepared already.

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The evaluation rows, the filler included."""
        return Trainer.get_eval_dataloader(self, eval_dataset)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Evaluate on the set given to the trainer."""
        return Trainer.evaluate(self, eval_dataset, ignore_keys, metric_key_prefix)

    # ---- evaluation: upstream averages the means of batches, and counts repeated rows again ----

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The token mean over the whole set, each row once, in any layout."""
        began = time.perf_counter()
        model: Any = self.model_wrapped if self.is_deepspeed_enabled or self.is_fsdp_enabled else self.model
        was_training = model.training
        model.eval()
        one = torch.ones((), device=self.args.device)
        sums = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        with torch.no_grad():
            for inputs in dataloader:
                inputs = self._prepare_inputs(inputs)
                with self.compute_loss_context_manager():
                    loss_sum = self.compute_loss(model, inputs, num_items_in_batch=one)
                sums += torch.stack([loss_sum.double(), supervised_tokens(inputs["labels"]).double()])
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        loss, count = self._gather_sums(sums).sum(dim=0).tolist()
        model.train(was_training)
        self.meter.began += time.perf_counter() - began
        metrics = {f"{metric_key_prefix}_loss": loss / count}
        return EvalLoopOutput(None, None, metrics, num_samples=len(dataloader.dataset) - 1)  # type: ignore[arg-type]

    # ---- reports: upstream logs the mean of step means ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Every rank calls this at the same steps; the losses logged are exact token means."""
        if "loss" in logs:
            logs.update(self._collect())
        if "train_loss" in logs:
            self._collect()
            logs["train_loss"] = self.totals.train_loss or 0.0
        logger.info("step %s %s", self.state.global_step, logs)
        Trainer.log(self, logs, start_time)

    def _collect(self) -> dict[str, float]:
        self.meter.totals = self.totals
        return self.meter.collect()

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        # What loading took for a moment is not what a step takes.
        self.peak_before_steps = peak_memory_bytes(self.runtime.device_type)
        if self.runtime.device_type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return prepared

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        began = time.perf_counter()
        self._saved.pending = self._gather_sums(self.meter.sums).sum(dim=0).tolist()
        # Not TRL's, which also writes a model card into every checkpoint.
        Trainer._save_checkpoint(self, model, trial)
        self.meter.began += time.perf_counter() - began

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        self.tokens_before = self.totals.tokens + round((self._saved.pending or [0, 0, 0])[TOKENS])
        if self.runtime.ranks.is_main and self._saved.pending is not None:
            self.meter.sums += torch.tensor(self._saved.pending, dtype=torch.float64, device=self.args.device)

    def run(self, checkpoint: str | None) -> dict[str, Any]:
        """Train to the end, from `checkpoint` if there is one, evaluate, and return the run's summary."""
        if checkpoint and self.runtime.device_type == "cpu":
            make_cpu_checkpoints_readable()
        began = time.perf_counter()
        self.train(resume_from_checkpoint=checkpoint)
        seconds = time.perf_counter() - began
        summary = summarize(
            self.settings,
            self.runtime,
            self.plan,
            self.train_rows.packing,
            self.totals,
            self.state.global_step,
            self.peak_before_steps,
        )
        summary["train_seconds"] = seconds
        summary["tokens_per_second"] = (self.totals.tokens - self.tokens_before) / seconds
        summary["eval_loss"] = self._final_eval_loss()
        self.save_state()
        return summary

    def _final_eval_loss(self) -> float | None:
        """The evaluation loss of the trained model, measured now unless the last step did."""
        if self.eval_dataset is None:
            return None
        for entry in reversed(self.state.log_history):
            if "eval_loss" in entry and entry.get("step") == self.state.global_step:
                return entry["eval_loss"]
        return self.evaluate()["eval_loss"]
