"""Train on pairs of answers: the preference term is a mean over pairs, the cross entropy one over the chosen answers' tokens.

Both means are over all ranks and micro-batches of a step, so each term has its own divisor (see divisor.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.task_options import REFERENCE_TASKS
from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.data.training_data import TrainingData
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.forward.supervised_head import SupervisedHead
from unsloth_ddp.model.modules import evaluation_mode
from unsloth_ddp.training.tasks.pair_losses import PairLoss, Two
from unsloth_ddp.training.tasks.reference import AdapterOff, Precomputed, Reference
from unsloth_ddp.utils.errors import UserError

COLUMNS = (
    "pairs", "pair_loss", "chosen_tokens", "chosen_nll", "supervised_tokens", "rewards_chosen", "rewards_rejected",
    "correct", "logps_chosen", "logps_rejected",
)  # fmt: skip
# Largest difference of policy and reference before step 1, per token: rounding of sums, and of kernels in 16 bit.
SAME = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 5e-3}


@dataclass(frozen=True, eq=False)
class PairTask:
    """Compare the answers of pairs.

    Args:
        pair_loss: the loss of a pair (pair_losses.py).
        sft_weight: of the cross entropy of the chosen answers.
        log_probabilities: of the answers under a model.
        reference: None for losses without one.
    """

    pair_loss: PairLoss
    sft_weight: float
    log_probabilities: AnswerLogProbabilities
    reference: Reference | None

    @classmethod
    def of(cls, settings: Settings, model: Any, data: TrainingData) -> PairTask:
        """Return the task that these settings name."""
        compute = AnswerLogProbabilities(SupervisedHead(model))
        reference: Reference | None = None
        if settings.task in REFERENCE_TASKS:
            precomputed = settings.reference == "precomputed" or settings.method == "full"
            reference = Precomputed(compute, data) if precomputed else AdapterOff(compute)
        return cls(PairLoss.of(settings), settings.resolved_sft_weight, compute, reference)

    @property
    def described(self) -> str:
        """Return the line of the table on the loss."""
        nll = f" + {self.sft_weight:g} x cross entropy of the chosen answers" if self.sft_weight else ""
        reference = f"; reference: {self.reference.described}" if self.reference else ""
        return f"{self.pair_loss.described}{nll}{reference}"

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the sums that `measure` returns."""
        return COLUMNS

    @property
    def head_chooses(self) -> bool:
        """Return that a batch names its supervised tokens, since only their logits are computed."""
        return True

    def tuned(self, runner: MicroBatchRunner, examples: Any, rows: int) -> PairTask:
        """Return the task as it is."""
        return self

    def units(self, batch: dict[str, Any]) -> Tensor:
        """Return the numbers of pairs and of tokens in chosen answers, (2,)."""
        tokens = answer_tokens(batch["labels"])
        return torch.stack([(tokens[0::2] > 0).sum(), tokens[0::2].sum()])

    def loss(self, model: Any, batch: dict[str, Any], divisor: Tensor) -> Tensor:
        """Return the summed losses of the pairs / their divisor + the summed cross entropy / its divisor, 0-dim."""
        return self.measure(model, batch, divisor)[0]

    def measure(self, model: Any, batch: dict[str, Any], divisor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and the sums of COLUMNS, float64."""
        # The reference comes first, so that its activations are gone before those of the policy are kept.
        reference = None if self.reference is None else self.reference.of(model, batch)
        policy = self.log_probabilities(model, batch)
        tokens = answer_tokens(batch["labels"])
        # A pair without answers (the filler, or answers that were cut) counts as nothing, also in its gradient.
        counted = tokens[0::2] > 0
        sums = two(policy)
        losses, rewards = self.pair_loss(
            _kept(sums, counted),
            None if reference is None else _kept(two(reference), counted),
            two(tokens.clamp(min=1).float()),
        )
        pair_loss = losses.masked_fill(~counted, 0).sum()
        chosen_nll = -sums[0].sum()
        loss = pair_loss / divisor.flatten()[0] + self.sft_weight * chosen_nll / divisor.flatten()[-1]
        with torch.no_grad():
            correct = (rewards[0] > rewards[1]) & counted
            shown = [reward.masked_fill(~counted, 0).sum() for reward in rewards]
            measured = [counted.sum(), pair_loss, tokens[0::2].sum(), chosen_nll, tokens.sum(), *shown, correct.sum()]
            found = torch.stack([value.detach().double() for value in (*measured, *(one.sum() for one in sums))])
        return loss, found

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

    def begin(self, runner: MicroBatchRunner, runtime: Runtime, data: TrainingData, checkpoint: Path | None) -> None:
        """Prepare the reference, and refuse a model that differs from it before step 1."""
        if self.reference is None:
            return
        self.reference.prepare(runner, runtime, data, checkpoint)
        if checkpoint is None:
            self._check_same(runner, runtime, data)

    def _check_same(self, runner: MicroBatchRunner, runtime: Runtime, data: TrainingData) -> None:
        assert self.reference is not None
        examples = data.train.examples
        batch = runner.batch_of([examples[index] for index in range(min(2, data.train.units))])
        with torch.no_grad(), evaluation_mode(runner.model), runner.autocast():
            policy, reference = self.log_probabilities(runner.model, batch), self.reference.of(runner.model, batch)
        tokens = answer_tokens(batch["labels"]).clamp(min=1)
        difference = ((policy - reference).abs() / tokens).max().item()
        if not difference <= SAME[runtime.precision]:
            raise UserError(
                f"the model differs from its reference before step 1, by {difference:.2g} in the log-probability of a token, so the "
                "rewards would not begin at 0; begin with a new adapter that changes nothing, or merge the old one first."
            )

    def save(self, folder: Path) -> None:
        """Write the reference, if it is precomputed."""
        if self.reference is not None:
            self.reference.save(folder)


@dataclass(frozen=True)
class AnswerLogProbabilities:
    """Compute the log-probability of the supervised tokens of each row, with logits for these tokens only.

    Args:
        head: selects the positions at which the model computes logits.
    """

    head: SupervisedHead

    def __call__(self, model: Any, batch: dict[str, Any]) -> Tensor:
        """Return log pi(y|x) of each row, float32 (rows,)."""
        ids = batch["input_ids"]
        # Where nearly all tokens are supervised, the batch names no positions (see supervised_positions).
        positions, targets = batch.get("supervised_positions"), batch.get("shift_labels")
        if positions is None:
            targets = pad(batch["labels"][:, 1:], (0, 1), value=IGNORED).flatten()
        with self.head.at(positions):
            logits = model(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=False).logits
        assert targets is not None
        found = -cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="none")
        if positions is None:
            return found.view(ids.shape).sum(dim=1)
        rows = positions.flatten() // ids.shape[1]
        return found.new_zeros(len(ids)).index_add(0, rows, found)


def answer_tokens(labels: Tensor) -> Tensor:
    """Return the supervised tokens of each row, int64 (rows,); the first token of a row is never predicted."""
    return (labels[:, 1:] != IGNORED).sum(dim=1)


def two(of_rows: Tensor) -> Two:
    """Return the values of chosen and of rejected rows, which alternate."""
    return of_rows[0::2], of_rows[1::2]


def _kept(values: Two, counted: Tensor) -> Two:
    """Return the values with a constant, at which every loss is finite, in pairs that do not count."""
    return torch.where(counted, values[0], -1.0), torch.where(counted, values[1], -1.0)
