"""Train on labelled answers with KTO, whose loss compares each answer with the divergence of a whole step.

    r = log pi(y|x) - log ref(y|x)                                               https://arxiv.org/abs/2402.01306, eq. 7
    z = max(0, mean of log pi(y'|x) - log ref(y'|x) over the mismatched rows of the step, without gradient and dropout)
    loss = desirable_weight (1 - s(beta (r - z))), or undesirable_weight (1 - s(beta (z - r)))

z is one number for all ranks and micro-batches of a step, which `for_step` computes before the first loss. TRL's z is
that of a micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.collate import MISMATCHED
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.modules import evaluation_mode
from unsloth_ddp.training.tasks.answers import AnswerTask
from unsloth_ddp.training.tasks.log_probabilities import AnswerLogProbabilities, answer_tokens
from unsloth_ddp.training.tasks.reference import LogProbabilities, Reference, make_reference
from unsloth_ddp.training.tasks.task import SumOverStep


@dataclass(frozen=True, eq=False)
class KtoTask(AnswerTask):
    """Learn from answers that are labelled as desirable or undesirable.

    Args:
        weights: of desirable and of undesirable answers.
        divergence: of the step, 0-dim; None outside of steps.
    """

    beta: float
    weights: tuple[float, float]
    reference: Reference = field(kw_only=True)
    divergence: Tensor | None = field(default=None, kw_only=True)
    columns = (
        "rows", "loss_sum", "divergence", "supervised_tokens", "correct", "desirable", "undesirable",
        "rewards_chosen", "rewards_rejected", "logps_chosen", "logps_rejected",
    )  # fmt: skip

    @classmethod
    def of(cls, settings: Settings, runtime: Runtime, model: Any, data: TrainingData) -> KtoTask:
        """Return the task that these settings name."""
        compute = AnswerLogProbabilities(model)

        def of_examples(of_rows: LogProbabilities, model: Any, batch: dict[str, Any]) -> Tensor:
            return torch.stack([of_rows(model, batch), of_rows(model, mismatched(batch))], dim=1)

        weights = settings.desirable_weight, settings.undesirable_weight
        reference = make_reference(settings, runtime, model, compute, of_examples, data)
        return cls(settings.resolved_beta, weights, log_probabilities=compute, reference=reference)

    @property
    def described(self) -> str:
        """Return the line of the table on the loss."""
        desirable, undesirable = self.weights
        weights = (
            ""
            if desirable == undesirable == 1
            else f", weights {desirable:g} (desirable) and {undesirable:g} (undesirable)"
        )
        return f"kto, beta {self.beta:g}{weights}; reference: {self.reference.described}"

    def units(self, batch: dict[str, Any]) -> Tensor:
        """Return the number of answers."""
        return (answer_tokens(batch) > 0).sum()

    def for_step(self, runner: MicroBatchRunner, sum_over_step: SumOverStep) -> Self:
        """Return the task with the divergence of the mismatched rows of all ranks."""

        def sums_of(batch: dict[str, Any]) -> Tensor:
            with runner.autocast():
                return self._mismatched_sums(runner.model, runner.to_device(batch))

        return self._with_divergence(sum_over_step(sums_of))

    def _mismatched_sums(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Return the number of mismatched rows with an answer, and their summed divergence, float64 (2,)."""
        other = mismatched(batch)
        with torch.no_grad(), evaluation_mode(model):
            ratios = self.log_probabilities(model, other).double() - self.reference.of(model, other).double()
        counted = answer_tokens(other) > 0
        return torch.stack([counted.sum().double(), ratios.masked_fill(~counted, 0).sum()])

    def _with_divergence(self, sums: Tensor) -> Self:
        rows, divergence = sums.float()
        return dataclasses.replace(self, divergence=(divergence / rows.clamp(min=1)).clamp(min=0))

    def loss(self, model: Any, batch: dict[str, Any], divisor: Tensor) -> Tensor:
        """Return the summed losses / their divisor, 0-dim."""
        # A trial of the memory has no step, and includes the pass before one.
        task = self if self.divergence is not None else self._with_divergence(self._mismatched_sums(model, batch))
        return task.measure(model, batch, divisor)[0]

    def measure(self, model: Any, batch: dict[str, Any], divisor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and the sums of columns, float64."""
        assert self.divergence is not None, "the divergence of a step is computed before its losses"
        # The reference comes first, so that its activations are gone before those of the policy are kept.
        reference, desirable = self.reference.of(model, batch), batch["desirable"]
        policy = self.log_probabilities(model, batch)
        tokens = answer_tokens(batch)
        # A row without an answer (the filler, or one that was cut) counts as nothing, also in its gradient.
        counted = tokens > 0
        margin = torch.where(desirable, 1.0, -1.0) * (policy - reference - self.divergence)
        weight = torch.where(desirable, *self.weights)
        # 1 - s(x) = s(-x), without cancellation.
        loss_sum = (weight * torch.sigmoid(-self.beta * margin)).masked_fill(~counted, 0).sum()
        with torch.no_grad():
            rewards = self.beta * (policy - reference)
            kinds = counted & desirable, counted & ~desirable
            measured = [
                counted.sum(), loss_sum, self.divergence * counted.sum(), tokens.sum(), ((margin > 0) & counted).sum(),
                *(kind.sum() for kind in kinds),
                *(values.masked_fill(~kind, 0).sum() for values in (rewards, policy) for kind in kinds),
            ]  # fmt: skip
            column_sums = torch.stack([value.detach().double() for value in measured])
        return loss_sum / divisor, column_sums

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return loss, divergence, and TRL's names for rewards and log-probabilities, as means by kind of answer."""
        rows = sums["rows"]
        if not rows:
            return {}
        means = {"loss": sums["loss_sum"] / rows, "kl": sums["divergence"] / rows}
        for name, kind in (("chosen", "desirable"), ("rejected", "undesirable")):
            if sums[kind]:
                means[f"rewards/{name}"] = sums[f"rewards_{name}"] / sums[kind]
                means[f"logps/{name}"] = sums[f"logps_{name}"] / sums[kind]
        if sums["desirable"] and sums["undesirable"]:
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        return means | {"rewards/accuracies": sums["correct"] / rows}


def mismatched(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch of the mismatched rows."""
    return {name.removeprefix(MISMATCHED): value for name, value in batch.items() if name.startswith(MISMATCHED)}
