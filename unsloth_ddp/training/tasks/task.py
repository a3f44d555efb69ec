"""Say what a task defines, with what most tasks share; trainer, step, resuming and reports know no more of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner

# (micro-batch -> what it adds to a sum) -> the sum over the step and the ranks.
SumOverStep = Callable[[Callable[[dict[str, Any]], Tensor]], Tensor]


class Task:
    """Compute the losses of a kind of training data.

    The loss of an optimizer step is a mean over units, such as supervised tokens, of all ranks and micro-batches; or a
    sum of such means over different units. `units` counts them. What else a loss needs of its whole step, `for_step`
    computes.

    Attributes:
        columns: names of the sums that `measure` returns; `supervised_tokens` is one of them.
    """

    columns: ClassVar[tuple[str, ...]]

    def units(self, batch: dict[str, Any]) -> Tensor:
        """Return the number of units in a micro-batch, on its device, without waiting for the device.

        A unit is a token or a row; a row may count as a constant number of units. 0-dim, or (kinds of units,) if the
        loss is a sum of several means; all are 0 if the first is.
        """
        raise NotImplementedError

    def for_step(self, runner: MicroBatchRunner, sum_over_step: SumOverStep) -> Self:
        """Return the task that computes the losses of a step; every rank calls this before its first micro-batch.

        An evaluation is one step here. A task whose losses each need their own micro-batch only sums nothing.

        Args:
            runner: computes micro-batches with the model as it is trained (wrapped, sharded).
            sum_over_step: sums what a function computes of each micro-batch of the step, over all ranks. A micro-batch
                whose pass runs out of memory is computed in parts. Each rank has to call it as often as the others.
        """
        return self

    def loss(self, model: Any, batch: dict[str, Any], divisor: Tensor) -> Tensor:
        """Return the summed losses of the units in a micro-batch divided by `divisor` (shaped as units), 0-dim."""
        return self.measure(model, batch, divisor)[0]

    def measure(self, model: Any, batch: dict[str, Any], divisor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and the sums of the micro-batch, float64 (columns,), which do not depend on the divisor."""
        raise NotImplementedError

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return what a log line shows of sums over micro-batches, ranks and steps: `loss`, if any unit was seen."""
        raise NotImplementedError

    @property
    def described(self) -> str:
        """Return the line of the table on the loss; empty for the usual one."""
        return ""

    @property
    def head_chooses(self) -> bool:
        """Return whether a batch has to name its supervised tokens (see model/forward/supervised_head.py)."""
        return False

    def tuned(self, runner: MicroBatchRunner, examples: Any, rows: int) -> Self:
        """Return the task in the form that computes the same losses faster on this model, if there is one.

        Args:
            runner: computes the loss of this task outside of the training loop.
            examples: training rows (packs), by index.
            rows: number of rows in a micro-batch.
        """
        return self

    def begin(self, runner: MicroBatchRunner, runtime: Runtime, data: TrainingData, checkpoint: Path | None) -> None:
        """Prepare the first step with the untrained weights, or restore what `save` wrote; every rank calls this.

        Args:
            runner: computes micro-batches with the model as it is trained (wrapped, sharded).
            checkpoint: folder that the run resumes from, if any.

        Raises:
            UserError: the weights or the checkpoint do not fit the task.
        """

    def save(self, folder: Path) -> None:
        """Write into a checkpoint what `begin` needs to resume from it; the main process calls this."""
