"""Share what the tasks that compare answers have in common: log-probabilities of whole answers, and a reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.training.tasks.log_probabilities import AnswerLogProbabilities
from unsloth_ddp.training.tasks.reference import Reference, check_same
from unsloth_ddp.training.tasks.task import Task


@dataclass(frozen=True, eq=False, kw_only=True)
class AnswerTask(Task):
    """Compare whole answers.

    Args:
        log_probabilities: of the answers under a model.
        reference: None for losses without one.
    """

    log_probabilities: AnswerLogProbabilities
    reference: Reference | None

    # Only the logits of supervised tokens are computed.
    head_chooses = True

    def begin(self, runner: MicroBatchRunner, runtime: Runtime, data: TrainingData, checkpoint: Path | None) -> None:
        """Prepare the reference, and refuse a model that should equal it before step 1 and differs."""
        if self.reference is None:
            return
        self.reference.prepare(runner, runtime, data, checkpoint)
        if checkpoint is None and self.reference.is_start:
            check_same(self.log_probabilities, self.reference, runner, runtime, data)

    def save(self, folder: Path) -> None:
        """Write the reference, if it is precomputed."""
        if self.reference is not None:
            self.reference.save(folder)
