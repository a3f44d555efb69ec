"""One SFTTrainer subclass that wires loss averaging, the batch plan and telemetry into Transformers' loop.

Import this after the backend: with Unsloth imported, `trl.SFTTrainer` is Unsloth's own version of it. Each method
below replaces one step of the loop and says what upstream does there instead.
"""

from __future__ import annotations

import logging
import math
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import EvalLoopOutput

from unsloth_ddp.checkpoints.checkpoint import Checkpoints, Start, batch_facts, make_cpu_checkpoints_readable
from unsloth_ddp.config.parse import Settings
from unsloth_ddp.data.batch_plan import BalancedOrder, BatchPlan
from unsloth_ddp.data.collate import Collate, Flatten, PadRight
from unsloth_ddp.data.dataset import TokenizedRows
from unsloth_ddp.data.stream_steps import streamed_steps
from unsloth_ddp.data.stream_windows import Unit, streamed_windows
from unsloth_ddp.distributed.drift import REPLICATED, DriftCheck
from unsloth_ddp.distributed.runtime import Runtime, control_timeout
from unsloth_ddp.distributed.signals import Stop
from unsloth_ddp.model.attention import keys_for_packs, prepare_for_packs
from unsloth_ddp.model.gradient_checkpointing import GradientCheckpointing
from unsloth_ddp.model.load import DTYPES
from unsloth_ddp.model.supervised_head import SupervisedHead, fits_fused_head, head_for
from unsloth_ddp.training.callbacks import CompareWeights, Report, SavedTotals, StopTogether
from unsloth_ddp.training.gradient_exchange import GradientExchange
from unsloth_ddp.training.loss import logits_to_step_loss, step_divisor, supervised_tokens
from unsloth_ddp.training.memory_search import Chosen, choose, forget_free_memory, with_micro_batch
from unsloth_ddp.training.metrics import (
    BestEffort,
    Meter,
    OwnWorkTimer,
    Stragglers,
    describe_straggler,
    peak_memory_bytes,
    real_tokens,
    summarize,
)
from unsloth_ddp.training.oom_retry import RetryingTrainer, exchanges_itself
from unsloth_ddp.utils.errors import UserError

logger = logging.getLogger("unsloth_ddp")


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
    # How many packs make a step is known since the rows are.
    config.per_device_train_batch_size, config.gradient_accumulation_steps = plan.per_device, plan.accumulation
    if rows.packing is not None:
        prepare_for_packs(runtime, model)
    trainer = DDPTrainer(model, config, rows, eval_rows, tokenizer, runtime, settings, plan, checkpoints, stop)
    used = "bf16" if trainer.args.bf16 else "fp16" if trainer.args.fp16 else "fp32"
    # bf16 weights need no autocast, so Unsloth switches it off for them.
    if used != runtime.precision and not (settings.method == "full" and settings.full_weights == "bf16"):
        raise UserError(
            f"precision {runtime.precision} cannot be had: Unsloth trains this model in {used}; use --precision {used}, "
            "or --backend transformers."
        )
    return trainer


class DDPTrainer(RetryingTrainer):
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
        trained = [p for p in model.parameters() if p.requires_grad]
        checkpoints.weights_bytes = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in trained)
        self.stop = stop
        self.recompute = GradientCheckpointing(model, runtime, settings)
        self.train_rows, self.eval_rows = train, evaluation
        self.row_seed: int = args.seed if args.data_seed is None else args.data_seed
        self.collate = Collate(PadRight(tokenizer.pad_token_id), Flatten(keys_for_packs(runtime, model)))
        self.windows = (
            streamed_windows(settings, train.packing, tokenizer, self.row_seed, train.template_date)
            if train.streamed
            else None
        )
        super().__init__(
            model=model,
            args=args,
            train_dataset=train.dataset,
            eval_dataset=evaluation.dataset if evaluation else None,
            processing_class=tokenizer,
            data_collator=self.collate,
            callbacks=[SavedTotals(), Report(runtime.progress), StopTogether(stop)],
        )
        trackers = tuple(get_reporting_integration_callbacks(self.args.report_to))
        self.callback_handler.callbacks = [
            BestEffort(callback) if isinstance(callback, trackers) else callback
            for callback in self.callback_handler.callbacks
        ]
        # Unsloth's __init__ filters out rows without supervised tokens, and with them the filler; it knows no packs.
        self.train_dataset, self.eval_dataset = train.examples, evaluation.examples if evaluation else None
        assert self.args.gradient_accumulation_steps == plan.accumulation, "the trainer changed the batch plan"
        # A model that does not take the divisor would divide by its own count.
        self.model_divides = bool(self.model_accepts_loss_kwargs)
        self.model_accepts_loss_kwargs = True
        self.head: SupervisedHead | None = None
        # TRL's never builds the (batch, sequence, vocabulary) logits; its kernel needs a GPU.
        self.fused_head = runtime.device_type == "cuda" and fits_fused_head(model)
        # Unsloth lowers what is its default to the rows of a micro-batch, which are not chosen yet.
        self.args.per_device_eval_batch_size = settings.per_device_eval_batch_size
        if self.is_fsdp_enabled and runtime.precision != "fp32":
            # accelerate's own policy reduces gradients and returns losses in 16 bit.
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=DTYPES[runtime.precision], reduce_dtype=torch.float32
            )
        if self.accelerator.ddp_handler is not None:
            # Gradients lie where they are sent from, instead of being copied there.
            self.accelerator.ddp_handler.gradient_as_bucket_view = True
        if exchanges_itself(settings, runtime, self.recompute):
            self.exchange = GradientExchange(trained, runtime.ranks.world_size)
        drift = DriftCheck(model, runtime, settings.drift_check_steps)
        if drift.skipped and runtime.ranks.is_main:
            print(f"drift_check_steps is ignored: with {drift.skipped} each rank holds its own part of the weights.")
        self.add_callback(CompareWeights(drift))
        several = runtime.ranks.world_size > 1 and runtime.sharding in REPLICATED
        self.meter = Meter(self._gather_sums, self.args.device, OwnWorkTimer(self.args.device, enabled=several))
        self.stragglers = Stragglers()
        self.peak_before_steps = 0

    def fit(self, start: Start | None) -> Chosen:
        """Find out what fits and train like that (see fit.py); every rank calls this, before the first step."""
        # What loading took for a moment is not what a try or a step takes.
        self.peak_before_steps = peak_memory_bytes(self.runtime.device_type)
        chosen = choose(self, start.manifest.run if start else {})
        if len(self.recompute.kinds) > 1:
            self.recompute.use(chosen.kind)
        self.told_level = self.recompute.level
        self.plan = with_micro_batch(self.plan, chosen.per_device)
        self.args.per_device_train_batch_size = self.plan.per_device
        self.args.gradient_accumulation_steps = self.plan.accumulation
        self._train_batch_size = self.args.train_batch_size
        self.checkpoints.facts |= {**batch_facts(self.plan), "gradient_checkpointing": chosen.kind}
        # After the tries, which have to allow for rows of which everything is supervised.
        self.head = head_for(self)
        self.collate.head_chooses = self.head is not None
        forget_free_memory()
        if self.runtime.device_type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return chosen

    # ---- rows: upstream shuffles with the global RNG and sees some rows twice to even out the ranks ----

    def get_train_dataloader(self) -> DataLoader:
        """This rank's micro-batches; streamed ones are dealt already, so accelerate does not shard them again."""
        if self.windows is None:
            return super().get_train_dataloader()
        self.streamed = streamed_steps(self.settings, self.runtime, self.plan, self.train_rows.packing, self.windows)

        def collate(units: list[Unit] | None) -> dict[str, Any] | None:
            return None if units is None else self.data_collator(units)

        pinned = self.args.dataloader_pin_memory
        return DataLoader(self.streamed, batch_size=None, collate_fn=collate, pin_memory=pinned)

    def _get_train_sampler(self, train_dataset: Any = None) -> BalancedOrder:
        rows = self.train_rows
        self.row_order = BalancedOrder(self.plan, rows.lengths(), self.row_seed, padded=rows.packing is None)
        return self.row_order

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
        began = time.perf_counter()
        for _ in range(num_batches):
            try:
                batches.append(next(epoch_iterator))
            except StopIteration:
                break
        if not batches:
            return batches, None
        # The ranks wait for each other when streamed rows are handed out.
        reading = self.streamed.waited() if self.streamed else time.perf_counter() - began
        divisor = step_divisor(batches, self.args.world_size, self._sum_over_ranks)
        self.meter.own_work.start(reading, len(batches))
        self.remember(batches, divisor)
        return batches, divisor

    def _sum_over_ranks(self, count: Tensor) -> Tensor:
        return self.accelerator.reduce(count.to(self.args.device), reduction="sum")

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """`micro_batch_loss`, counted in the meter while training."""
        loss, divisor = self.micro_batch_loss(model, inputs, num_items_in_batch), num_items_in_batch
        # Not model.training: DeepSpeed's engine says that it trains while it evaluates.
        if torch.is_grad_enabled():
            self.in_backward = True
            self.meter.own_work.forward_done()
            self.meter.add(loss * divisor, supervised_tokens(inputs["labels"]), real_tokens(inputs))
        return (loss, None) if return_outputs else loss

    def micro_batch_loss(self, model: Any, inputs: dict[str, Tensor], divisor: Tensor) -> Tensor:
        """Summed token losses of a micro-batch / divisor; TRL's per-batch metrics, which wait for the device, are left out."""
        if not self.model_divides:
            logits = model(
                **{name: value for name, value in inputs.items() if name != "labels"}, use_cache=False
            ).logits
            # The model's forward pass is over, and with it DDP's preparations to exchange gradients.
            self.in_backward = True
            return logits_to_step_loss(logits, inputs["labels"], divisor)
        if self.runtime.backend == "unsloth":
            inputs = dict(inputs)
            positions = inputs.pop("supervised_positions", None)
            # Unsloth's own compute_loss prepares inputs for some models and hands the divisor to its fused loss.
            with self.head.at(positions) if self.head else nullcontext():
                return super().compute_loss(model, inputs, num_items_in_batch=divisor)
        return self._transformers_loss(model, inputs, divisor)

    def _transformers_loss(self, model: Any, inputs: dict[str, Tensor], divisor: Tensor) -> Tensor:
        extra: dict[str, Any] = {"use_cache": False, "num_items_in_batch": divisor}
        if self.fused_head:
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
        return EvalLoopOutput(None, None, metrics, num_samples=len(dataloader.dataset) - 1)  # type: ignore[arg-type]

    # ---- reports: upstream logs the mean of step means ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Every rank calls this at the same steps; the losses logged are exact token means."""
        if "loss" in logs:
            logs.update(self._collect())
            self._name_stragglers()
        if "train_loss" in logs:
            self._collect()
            logs["train_loss"] = self.totals.train_loss or 0.0
            self._count_steps_taken(logs)
        logger.info("step %s %s", self.state.global_step, logs)
        Trainer.log(self, logs, start_time)

    def _count_steps_taken(self, logs: dict[str, float]) -> None:
        """Upstream's rates are of all planned steps, also those before a resume and after a stop."""
        taken = self.state.global_step - (self.start.manifest.step if self.start else 0)
        for name in ("train_samples_per_second", "train_steps_per_second"):
            if name in logs:
                logs[name] = round(logs[name] * taken / self.state.max_steps, 3)

    def _name_stragglers(self) -> None:
        pace = self.meter.pace
        if pace is None:
            return
        logger.info("own seconds a step of each rank: %s", " ".join(f"{seconds:.4f}" for seconds in pace[0]))
        for rank in self.stragglers.observe(*pace):
            if self.runtime.ranks.is_main:
                place = self.runtime.locations[rank]
                print(describe_straggler(place, rank, pace, self.stragglers.intervals), flush=True)

    def _collect(self) -> dict[str, float]:
        self.meter.totals, self.meter.level = self.totals, self.recompute.level
        metrics = self.meter.collect()
        self.follow(self.meter.levels)
        return metrics

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.peak_before_steps = max(self.peak_before_steps, peak_memory_bytes(self.runtime.device_type))
        if self.runtime.device_type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return prepared

    def run(self, start: Start | None) -> dict[str, Any] | None:
        """Train to the end, evaluate, and return the run's summary; None if the run was stopped before."""
        if start and self.runtime.device_type == "cpu":
            make_cpu_checkpoints_readable()
        self.start = start
        if start and start.of_this_run:
            self.checkpoints.last = start.folder
        self.stop.kept = lambda: self.checkpoints.last is not None
        self.stop.arm(self.runtime, control_timeout(self.settings))
        began = time.perf_counter()
        self.train(resume_from_checkpoint=str(start.folder) if start else None)
        self.runtime.progress.enter("finishing")
        seconds = time.perf_counter() - began
        if self.stop.agreed and self.state.global_step < self.state.max_steps:
            return None
        self.stop.finishing = True
        summary = summarize(
            self.settings,
            self.runtime,
            self.plan,
            self.train_rows,
            self.recompute.kind,
            self.totals,
            self.state.global_step,
            self.peak_before_steps,
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
        if self.args.load_best_model_at_end:
            # It need not be the model of the last step.
            return self.evaluate()["eval_loss"]
        for entry in reversed(self.state.log_history):
            if "eval_loss" in entry and entry.get("step") == self.state.global_step:
                return entry["eval_loss"]
        return self.evaluate()["eval_loss"]
