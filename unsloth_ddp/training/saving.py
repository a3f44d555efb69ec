"""Make SFTTrainer save complete checkpoints, and resume with the steps that an uninterrupted run would take.

Each method below replaces one step of Transformers' saving or resuming and says what upstream does there instead.
Transformers 5.17 offers no callback at these places; tests check the signatures of the private methods.
"""

import functools
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin, ParallelismConfig
from peft import PeftModel
from torch.distributed.fsdp import FSDPModule
from transformers import EarlyStoppingCallback, Trainer, set_seed
from transformers.trainer_utils import IntervalStrategy
from transformers.training_args import ParallelMode
from trl import SFTTrainer

from unsloth_ddp.checkpoints import manifest
from unsloth_ddp.checkpoints.host_copy import HostCopies, has_room_for, tensor_bytes
from unsloth_ddp.checkpoints.manifest import STEP_FOLDER, is_whole
from unsloth_ddp.checkpoints.resume_point import ResumePoint
from unsloth_ddp.checkpoints.sharded_state import has_shards
from unsloth_ddp.checkpoints.writer import Checkpoints
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.distributed.drift import REPLICATED, DriftCheck
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.adapter.weights import load_weights
from unsloth_ddp.training.broken_weights import check_weights
from unsloth_ddp.training.callbacks import SavedTotals
from unsloth_ddp.training.row_feed import RowFeed
from unsloth_ddp.training.sharded_saving import ShardedSaving, saved_weights, write_weights
from unsloth_ddp.training.shown.meter import Meter, OwnWorkTimer
from unsloth_ddp.training.step.deepspeed_precision import (
    gather_fp32_weights,
    name_fp32_in_config,
    replace_weights,
    tie_again,
)
from unsloth_ddp.training.tasks.task import Task
from unsloth_ddp.utils.redaction import printable
from unsloth_ddp.utils.units import counted, shown_bytes


class ResumableTrainer(SFTTrainer):
    """SFTTrainer that saves through `checkpoints` and resumes at the right row with the right sums.

    Args:
        feed: orders the rows.
        options: keyword arguments of SFTTrainer.__init__.
    """

    drift: DriftCheck

    def __init__(self, runtime: Runtime, checkpoints: Checkpoints, feed: RowFeed, **options: Any) -> None:
        self.runtime = runtime
        self.checkpoints = checkpoints
        self.feed = feed
        self.sharded = ShardedSaving(runtime, checkpoints)
        # The point that the run resumes from, and below the folder that a checkpoint is being written to.
        self.resume_point: ResumePoint | None = None
        self.tokens_before = 0
        self._aside: str | None = None
        # Copies of what a checkpoint holds, if it is written beside training.
        self._copies: HostCopies | None = None
        self._beside: bool | None = None
        self._trained_parts: list[list[torch.Tensor]] | None = None
        self._fp32_weights: dict[str, torch.Tensor] = {}
        self._best_until_now: tuple[float | None, int | None] = (None, None)
        self.meter: Meter
        super().__init__(**{**options, "callbacks": [SavedTotals(), *options.get("callbacks", [])]})

    def make_meter(self, task: Task) -> Meter:
        """Return the meter of this run's losses."""
        device, processes = self.args.device, self.runtime.ranks.world_size
        timed = processes > 1 and self.runtime.sharding in REPLICATED
        timer = OwnWorkTimer(device, enabled=timed)
        return Meter(self._gather_sums, processes, device, timer, self._saved.totals, task)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; with FSDP2 on the CPU too, where accelerate would not enable it."""
        super().create_accelerator_and_postprocess()
        state: Any = self.accelerator.state
        if self.runtime.copies > 1:
            # For a model that was loaded whole: accelerate splits it over this mesh.
            copies, parts = self.runtime.copies, self.runtime.parts
            state.parallelism_config = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=parts)
            state.device_mesh = state.parallelism_config.get_device_mesh(self.runtime.device_type)
        if self.runtime.sharding == "fsdp2" and not self.is_fsdp_enabled:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, FullyShardedDataParallelPlugin()
            self.is_fsdp_enabled = True

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the optimizer, and keep its list of weights if they were loaded in shards."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if isinstance(self.model, FSDPModule):
            self._trained_parts = [list(group["params"]) for group in optimizer.param_groups]
        return optimizer

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.model, FSDPModule):
            # accelerate does not wrap this model again, but would still look for layers by their class names.
            self.accelerator.state.fsdp_plugin.auto_wrap_policy = None
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self._trained_parts is not None and self.optimizer is not None:
            # accelerate restores the optimizer's weights by address, but all empty shards of a rank share one address.
            for group, parts in zip(self.optimizer.param_groups, self._trained_parts, strict=True):
                group["params"] = parts
        return prepared

    @property
    def plan(self) -> BatchPlan:
        """The batch plan that the trainer follows now."""
        return BatchPlan(
            self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps, self.runtime.ranks.world_size
        )

    @property
    def _saved(self) -> SavedTotals:
        # Looked up each time: resuming replaces the callback by a new one.
        return next(c for c in self.callback_handler.callbacks if isinstance(c, SavedTotals))

    def _gather_sums(self, sums: torch.Tensor) -> torch.Tensor:
        return self.accelerator.gather(sums.unsqueeze(0))

    # ---- checkpoints: upstream writes in place, and deletes old ones before the new one is complete ----

    def check_weights(self) -> None:
        """End the run if a trained weight is not finite or differs between ranks; all ranks call this at the same step.

        Raises:
            RunError: it is.
        """
        assert self.model is not None
        # The error names the last complete checkpoint.
        self.settle()
        check_weights(self.model, self.runtime, self.state.global_step, self.checkpoints.last)
        self.drift.check(self.state.global_step)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.check_weights()
        saved = self._saved
        saved.pending, saved.stream = self.meter.pending(), self.feed.position()
        with self.meter.paused():
            self._save_whole_checkpoint(model, trial)

    def save_interrupted(self) -> None:
        """Save the step whose evaluation was interrupted, unless it is saved; every rank calls this after training."""
        self.settle()
        last = self.checkpoints.last
        if last is None or last.name != f"checkpoint-{self.state.global_step}":
            # The same control flags as after a finished evaluation.
            self.control.should_evaluate = False
            self._save_checkpoint(self.model_wrapped, None)

    def settle(self) -> None:
        """Wait for the checkpoint that is being written, if there is one; every rank calls this at the same point."""
        with self.meter.paused():
            self.checkpoints.settle()

    def _save_whole_checkpoint(self, model: Any, trial: Any) -> None:
        self.checkpoints.settle()
        step, best_before, best_until_now = (
            self.state.global_step,
            self.state.best_model_checkpoint,
            self._best_until_now,
        )

        def write(aside: Path) -> None:
            self._aside = str(aside)
            try:
                # Transformers' method, because TRL's also writes a model card into every checkpoint. A failure is kept
                # for later, because the other ranks wait in collectives below.
                self.checkpoints.attempt(lambda: Trainer._save_checkpoint(self, model, trial))
            finally:
                self._aside = None
                # Upstream has set it to the temporary folder.
                self.state.best_model_checkpoint = best_before
            if self.args.should_save:
                self.checkpoints.attempt(lambda: self.meter.task.save(aside / f"checkpoint-{step}"))
            self._name_best_checkpoint(written=step)
            if self.args.should_save and self.state.best_model_checkpoint:
                self.state.save_to_json(str(aside / f"checkpoint-{step}" / "trainer_state.json"))

        def undo() -> None:
            self.state.best_model_checkpoint = best_before
            if self.state.best_global_step == step:
                # The best checkpoint that is on the disk.
                self.state.best_metric, self.state.best_global_step = best_until_now

        beside = self._is_written_beside()
        with self.runtime.progress.doing("saving"):
            self.checkpoints.save(step, write, self._best_step, undo)
            if not beside:
                self.checkpoints.settle()

    def _is_written_beside(self) -> bool:
        """Return whether checkpoints are written while training continues; decided at the first, on all ranks alike."""
        if self._beside is None:
            self._beside = self.runtime.sharding == "none" and self.runtime.broadcast_from_main(
                self._has_room_for_copies
            )
            self._copies = HostCopies() if self._beside else None
        return self._beside

    def _has_room_for_copies(self) -> bool:
        assert self.optimizer is not None
        size = tensor_bytes([saved_weights(self._bare_model), self.optimizer.state_dict()])
        fits = has_room_for(size)
        if not fits:
            print(
                "Training waits while a checkpoint is written, because host memory has no room for a copy of "
                f"{shown_bytes(size)}.",
                flush=True,
            )
        return fits

    @property
    def _bare_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _get_output_dir(self, trial: Any) -> str:
        return self._aside or super()._get_output_dir(trial=trial)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        # If the best checkpoint so far could not be written, this one is compared with the one before.
        self.settle()
        self._best_until_now = self.state.best_metric, self.state.best_global_step
        return super()._determine_best_metric(metrics=metrics, trial=trial)

    def _name_best_checkpoint(self, written: int | None = None) -> None:
        """Set best_model_checkpoint to the best step's folder, existing or being written (`written`); else keep it.

        Upstream looks for it in the folder that it writes to, on each node's own disk, and only when it saves. It
        misses a checkpoint that was evaluated after it was saved.
        """
        step, previous = self.state.best_global_step, self.state.best_model_checkpoint
        name = f"checkpoint-{step}"

        def find() -> str | None:
            own_checkpoint, first = self.checkpoints.folder / name, self.resume_point and self.resume_point.folder
            if step and (step == written or is_whole(own_checkpoint)):
                return str(own_checkpoint)
            return str(first) if first and first.name == name else self._known_checkpoint(previous)

        self.state.best_model_checkpoint = self.runtime.broadcast_from_main(find)

    def _known_checkpoint(self, named: Any) -> str | None:
        """Return the best checkpoint that a resumed state names, if it is valid; an edited state may name anything."""
        if named is None:
            return None
        folder, problem = Path(str(named)), "not a checkpoint"
        if STEP_FOLDER.fullmatch(folder.name) and is_whole(folder):
            resumed, best_manifest = self.resume_point, manifest.read_manifest(folder)
            if resumed is None or not manifest.compare_runs(best_manifest.run, resumed.manifest.run).refused:
                return str(named)
            problem = "of another run"
        print(
            f"The best checkpoint that the resumed state names, {printable(str(named))}, is {problem}; it is not used."
        )
        return None

    def _best_step(self) -> int | None:
        best = self.state.best_model_checkpoint
        return int(Path(best).name.rpartition("-")[2]) if best else None

    # A failure to write one part must not skip the next, because the other ranks wait for this rank there.

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the adapter or model in the main process; every rank calls this."""
        folder = Path(output_dir or str(self.args.output_dir))
        if self.is_fsdp_enabled:
            self.sharded.save_model(
                self._bare_model,
                folder,
                lambda state_dict: self._save(str(folder), state_dict),
                checkpoint=self._aside is not None,
            )
        elif self._aside is None:
            self._fp32_weights = self._gather_fp32_weights()
            super().save_model(output_dir=output_dir, _internal_call=_internal_call)
            self._fp32_weights = {}
        elif self.is_deepspeed_enabled:
            self.checkpoints.attempt(
                lambda: super(ResumableTrainer, self).save_model(output_dir=output_dir, _internal_call=_internal_call)
            )
        elif self.args.should_save:
            self.checkpoints.attempt(lambda: self._leave_weights(folder))

    def _leave_weights(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        model = self._bare_model
        weights = self._copied(saved_weights(model))
        self.checkpoints.later(
            lambda: write_weights(model, weights, folder, lambda state_dict: self._save(str(folder), state_dict))
        )

    def _leave_optimizer(self, path: Path) -> None:
        assert self.optimizer is not None
        state = self._copied({"optimizer": self.optimizer.state_dict()})["optimizer"]
        self.checkpoints.later(lambda: torch.save(state, path))

    def _copied(self, values: dict[str, Any]) -> dict[str, Any]:
        return self._copies.of(values) if self._copies else values

    def _gather_fp32_weights(self) -> dict[str, torch.Tensor]:
        """Return the fp32 weights of DeepSpeed's optimizers, in the main process; upstream saves 16-bit copies."""
        if not self.is_deepspeed_enabled or self.runtime.precision == "fp32":
            return {}
        model = self.accelerator.unwrap_model(self.model)
        return gather_fp32_weights(model.named_parameters(), keep=self.args.should_save)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is not None and self.is_deepspeed_enabled:
            model = self.accelerator.unwrap_model(self.model)
            parameters = dict(model.named_parameters(remove_duplicate=False))
            tie_again(state_dict, parameters)
            replace_weights(state_dict, parameters, self._fp32_weights)
        super()._save(output_dir=output_dir, state_dict=state_dict)
        if self._fp32_weights:
            name_fp32_in_config(Path(output_dir or str(self.args.output_dir)))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.is_deepspeed_enabled:
            with self.checkpoints.every_write_attempted():
                self.checkpoints.attempt(
                    lambda: super(ResumableTrainer, self)._save_optimizer_and_scheduler(output_dir=output_dir)
                )
            return
        assert self.optimizer is not None and self.lr_scheduler is not None
        if self.is_fsdp_enabled:
            self.sharded.save_optimizer(Path(output_dir), self.model, self._bare_optimizer)
        elif self.args.should_save:
            self.checkpoints.attempt(lambda: self._leave_optimizer(Path(output_dir, "optimizer.pt")))
        if self.args.should_save:
            schedule = self.lr_scheduler.state_dict()
            self.checkpoints.attempt(lambda: torch.save(schedule, Path(output_dir, "scheduler.pt")))

    @property
    def _bare_optimizer(self) -> torch.optim.Optimizer:
        # accelerate wraps it.
        return getattr(self.optimizer, "optimizer", None) or self.optimizer  # type: ignore[return-value]

    def _save_scaler(self, output_dir: str) -> None:
        self.checkpoints.attempt(lambda: super(ResumableTrainer, self)._save_scaler(output_dir=output_dir))

    def _save_rng_state(self, output_dir: str) -> None:
        if self.runtime.sharding != "none":
            self.checkpoints.attempt(lambda: super(ResumableTrainer, self)._save_rng_state(output_dir=output_dir))
            return
        # Upstream's other ranks write their files themselves, which other nodes may do to a disk of their own.
        mine: list[bytes] = []
        self.checkpoints.attempt(lambda: mine.append(self._random_states()))
        states = self.runtime.gather(b"".join(mine))
        if self.args.should_save:
            for rank, state in enumerate(states):
                name = f"rng_state_{rank}.pth" if len(states) > 1 else "rng_state.pth"
                self.checkpoints.attempt(functools.partial(Path(output_dir, name).write_bytes, state))

    def _random_states(self) -> bytes:
        """Return what upstream writes of this rank's random numbers."""
        states: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.random.get_rng_state(),
        }
        if torch.cuda.is_available():
            every = self.args.parallel_mode == ParallelMode.DISTRIBUTED
            states["cuda"] = torch.cuda.get_rng_state_all() if every else torch.cuda.get_rng_state()
        file = io.BytesIO()
        torch.save(states, file)
        return file.getvalue()

    # ---- resuming ----

    # Upstream looks for the file names of its own FSDP checkpoints, which gather all weights on rank 0, and only warns
    # if an adapter's file does not fit the model.

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        folder = Path(resume_from_checkpoint)
        if has_shards(folder):
            self.sharded.load_weights(folder, self.model if model is None else model)
        elif isinstance(self.model, PeftModel) and not self.is_deepspeed_enabled:
            load_weights(self.model, folder, str(self.model.config.name_or_path))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint=resume_from_checkpoint, model=model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not has_shards(Path(checkpoint)):
            super()._load_optimizer_and_scheduler(checkpoint=checkpoint)
            return
        self.sharded.load_optimizer(Path(checkpoint), self.model, self._bare_optimizer)
        assert self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint, "scheduler.pt"), weights_only=True))

    def _load_callback_state(self) -> None:
        super()._load_callback_state()
        # Recompute the intervals: those in the checkpoint would override changed settings.
        self.state.compute_steps(self.args, self.state.max_steps)
        saved = self._saved
        self.tokens_before = self.meter.resume(saved.totals, saved.pending, self.runtime.ranks.rank)
        self.feed.resume(self.state.global_step, saved.stream)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # A run killed after its last step has nothing left to train; upstream would take one more step.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        if kwargs["resume_from_checkpoint"] is not None and kwargs["epoch"] == kwargs["epochs_trained"]:
            if self._evaluation_is_due():
                self._determine_best_metric(self._evaluate(None, None), None)
            self._name_best_checkpoint()
        if self.patience_used_up:
            self.control.should_training_stop = True
            return
        self.feed.begin_epoch(kwargs["epoch"])
        super()._run_epoch(*args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        ranks, point = self.runtime.ranks, self.resume_point
        if point is not None and point.manifest.run.get("world_size") != ranks.world_size:
            # The saved states belong to another number of ranks. A seed from step and rank avoids repeating the random
            # numbers of the first steps.
            set_seed((self.args.seed + 1_000_003 * self.state.global_step + ranks.rank) % 2**32)
        else:
            super()._load_rng_state(checkpoint=checkpoint)

    def _evaluation_is_due(self) -> bool:
        """Return whether the run ended between a step and the evaluation that follows it."""
        step, strategy = self.state.global_step, self.args.eval_strategy
        if any("eval_loss" in entry and entry.get("step") == step for entry in self.state.log_history):
            return False
        if strategy == IntervalStrategy.EPOCH:
            return self.feed.ends_epoch(step, self.plan) or step >= self.state.max_steps
        return strategy == IntervalStrategy.STEPS and step % self.state.eval_steps == 0

    @property
    def patience_used_up(self) -> int:
        """Return early_stopping_patience if the evaluation loss has not fallen for that many evaluations, else 0."""
        callbacks = [each for each in self.callback_handler.callbacks if isinstance(each, EarlyStoppingCallback)]
        worse = (each for each in callbacks if each.early_stopping_patience_counter >= each.early_stopping_patience)
        return next((each.early_stopping_patience for each in worse), 0)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.settle()
        if (patience := self.patience_used_up) and self.runtime.ranks.is_main:
            print(
                f"Stopped at step {self.state.global_step} of {self.state.max_steps}: the evaluation loss has not "
                f"fallen for "
                f"{counted(patience, 'evaluation')}.",
                flush=True,
            )
        if self.state.global_step >= self.state.max_steps and self._evaluation_is_due():
            self._determine_best_metric(self._evaluate(None, None), None)
        self._name_best_checkpoint()
        return super()._finalize_training(*args, **kwargs)

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        if self.runtime.ranks.is_main:
            print(
                f"The result has the weights of {best.name}, the checkpoint with the lowest evaluation loss.",
                flush=True,
            )
        if has_shards(best):
            self.sharded.load_weights(best, self.model)
            return
        super()._load_best_model()
        if not self.checkpoints.shared:
            # The other nodes cannot read the checkpoint.
            for parameter in self.accelerator.unwrap_model(self.model).parameters():
                if parameter.requires_grad:
                    torch.distributed.broadcast(parameter.data, src=0)
