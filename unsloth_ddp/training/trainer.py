"""Wire loss averaging, row order, retries and metrics into Transformers' training loop, in one SFTTrainer subclass.

Import this after the backend: with Unsloth imported, `trl.SFTTrainer` is Unsloth's own version of it. Each method
below replaces one step of the loop and says what upstream does there instead.
"""

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Trainer
from transformers.integrations import get_reporting_integration_callbacks
from transformers.trainer_utils import EvalLoopOutput

from unsloth_ddp.checkpoints.identity import batch_identity
from unsloth_ddp.checkpoints.memory_note import note_rung, noted_rung
from unsloth_ddp.checkpoints.resume_point import ResumePoint, make_cpu_checkpoints_readable
from unsloth_ddp.checkpoints.writer import Checkpoints
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan, rows_at_once
from unsloth_ddp.data.order.collate import Collate, PadRight
from unsloth_ddp.data.order.split import ROWS, KeepRows
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.drift import DriftCheck
from unsloth_ddp.distributed.runtime import Runtime, control_timeout
from unsloth_ddp.distributed.sharding import shards_weights
from unsloth_ddp.distributed.signals import EvaluationInterrupted, StopRequest
from unsloth_ddp.model.files.stored_weights import complete_result
from unsloth_ddp.model.forward.gradient_checkpointing import GradientCheckpointing
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.loading.sharded_load import mixed_precision_policy
from unsloth_ddp.model.modules import evaluation_mode, kept_random_numbers, replaced
from unsloth_ddp.model.packing.attention import flatten_for, prepare_for_packs
from unsloth_ddp.model.towers import tokens_a_pixel, trains_beside_text
from unsloth_ddp.sizing.ladder import OutOfMemory, StepDecision
from unsloth_ddp.sizing.micro_batch import with_micro_batch
from unsloth_ddp.sizing.trial import release
from unsloth_ddp.training.callbacks import (
    CompareWeights,
    CountCompilations,
    CountOverflows,
    LogSteps,
    NameUntrained,
    ReportProgress,
    StopTogether,
)
from unsloth_ddp.training.row_feed import RowFeed, image_workers
from unsloth_ddp.training.saving import ResumableTrainer
from unsloth_ddp.training.sft_config import check_precision
from unsloth_ddp.training.shown.display import ShowTraining, choose_display, shown_callbacks
from unsloth_ddp.training.shown.log_metrics import LogMetrics
from unsloth_ddp.training.shown.meter import peak_memory_bytes, real_tokens
from unsloth_ddp.training.step.deepspeed_precision import reduce_in_fp32
from unsloth_ddp.training.step.first_rung import FirstRung
from unsloth_ddp.training.step.gradient_exchange import make_exchange
from unsloth_ddp.training.step.optimizer_step import OptimizerStep
from unsloth_ddp.training.step.zero3_release import release_after_each_block
from unsloth_ddp.training.tasks.choose import make_task
from unsloth_ddp.training.tasks.task import Task

logger = logging.getLogger("unsloth_ddp")


class DDPTrainer(ResumableTrainer):
    """SFTTrainer whose loss is the token mean over all ranks and accumulation steps, independent of the layout.

    Args:
        config: TRL's SFTConfig (see sft_config.make_config).
        stop: stop requests, handled at the end of a step.
    """

    model: Any

    def __init__(
        self,
        settings: Settings,
        runtime: Runtime,
        config: Any,
        model: Any,
        tokenizer: Any,
        data: TrainingData,
        checkpoints: Checkpoints,
        stop: StopRequest,
    ) -> None:
        self.settings = settings
        self.data = data
        self.stop = stop
        self.evaluation_interrupted = False
        self.peak_before_steps = 0
        if data.train.processing is not None:
            data.train.processing.always = shards_weights(runtime.sharding) or trains_beside_text(model)
            data.train.processing.tokens_a_pixel = tokens_a_pixel(model)
            config.dataloader_num_workers = image_workers(config.dataloader_num_workers, runtime, data.train)
            # New ones in every epoch would leave the GPU without rows for over a second.
            config.dataloader_persistent_workers = config.dataloader_num_workers > 0
        if data.train.packing is not None:
            prepare_for_packs(runtime, model)
        padded = PadRight(tokenizer.pad_token_id, data.train.processing)
        flatten = dataclasses.replace(flatten_for(runtime, model, padded), prompts_once=data.packing.prompts_once)
        self.collate = Collate(padded, flatten, by_row=settings.trains_preferences)
        checkpointing = GradientCheckpointing(model, runtime, settings)
        self._use_plan(config, data.plan)
        seed = config.seed if config.data_seed is None else config.data_seed
        # TensorBoard's callback, which upstream makes below, reads where its events go: <run>/tensorboard/.
        os.environ.setdefault("TENSORBOARD_LOGGING_DIR", str(Path(config.output_dir) / "tensorboard"))
        # With 4-bit weights TRL would round adapters to bf16, which has no gradient scaler in fp16; Unsloth does not.
        with replaced(model, "is_loaded_in_4bit", False):
            super().__init__(
                runtime,
                checkpoints,
                RowFeed(settings, runtime, data.train, tokenizer, seed),
                model=model,
                args=config,
                train_dataset=data.train.dataset,
                eval_dataset=data.evaluation.dataset if data.evaluation else None,
                processing_class=tokenizer,
                data_collator=KeepRows(self.collate, rows_an_example=2 if settings.trains_preferences else 1),
                callbacks=[
                    ReportProgress(runtime.progress),
                    LogSteps(settings.logging_steps),
                    StopTogether(stop, settings.save_seconds),
                    *([EarlyStoppingCallback(patience)] if (patience := settings.early_stopping_patience) else []),
                ],
            )
        self._undo_changes_of_the_backend()
        self._set_gradient_precision()
        self.shown = ShowTraining(choose_display(lines=bool(config.disable_tqdm)), runtime.progress)
        self._set_callbacks()
        divides = bool(self.model_accepts_loss_kwargs)
        task = make_task(settings, runtime, model, data, super().compute_loss, divides=divides)
        self.collate.head_chooses = task.head_chooses
        self.meter = self.make_meter(task)
        # Upstream would divide a second time for models that do not take the divisor.
        self.model_accepts_loss_kwargs = True
        exchange = make_exchange(self.model, settings, runtime, self.args, self.accelerator.ddp_handler)
        self.step = OptimizerStep(
            task, checkpointing, self.collate, exchange, self.meter, self.args.device, self.args.world_size,
            sharded=runtime.sharding != "none",
        )  # fmt: skip
        # Computes the losses of rows outside of the training loop.
        self.runner = MicroBatchRunner(
            self.model, self.args.device, self.step.loss, self.collate, self.accelerator.autocast
        )
        self.logged = LogMetrics(model, runtime, self.meter, self.step)

    @staticmethod
    def _use_plan(config: Any, plan: BatchPlan) -> None:
        config.per_device_train_batch_size = plan.per_device
        config.gradient_accumulation_steps = plan.accumulation

    def _undo_changes_of_the_backend(self) -> None:
        """Set what Unsloth's __init__ changes in the rows and in the arguments."""
        evaluation = self.data.evaluation
        # It drops rows without supervised tokens, among them the filler row, and does not know packs.
        self.train_dataset = self.data.train.examples
        self.eval_dataset = evaluation.examples if evaluation else None
        assert self.plan == self.data.plan, "the trainer changed the batch plan"
        # It lowers a default value to the size of the micro-batch, which is not chosen yet.
        self.args.per_device_eval_batch_size = rows_at_once(
            evaluation.units if evaluation else 0,
            self.settings.per_device_eval_batch_size,
            self.runtime.ranks.world_size,
        )
        check_precision(self.args, self.settings, self.runtime)

    def _set_callbacks(self) -> None:
        trackers = tuple(get_reporting_integration_callbacks(self.args.report_to))
        upstream = self.callback_handler.callbacks
        self.callback_handler.callbacks = [*shown_callbacks(upstream, trackers), self.shown]
        self.drift = DriftCheck(self.model, self.runtime, self.settings.drift_check_steps)
        self.add_callback(CompareWeights(self.drift))
        self.add_callback(NameUntrained(self.model, self.runtime))
        self.compilations = CountCompilations()
        self.add_callback(self.compilations)
        if self.runtime.precision == "fp16":
            self.add_callback(CountOverflows(self.accelerator, speaks=self.runtime.ranks.is_main))

    def _set_gradient_precision(self) -> None:
        if self.is_fsdp_enabled and self.runtime.precision != "fp32":
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = mixed_precision_policy(self.runtime.precision)
        if self.is_deepspeed_enabled:
            reduce_in_fp32(self.accelerator.state.deepspeed_plugin.deepspeed_config)
        if self.accelerator.ddp_handler is not None:
            # Gradients are views of DDP's buckets, so they are not copied.
            self.accelerator.ddp_handler.gradient_as_bucket_view = True

    # ---- before the first step ----

    def choose_rung(self, resume: ResumePoint | None) -> StepDecision:
        """Choose how micro-batches are computed by what fits, and configure it; every rank calls this."""
        # The peak of loading, which the trials reset.
        self.peak_before_steps = peak_memory_bytes(self.runtime.device_type)
        first = FirstRung(self.settings, self.runtime, self.data, self.step, self.runner)
        decision = first.choose(
            resume.manifest.run if resume else {}, noted_rung(self.runtime, self.checkpoints.folder)
        )
        self._use_plan(self.args, with_micro_batch(self.data.plan, decision.rung.rows))
        self._train_batch_size = self.args.train_batch_size
        self.checkpoints.identity |= {**batch_identity(self.plan), **self.step.identity}
        return decision

    def _trained_runner(self) -> MicroBatchRunner:
        """Return the runner with the model as it is trained: sharded where it is."""
        model = self.model_wrapped if self.is_deepspeed_enabled or self.is_fsdp_enabled else self.model
        return dataclasses.replace(self.runner, model=model)

    # ---- rows: upstream shuffles with the global random state and repeats rows to give every rank the same number ----

    def get_train_dataloader(self) -> DataLoader:
        """Return this rank's micro-batches."""
        if not self.feed.streamed:
            return self.feed.shield_workers(super().get_train_dataloader())
        return self.feed.streamed_loader(self.plan, self.data_collator, pinned=self.args.dataloader_pin_memory)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return self.feed.train_order(self.plan)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        assert self.data.evaluation is not None
        return self.feed.eval_order(self.data.evaluation, self.args.per_device_eval_batch_size)

    # ---- loss: upstream divides by its own count and multiplies by the world size ----

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        """Return the micro-batches of one optimizer step and the divisor of their losses (see divisor.py)."""
        batches = []
        began = time.perf_counter()
        for _ in range(num_batches):
            try:
                batches.append(next(epoch_iterator))
            except StopIteration:
                break
        if not batches:
            return batches, None
        reading = self.feed.seconds_waited(time.perf_counter() - began)
        return batches, self.step.begin(batches, reading, self._trained_runner(), self._sum_over_ranks)

    def _sum_over_ranks(self, count: Tensor) -> Tensor:
        return self.accelerator.reduce(count.to(self.args.device), reduction="sum")

    def training_step(self, model: Any, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        """Compute one micro-batch of a step (see OptimizerStep)."""
        last = self.accelerator.sync_gradients
        if self.runtime.copies > 1:
            # Reduce gradients between replicas, over the slower links, once per step.
            model.set_requires_all_reduce(last)
        return self.step.micro_batch(super().training_step, model, inputs, num_items_in_batch, last=last)

    def compute_loss(
        self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the micro-batch's loss, measured."""
        loss, sums = self.step.task.measure(model, inputs, num_items_in_batch)
        self.meter.own_work.forward_done()
        self.meter.add(sums, real_tokens(inputs))
        return (loss, None) if return_outputs else loss

    # These two call Transformers directly: Unsloth's versions drop evaluation rows without supervised tokens, among
    # them the filler row, and TRL's tokenize rows again.

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader of evaluation rows, including the filler row."""
        return self.feed.shield_workers(Trainer.get_eval_dataloader(self, eval_dataset))

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Evaluate on the set given to the trainer."""
        # The loader draws a seed; restoring the state keeps dropout independent of when and how often a run evaluates.
        with kept_random_numbers(torch.device("cpu")):
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
        """Return means over the whole set with each row counted once, independent of the layout."""
        runner = self._trained_runner()
        model: Any = runner.model
        sums = torch.zeros(len(self.step.task.columns), dtype=torch.float64, device=self.args.device)
        self.callback_handler.eval_dataloader = dataloader
        with self.meter.paused(), evaluation_mode(model), torch.no_grad():
            with self.runtime.progress.doing("evaluating"):
                task = self.step.task.for_step(runner, partial(self._sum_over, dataloader))
                for inputs in dataloader:
                    sums += self._evaluate_batch(task, model, inputs)
                    self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
            of_all = self._gather_sums(sums).sum(dim=0).tolist()
        task_metrics = task.metrics(dict(zip(task.columns, of_all, strict=True)))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in task_metrics.items()}
        return EvalLoopOutput(None, None, metrics, num_samples=len(dataloader.dataset) - 1)  # type: ignore[arg-type]

    def _sum_over(self, dataloader: DataLoader, compute: Callable[[dict[str, Any]], Tensor]) -> Tensor:
        """Return the sum over all ranks of what each evaluation batch computes; a request to stop ends it too."""
        sums = []
        for inputs in dataloader:
            sums.append(self.step.within_memory(inputs, inputs.pop(ROWS), compute))
            self.runtime.progress.advance()
            self.stop.interrupt_evaluation()
        return self._sum_over_ranks(torch.stack(sums).sum(dim=0))

    def _evaluate_batch(self, task: Task, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return the sums of a batch."""

        def sums_of(batch: dict[str, Any]) -> Tensor:
            with self.compute_loss_context_manager():
                return task.measure(model, self._prepare_inputs(batch), torch.ones((), device=self.args.device))[1]

        return self.step.within_memory(inputs, inputs.pop(ROWS), sums_of)

    # ---- reports: upstream logs the mean of step means ----

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log exact means; every rank calls this at the same steps."""
        if "loss" in logs:
            logs.update(self.logged.of_interval(self.state.global_step))
        if "train_loss" in logs:
            logs.update(self.logged.of_run(self.state.global_step))
            self._count_steps_taken(logs)
        logger.info("step %s %s", self.state.global_step, logs)
        Trainer.log(self, logs, start_time)
        if "loss" in logs and not math.isfinite(logs["loss"]):
            # Check the weights first: a step that overflowed in fp16 does not change them.
            self.check_weights()

    def _count_steps_taken(self, logs: dict[str, float]) -> None:
        """Correct upstream's rates, which count all planned steps, even those before a resume and after a stop."""
        steps_taken = self.state.global_step - (self.resume_point.manifest.step if self.resume_point else 0)
        for name in ("train_samples_per_second", "train_steps_per_second"):
            if name in logs:
                logs[name] = round(logs[name] * steps_taken / self.state.max_steps, 3)

    # ---- the run ----

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self.step.exchange is not None:
            self.step.exchange.broadcast()
        if self.runtime.sharding == "zero3" and self.step.checkpointing.recomputes_reentrantly:
            release_after_each_block(self.model_wrapped)
        data = dataclasses.replace(self.data, plan=self.plan)
        checkpoint = self.resume_point.folder if self.resume_point else None
        self.step.task.begin(self._trained_runner(), self.runtime, data, checkpoint)
        self.peak_before_steps = max(self.peak_before_steps, peak_memory_bytes(self.runtime.device_type))
        if shards_weights(self.runtime.sharding):
            # Cycles may keep the whole model alive beside its shards, which would take the room of the first steps.
            release()
        if self.runtime.device_type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        return prepared

    def train_from(self, resume: ResumePoint | None) -> float:
        """Train to the end, or until the ranks stop together; return the seconds that it took."""
        if resume and self.runtime.device_type == "cpu":
            make_cpu_checkpoints_readable()
        self.resume_point = resume
        if resume and resume.of_this_run:
            self.checkpoints.resumed_from(resume.folder, resume.manifest.step)
        self.stop.begin_training(
            self.runtime, control_timeout(self.settings), lambda: self.checkpoints.last is not None
        )
        began = time.perf_counter()
        try:
            self.train(resume_from_checkpoint=str(resume.folder) if resume else None)
        except EvaluationInterrupted:
            self.evaluation_interrupted = True
            self.save_interrupted()
            self.settle()
        else:
            self.check_weights()
        finally:
            self.shown.end()
        self.runtime.progress.enter("finishing")
        return time.perf_counter() - began

    def save_without_memory(self, error: OutOfMemory) -> None:
        """Write a checkpoint of the last complete step if this process can alone, else note what ran out of memory."""
        if not error.lowest:
            # The other ranks wait in a collective of this pass, so that nothing can be repeated or saved any more.
            note_rung(self.checkpoints.folder, error.rung)
        elif self.runtime.ranks.world_size == 1:
            self.model.zero_grad()
            release()
            self.step.restore_random_numbers()
            self.save_interrupted()
            self.settle()

    @property
    def stopped(self) -> bool:
        """Return whether the ranks stopped together before the last step, or during an evaluation after it."""
        before_the_end = self.state.global_step < self.state.max_steps
        return self.evaluation_interrupted or (bool(self.stop.agreed_cause) and before_the_end)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Ranks that ran out of memory have changed it.
        self.checkpoints.identity |= self.step.identity
        super()._save_checkpoint(model=model, trial=trial)

    def write_final(self, folder: Path) -> None:
        """Write the adapter or model, the tokenizer and the log of losses into `folder`; every rank calls this."""
        self.save_model(output_dir=str(folder))
        if self.args.should_save:
            self.state.save_to_json(str(folder / "trainer_state.json"))
            complete_result(self.settings, self.accelerator.unwrap_model(self.model), folder)
