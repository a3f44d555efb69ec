"""Train on pairs of answers: the preference term is a mean over pairs, the cross entropy over tokens of chosen answers.

Both means are over all ranks and micro-batches of a step, so each term has its own divisor (see divisor.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.task_options import REFERENCE_TASKS
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.training.tasks.answers import AnswerTask
from unsloth_ddp.training.tasks.log_probabilities import AnswerLogProbabilities, answer_tokens
from unsloth_ddp.training.tasks.pair_losses import PairLoss, Two
from unsloth_ddp.training.tasks.reference import Reference, make_reference


@dataclass(frozen=True, eq=False)
class PairTask(AnswerTask):
    """Compare the answers of pairs.

    Args:
        pair_loss: the loss of a pair (pair_losses.py).
        sft_weight: of the cross entropy of the chosen answers.
    """

    pair_loss: PairLoss
    sft_weight: float
    columns = (
        "pairs", "pair_loss", "chosen_tokens", "chosen_nll", "supervised_tokens", "rewards_chosen", "rewards_rejected",
        "correct", "logps_chosen", "logps_rejected",
    )  # fmt: skip

    @classmethod
    def of(cls, settings: Settings, runtime: Runtime, model: Any, data: TrainingData) -> PairTask:
        """Return the task that these settings name."""
        compute = AnswerLogProbabilities(model)
        reference: Reference | None = None
        if settings.task in REFERENCE_TASKS:
            of_pairs = lambda of_rows, model, batch: of_rows(model, batch).view(-1, 2)  # noqa: E731
            reference = make_reference(settings, runtime, model, compute, of_pairs, data)
        return cls(PairLoss.of(settings), settings.resolved_sft_weight, log_probabilities=compute, reference=reference)

    @property
    def described(self) -> str:
        """Return the line of the table on the loss."""
        nll = f" + {self.sft_weight:g} x cross entropy of the chosen answers" if self.sft_weight else ""
        reference = f"; reference: {self.reference.described}" if self.reference else ""
        return f"{self.pair_loss.described}{nll}{reference}"

    def units(self, batch: dict[str, Any]) -> Tensor:
        """Return the numbers of pairs and of tokens in chosen answers, (2,)."""
        tokens = answer_tokens(batch)
        return torch.stack([(tokens[0::2] > 0).sum(), tokens[0::2].sum()])

    def measure(self, model: Any, batch: dict[str, Any], divisor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and the sums of columns, float64."""
        # The reference comes first, so that its activations are gone before those of the policy are kept.
        reference = None if self.reference is None else self.reference.of(model, batch)
        policy = self.log_probabilities(model, batch)
        tokens = answer_tokens(batch)
        # A pair without answers (the filler, or answers that were cut) counts as nothing, also in its gradient.
        counted = tokens[0::2] > 0
        sums = two(policy)
        losses, rewards = self.pair_loss(
            _mask_uncounted(sums, counted),
            None if reference is None else _mask_uncounted(two(reference), counted),
            two(tokens.clamp(min=1).float()),
        )
        pair_loss = losses.masked_fill(~counted, 0).sum()
        chosen_nll = -sums[0].sum()
        loss = pair_loss / divisor.flatten()[0] + self.sft_weight * chosen_nll / divisor.flatten()[-1]
        with torch.no_grad():
            correct = (rewards[0] > rewards[1]) & counted
            shown = [reward.masked_fill(~counted, 0).sum() for reward in rewards]
            measured = [counted.sum(), pair_loss, tokens[0::2].sum(), chosen_nll, tokens.sum(), *shown, correct.sum()]
            column_sums = torch.stack(
                [value.detach().double() for value in (*measured, *(side.sum() for side in sums))]
            )
        return loss, column_sums

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the loss, and TRL's names for rewards and log-probabilities, as means over pairs."""
        pairs, tokens = sums["pairs"], sums["chosen_tokens"]
        if not pairs:
            return {}
        chosen, rejected = sums["rewards_chosen"] / pairs, sums["rewards_rejected"] / pairs
        nll = sums["chosen_nll"] / tokens
        return {
            "loss": sums["pair_loss"] / pairs + self.sft_weight * nll,
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": sums["correct"] / pairs,
            "logps/chosen": sums["logps_chosen"] / pairs,
            "logps/rejected": sums["logps_rejected"] / pairs,
            "nll_loss": nll,
        }


def two(of_rows: Tensor) -> Two:
    """Return the values of chosen and of rejected rows, which alternate."""
    return of_rows[0::2], of_rows[1::2]


def _mask_uncounted(values: Two, counted: Tensor) -> Two:
    """Return the values with a constant, at which every loss is finite, in pairs that do not count."""
    return torch.where(counted, values[0], -1.0), torch.where(counted, values[1], -1.0)
