"""Hold the prepared rows of a run, and the plan of its steps."""

from dataclasses import dataclass

from unsloth_ddp.data.dataset import TokenizedRows
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.packing import PackingDecision


@dataclass(frozen=True)
class TrainingData:
    """Training and evaluation rows, the batch plan that they fill, and whether and why they are packed."""

    train: TokenizedRows
    evaluation: TokenizedRows | None
    plan: BatchPlan
    packing: PackingDecision
