"""Choose the rung of the ladder that a run begins with, by trials on every rank."""

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

import torch

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.sharding import shards_weights
from unsloth_ddp.model.forward.compile_options import leave_layers_uncompiled
from unsloth_ddp.model.forward.gradient_checkpointing import KINDS
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.sizing.graphs import (
    kind_obstacle,
    may_compile_layers,
    micro_batches_of_run,
    refuse,
    too_short_to_compile,
    why_not_captured,
    why_too_short,
)
from unsloth_ddp.sizing.ladder import LadderFacts, Rung, StepDecision, facts_of, ladder
from unsloth_ddp.sizing.micro_batch import with_micro_batch
from unsloth_ddp.sizing.sharded_trial import ShardedEstimates
from unsloth_ddp.sizing.trial import MemoryTrials, bytes_added_by_steps, forget_free_memory, release
from unsloth_ddp.training.step.capture_check import obstacle_to_capture
from unsloth_ddp.training.step.capture_trial import CaptureTrial, seconds_of_pass, typical_examples
from unsloth_ddp.training.step.captured_step import use_capture_stream, use_default_stream
from unsloth_ddp.training.step.compiled_layers import compile_layers, kinds_of_layers, leave_uncompiled
from unsloth_ddp.training.step.optimizer_step import OptimizerStep
from unsloth_ddp.utils.known_errors import is_out_of_memory

logger = logging.getLogger("unsloth_ddp")
SAME_GIVEN = "a trial gave the same loss and gradients"


@dataclass
class FirstRung:
    """Choose how the micro-batches of a run are computed, and prepare the step for it; all ranks call it alike.

    Args:
        step: of the trainer; its task and its rung are set.
        runner: computes a micro-batch with the step's task as the backend does.
    """

    settings: Settings
    runtime: Runtime
    data: TrainingData
    step: OptimizerStep
    runner: MicroBatchRunner

    def __post_init__(self) -> None:
        exchange = self.step.exchange
        buffers = exchange.buffers if exchange is not None else None
        settings, data, collate = self.settings, self.data, self.step.collate
        self.obstacle = obstacle_to_capture(settings, self.runtime, data, self.runner.model)
        if self.obstacle is None and settings.cuda_graphs != "off":
            # All that is computed before a capture has to be on its stream.
            use_capture_stream(self.runner.device)
        timed = settings.cuda_graphs == "auto" and self.runner.device.type == "cuda"
        self.capture = CaptureTrial(settings, data, data.plan, collate, self.runner, buffers, timed)
        trials = MemoryTrials if self.runtime.sharding == "none" else ShardedEstimates
        ddp_sends = self.runtime.ranks.world_size > 1 and exchange is None
        added = bytes_added_by_steps(self.runner.model, settings.optim, ddp_sends=ddp_sends)
        self.trials = trials(
            settings, self.runtime, data, self.step.checkpointing, self.runner, added, self.capture.trial_pass
        )

    def choose(self, resumed: dict[str, Any], last: Rung | None = None) -> StepDecision:
        """Choose the first rung that fits, and let the step begin with it.

        Args:
            resumed: identity of the run that this one resumes, empty without one. On the same number and type of GPUs
                its rung is taken again, so that results stay bit-identical.
            last: a rung that ran out of memory when this job ran before, if any; the run begins below it.

        Raises:
            UserError: no rung fits, or --cuda_graphs on is not possible.
        """
        # The ranks have to try the same rungs, but may have different GPUs.
        resumed = self.runtime.broadcast_from_main(lambda: resumed if self._same_gpus(resumed) else {})
        if self.runtime.backend == "transformers" and self.runtime.device_type == "cuda" and self._passes_are_local():
            # Before memory is tried: without all logits at once a pass takes less.
            self.step.use_task(self.step.task.tuned(self.runner, self.data.train.examples, rows=1))
        why_not = self._why_not_captured(resumed)
        task = self.step.task
        while True:
            refuse(self.settings, why_not)
            facts = self._facts(captured=why_not is None)
            rungs = rungs_from(ladder(facts), facts, resumed, last)
            rung, rung_reason = self._choose(rungs, resumed, last)
            if not rung.captured:
                refuse(self.settings, "no captured micro-batch fits into the memory of a GPU")
            plan = with_micro_batch(self.data.plan, rung.rows)
            if self.runtime.backend == "unsloth" and too_short_to_compile(self.settings, self.data.train, plan):
                leave_layers_uncompiled()
            self._tune_task(rung)
            if not rung.captured:
                break
            with self.runtime.progress.timing("capture"):
                captured, obstacle = self.capture.capture(rung)
            why_not = next(
                (rank_obstacle for rank_obstacle in self.runtime.gather(obstacle) if rank_obstacle is not None), None
            )
            if why_not is None:
                self.capture.end(captured)
                kernel = ", with FlashAttention 4" if captured and captured.forward.flash_attention_4 else ""
                # Later rungs draw what this one draws, also where the settings do not say so.
                kinds = [kind for kind in facts.captured_kinds if not kind_obstacle(kind, random=self.capture.random)]
                facts = dataclasses.replace(facts, captured_kinds=tuple(kinds))
                return self._begin(StepDecision(rung, rung_reason, SAME_GIVEN + kernel), captured, facts)
            # Memory was tried with passes that are not captured after all.
            self.step.use_task(task)
        self.capture.end(None)
        if why_not is not None and self.trials.trials and any(tried.captured for tried in self.trials.trials):
            # Unsloth drops compiled code once, and did so before these trials.
            torch.compiler.reset()
        graphs = why_not or "no captured micro-batch fits into the memory of a GPU"
        if self._may_compile_layers(rung, graphs):
            graphs = f"{graphs}; {self._compile_layers(rung)}"
        return self._begin(StepDecision(rung, rung_reason, graphs), None, facts)

    def _begin(self, decision: StepDecision, captured: Any, facts: LadderFacts) -> StepDecision:
        if captured is None:
            use_default_stream(self.runner.device)
        self.step.begin_with(decision.rung, captured, facts)
        forget_free_memory()
        if self.runtime.device_type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return decision

    def _passes_are_local(self) -> bool:
        """Return whether a pass may call parts of the model by themselves: without sharding and DDP."""
        alone = self.runtime.ranks.world_size == 1 or self.step.exchange is not None
        return alone and self.runtime.sharding == "none"

    def _same_gpus(self, resumed: dict[str, Any]) -> bool:
        current_gpus = (self.runtime.ranks.world_size, self.runtime.device_name)
        return (resumed.get("world_size"), resumed.get("device")) == current_gpus

    def _facts(self, *, captured: bool) -> LadderFacts:
        settings, data = self.settings, self.data
        return facts_of(settings, data.train, data.plan, self.step.checkpointing.kinds, captured=captured)

    def _why_not_captured(self, resumed: dict[str, Any]) -> str | None:
        """Return why no captured pass is tried, in a few words; None if the trials decide."""
        settings, data = self.settings, self.data
        if self.obstacle is None and settings.cuda_graphs == "auto" and "cuda_graphs" in resumed:
            return None if resumed["cuda_graphs"] == "on" else "the run that this one resumes did not use them"
        why_not = why_not_captured(settings, self.obstacle, data.train, data.plan)
        if why_not is not None or settings.cuda_graphs == "on":
            return why_not
        with self.runtime.progress.timing("search"):
            rows = self._facts(captured=True).captured_sizes[-1]
            seconds = max(self.runtime.gather(self._seconds(rows)))
        passes = micro_batches_of_run(settings, data.train, with_micro_batch(data.plan, rows))
        return why_too_short(seconds, passes)

    def _seconds(self, rows: int) -> float:
        """Return the seconds that the backend takes for a typical micro-batch; infinity if it does not fit."""
        self.step.checkpointing.use(self.step.checkpointing.kinds[0])
        try:
            return seconds_of_pass(self.runner, self.runner.batch_of(typical_examples(self.data.train, rows)))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        finally:
            release()
        return float("inf")

    def _choose(self, rungs: list[Rung], resumed: dict[str, Any], last: Rung | None) -> tuple[Rung, str]:
        if last is not None:
            return rungs[0], f"memory ran out with {last}"
        if self.runtime.device_type == "cpu":
            return min(rungs, key=lambda rung: (KINDS.index(rung.kind), rung.rows)), "the default on a CPU"
        if len(rungs) == 1 and self.settings.gradient_checkpointing != "auto":
            return rungs[0], "as set"
        if resumed and self.runtime.sharding != "none":
            return rungs[0], "as before the run was resumed"
        with self.runtime.progress.timing("search"):
            return self.trials.choose(rungs)

    def _tune_task(self, rung: Rung) -> None:
        """Use the form of the task that computes the head of supervised tokens only, where it gives the same loss.

        The trials allow for rows with all tokens supervised, so they use the task as it was. Sharded weights cannot be
        used before training begins.
        """
        if self.runtime.backend == "unsloth" and not shards_weights(self.runtime.sharding):
            self.step.checkpointing.use(rung.kind)
            self.step.use_task(self.step.task.tuned(self.runner, self.data.train.examples, rung.rows))

    def _may_compile_layers(self, rung: Rung, why_not: str) -> bool:
        return may_compile_layers(
            self.settings,
            self.data.train,
            with_micro_batch(self.data.plan, rung.rows),
            why_not,
            precision=self.runtime.precision,
            sharding=self.runtime.sharding,
            kinds=kinds_of_layers(self.runner.model),
        )

    def _compile_layers(self, rung: Rung) -> str:
        """Compile the layers in place of capturing them, if results are the same on all ranks; return the outcome."""
        rows = [self.data.train.examples[index] for index in range(min(rung.rows, self.data.train.units))]
        obstacle = compile_layers(self.runner, self.runner.batch_of(rows))
        obstacle = next(
            (rank_obstacle for rank_obstacle in self.runtime.gather(obstacle) if rank_obstacle is not None), None
        )
        if obstacle is None:
            return "the layers are compiled instead"
        leave_uncompiled(self.runner.model)
        return f"nor are the layers compiled: {obstacle}"


def rungs_from(rungs: list[Rung], facts: LadderFacts, resumed: dict[str, Any], last: Rung | None) -> list[Rung]:
    """Return the rungs that a run may begin with: from the resumed rung down, or below one that ran out of memory.

    Args:
        rungs: all rungs of the run.
        resumed: identity of a run on the same GPUs; empty without one.
    """
    if last is not None:
        lower = [rung for rung in rungs if rung != last and _is_lower(rung, last)]
        return lower or rungs[-1:]
    kind, rows = resumed.get("gradient_checkpointing"), resumed.get("per_device_train_batch_size")
    if kind not in facts.kinds or rows not in facts.sizes:
        return rungs
    passes = resumed.get("passes", 1)
    if passes > 1:
        # Such a run began with graphs, but no longer had them.
        return [Rung(False, kind, rows, passes)]
    began = Rung(resumed.get("cuda_graphs") == "on", kind, rows)
    return [rung for rung in rungs if rung == began or _is_lower(rung, began)] or rungs


def _is_lower(rung: Rung, other: Rung) -> bool:
    """Return whether a rung recomputes as much as another one or more, with as many rows or fewer."""
    more = KINDS.index(rung.kind) - KINDS.index(other.kind)
    return rung.captured <= other.captured and more >= 0 and rung.rows <= other.rows and (more > 0 or rung != other)
