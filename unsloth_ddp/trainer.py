"""One SFTTrainer subclass that wires loss averaging, the batch plan and telemetry into Transformers' loop.

Import this after the backend: with Unsloth imported, `trl.SFTTrainer` is Unsloth's own version of it. Each method
below replaces one step of the loop and says what upstream does there instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import Trainer, TrainerCallback, set_seed
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import EvalLoopOutput, IntervalStrategy
from trl import SFTTrainer
from trl.trainer.sft_config import SFTConfig

from unsloth_ddp.batch import BatchPlan, RowOrder
from unsloth_ddp.checkpoint import Checkpoints, Start, make_cpu_checkpoints_readable
from unsloth_ddp.data import PadRight, TokenizedRows
from unsloth_ddp.drift import REPLICATED, DriftCheck
from unsloth_ddp.errors import UserError
from unsloth_ddp.loss import logits_to_step_loss, step_divisor, supervised_tokens
from unsloth_ddp.model import DTYPES
from unsloth_ddp.runtime import Progress, Runtime, alone_timeout
from unsloth_ddp.settings import Settings
from unsloth_ddp.stop import Stop
from unsloth_ddp.telemetry import (
    TOKENS,
    BestEffort,
    Meter,
    OwnTime,
    Stragglers,
    Totals,
    describe_straggler,
    peak_memory_bytes,
    summarize,
)

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
        # A language model's buffers are constants; sending them before each forward pass makes ranks wait for each other.
        "ddp_broadcast_buffers": False,
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
    checkpoints: Checkpoints,
    stop: Stop,
) -> DDPTrainer:
    """The trainer of one run; TensorBoard events go to <run>/tensorboard/."""
    os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(Path(config.output_dir) / "tensorboard"))
    trainer = DDPTrainer(model, config, rows, eval_rows, tokenizer, runtime, settings, plan, checkpoints, stop)
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

    `pending` holds the sums of each rank since the last log line, which the totals do not hold yet.
    """

    def __init__(self, totals: dict[str, Any] | None = None, pending: list[list[float]] | None = None) -> None:
        self.totals = Totals(**(totals or {}))
        self.pending = pending

    def state(self) -> dict[str, Any]:
        """What Transformers writes to trainer_state.json and gives back to __init__."""
        return {"args": {"totals": dataclasses.asdict(self.totals), "pending": self.pending}, "attributes": {}}


class Report(TrainerCallback):
    """Tells whoever watches this process how far it is."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The micro-batches of a step are about to be computed."""
        self.progress.step = state.global_step + 1
        if self.progress.phase == "preparing":
            self.progress.enter("training")

    def _move(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.moves += 1

    on_substep_end = on_step_end = on_prediction_step = _move


class CompareWeights(TrainerCallback):
    """Ends the run where the ranks' weights have drifted apart (see drift.py)."""

    def __init__(self, drift: DriftCheck) -> None:
        self.drift = drift

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step's weights are in place."""
        if self.drift.due(state.global_step):
            self.drift.check(state.global_step)


class StopTogether(TrainerCallback):
    """Ends training on all ranks at the same step, with a checkpoint, when one of them was asked to stop.

    Comes after Transformers' own flow, whose decisions for this step it overrides: an evaluation that is due would
    keep a scheduler waiting, and is made up for when the run goes on.
    """

    def __init__(self, stop: Stop) -> None:
        self.stop = stop

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop.ask()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stop.answer() and state.global_step < state.max_steps:
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.stop.agreed and state.global_step < state.max_steps:
            control.should_evaluate = control.should_save = control.should_log = False


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
        checkpoints: Checkpoints,
        stop: Stop,
    ) -> None:
        self.runtime = runtime
        self.settings = settings
        self.plan = plan
        self.checkpoints = checkpoints
        self.stop = stop
        self.start: Start | None = None
        self._aside: str | None = None
        self.rows = {"train": train.counts.rows, "eval": evaluation.counts.rows if evaluation else 0}
        super().__init__(
            model=model,
            args=args,
            train_dataset=train.dataset,
            eval_dataset=evaluation.dataset if evaluation else None,
            processing_class=tokenizer,
            data_collator=PadRight(tokenizer.pad_token_id),
            callbacks=[SavedTotals(), Report(runtime.progress), StopTogether(stop)],
        )
        trackers = tuple(get_reporting_integration_callbacks(self.args.report_to))
        self.callback_handler.callbacks = [
            BestEffort(callback) if isinstance(callback, trackers) else callback
            for callback in self.callback_handler.callbacks
        ]
        # Unsloth's __init__ filters out rows without supervised tokens, and with them the filler.
        self.train_dataset, self.eval_dataset = train.dataset, evaluation.dataset if evaluation else None
        assert self.args.gradient_accumulation_steps == plan.accumulation, "the trainer changed the batch plan"
        # A model that does not take the divisor would divide by its own count.
        self.model_divides = bool(self.model_accepts_loss_kwargs)
        self.model_accepts_loss_kwargs = True
        if self.is_fsdp_enabled and runtime.precision != "fp32":
            # accelerate's own policy reduces gradients and returns losses in 16 bit.
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=DTYPES[runtime.precision], reduce_dtype=torch.float32
            )
        drift = DriftCheck(model, runtime, settings.drift_check_steps)
        if drift.skipped and runtime.ranks.is_main:
            print(f"drift_check_steps is ignored: with {drift.skipped} each rank holds its own part of the weights.")
        self.add_callback(CompareWeights(drift))
        several = runtime.ranks.world_size > 1 and runtime.sharding in REPLICATED
        self.meter = Meter(self._gather_sums, self.args.device, OwnTime(self.args.device, enabled=several))
        self.stragglers = Stragglers()
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

    def _get_train_sampler(self, train_dataset: Any = None) -> RowOrder:
        slots = self.args.per_device_train_batch_size * self.args.world_size
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.row_order = RowOrder(self.rows["train"], slots, seed)
        return self.row_order

    def _get_eval_sampler(self, eval_dataset: Any) -> RowOrder:
        slots = self.args.per_device_eval_batch_size * self.args.world_size
        return RowOrder(self.rows["eval"], slots, seed=None)

    # ---- loss: upstream divides by its own count and multiplies by the world size ----

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """The micro-batches of one optimizer step and the divisor of their losses (see loss.py)."""
        batches = []
        began = time.perf_counter()
        for _ in range(num_batches):
            try:
                batches.append(next(epoch_iterator))
            except StopIteration:
                break
        if not batches:
            return batches, None
        reading = time.perf_counter() - began
        divisor = step_divisor(batches, self.args.world_size, self._sum_over_ranks)
        self.meter.own_time.start(reading, len(batches))
        return batches, divisor

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
            self.meter.own_time.forward_done()
            lengths = inputs["attention_mask"].sum(dim=1)
            # The filler row, which evens out the processes, has one token.
            tokens = lengths.masked_fill(lengths == 1, 0).sum()
            self.meter.add(loss * divisor, supervised_tokens(labels), tokens)
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
        with torch.no_grad(), self.runtime.progress.doing("evaluating"):
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
        return EvalLoopOutput(None, None, metrics, num_samples=self.rows["eval"])  # type: ignore[arg-type]

    # ---- reports: upstream logs the mean of step means ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Every rank calls this at the same steps; the losses logged are exact token means."""
        if "loss" in logs:
            logs.update(self._collect())
            self._name_stragglers()
        if "train_loss" in logs:
            self._collect()
            logs["train_loss"] = self.totals.train_loss or 0.0
        logger.info("step %s %s", self.state.global_step, logs)
        Trainer.log(self, logs, start_time)

    def _name_stragglers(self) -> None:
        pace = self.meter.pace
        if pace is None:
            return
        logger.info("own seconds a step of each rank: %s", " ".join(f"{seconds:.4f}" for seconds in pace[0]))
        for rank in self.stragglers.observe(*pace):
            if self.runtime.ranks.is_main:
                place = self.runtime.places[rank]
                print(describe_straggler(place, rank, pace, self.stragglers.intervals), flush=True)

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

    # ---- checkpoints: upstream writes in place, and rotates before it knows that all is written ----

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        began = time.perf_counter()
        self._saved.pending = self._gather_sums(self.meter.sums).tolist()
        best_before = self.state.best_model_checkpoint

        def write(aside: Path) -> None:
            self._aside = str(aside)
            try:
                # Not TRL's, which also writes a model card into every checkpoint.
                with self.runtime.progress.doing("saving"):
                    Trainer._save_checkpoint(self, model, trial)
            finally:
                self._aside = None
            self._name_best_checkpoint(aside)

        if not self.checkpoints.save(self.state.global_step, write, self._best_step):
            self.state.best_model_checkpoint = best_before
        self.meter.began += time.perf_counter() - began

    def _get_output_dir(self, trial: Any) -> str:
        return self._aside or super()._get_output_dir(trial)

    def _name_best_checkpoint(self, aside: Path) -> None:
        """Where it will be, not where it was written."""
        # Upstream looks for it on each node's own disk.
        best = self.runtime.gather(self.state.best_model_checkpoint)[0]
        self.state.best_model_checkpoint = best
        if best and Path(best).parent.name == aside.name:
            self.state.best_model_checkpoint = str(self.checkpoints.folder / Path(best).name)
            if self.args.should_save:
                self.state.save_to_json(str(aside / f"checkpoint-{self.state.global_step}" / "trainer_state.json"))

    def _best_step(self) -> int | None:
        best = self.state.best_model_checkpoint
        return int(Path(best).name.rpartition("-")[2]) if best else None

    # Each part of a checkpoint is attempted by itself, because the other ranks wait in the next one.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the adapter or model, in the main process; all ranks take part."""
        if self._aside is None:
            super().save_model(output_dir, _internal_call)
        else:
            self.checkpoints.attempt(lambda: super(DDPTrainer, self).save_model(output_dir, _internal_call))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        with self.checkpoints.every_write_attempted() if sharded else contextlib.nullcontext():
            self.checkpoints.attempt(lambda: super(DDPTrainer, self)._save_optimizer_and_scheduler(output_dir))

    def _save_scaler(self, output_dir: str) -> None:
        self.checkpoints.attempt(lambda: super(DDPTrainer, self)._save_scaler(output_dir))

    def _save_rng_state(self, output_dir: str) -> None:
        if self.checkpoints.shared:
            self.checkpoints.attempt(lambda: super(DDPTrainer, self)._save_rng_state(output_dir))
            return
        # The main process's disk is the only one that is kept, so it writes the files of all ranks.
        with tempfile.TemporaryDirectory() as own:
            super()._save_rng_state(own)
            files = {path.name: path.read_bytes() for path in Path(own).iterdir()}
        everyones = self.runtime.gather(files)
        if self.args.should_save:
            for name, content in (item for files in everyones for item in files.items()):
                self.checkpoints.attempt(functools.partial(Path(output_dir, name).write_bytes, content))

    # ---- resuming ----

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        # The checkpoint's own intervals would win over changed ones.
        self.state.compute_steps(self.args, self.state.max_steps)
        pending = torch.tensor(self._saved.pending or [[0.0] * 3], dtype=torch.float64, device=self.args.device)
        self.tokens_before = self.totals.tokens + round(pending[:, TOKENS].sum().item())
        if len(pending) == self.runtime.ranks.world_size:
            self.meter.sums += pending[self.runtime.ranks.rank]
        elif self.runtime.ranks.is_main:
            self.meter.sums += pending.sum(dim=0)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # A run killed after its last step has nothing left to train; upstream would take one step more.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        # accelerate does not find the sampler inside a loader that skips the rows of a resumed epoch, if there are
        # several ranks, and would go on in the order of the first epoch.
        self.row_order.set_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        ranks, start = self.runtime.ranks, self.start
        if start is not None and start.manifest.run.get("world_size") != ranks.world_size:
            # No rank's own state fits; a seed of the step's and rank's own does not repeat the run's first numbers.
            set_seed((self.args.seed + 1_000_003 * self.state.global_step + ranks.rank) % 2**32)
        else:
            super()._load_rng_state(checkpoint)
        if checkpoint is not None and self._evaluation_is_due():
            self._determine_best_metric(self._evaluate(None, None), None)

    def _evaluation_is_due(self) -> bool:
        """Whether the run ended between a step and the evaluation that follows it."""
        step, strategy = self.state.global_step, self.args.eval_strategy
        if any("eval_loss" in entry and entry.get("step") == step for entry in self.state.log_history):
            return False
        if strategy == IntervalStrategy.EPOCH:
            return step >= self.state.max_steps or step % self.plan.steps_per_epoch(self.rows["train"]) == 0
        return strategy == IntervalStrategy.STEPS and step % self.state.eval_steps == 0

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step >= self.state.max_steps and self._evaluation_is_due():
            self._determine_best_metric(self._evaluate(None, None), None)
        return super()._finalize_training(*args, **kwargs)

    def run(self, start: Start | None) -> dict[str, Any] | None:
        """Train to the end, evaluate, and return the run's summary; None if the run was stopped before."""
        if start and self.runtime.device_type == "cpu":
            make_cpu_checkpoints_readable()
        self.start = start
        if start and start.of_this_run:
            self.checkpoints.last = start.folder
        self.stop.kept = lambda: self.checkpoints.last is not None
        self.stop.arm(self.runtime, alone_timeout(self.settings))
        began = time.perf_counter()
        self.train(resume_from_checkpoint=str(start.folder) if start else None)
        self.runtime.progress.enter("finishing")
        seconds = time.perf_counter() - began
        if self.stop.agreed and self.state.global_step < self.state.max_steps:
            return None
        self.stop.finishing = True
        summary = summarize(
            self.settings, self.runtime, self.plan, self.totals, self.state.global_step, self.peak_before_steps
        )
        summary["train_seconds"] = seconds
        summary["tokens_per_second"] = (self.totals.tokens - self.tokens_before) / seconds
        summary["eval_loss"] = self._final_eval_loss()
        return summary

    def write_final(self, folder: Path) -> None:
        """The trained adapter or model, the tokenizer and the log of losses, into `folder`; every rank calls this."""
        self.save_model(str(folder))
        if self.args.should_save:
            self.state.save_to_json(str(folder / "trainer_state.json"))

    def _final_eval_loss(self) -> float | None:
        """The evaluation loss of the trained model, measured now unless the last step did."""
        if self.eval_dataset is None:
            return None
        for entry in reversed(self.state.log_history):
            if "eval_loss" in entry and entry.get("step") == self.state.global_step:
                return entry["eval_loss"]
        return self.evaluate()["eval_loss"]
