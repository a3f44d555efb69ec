"""The losses of a pair of answers, as functions of log-probabilities alone.

With w and l the chosen and the rejected answer after the prompt x, pi the trained model, ref the reference, and |y| the
tokens of an answer:

    dpo    sigmoid        -log s(beta (r_w - r_l)), r_y = log pi(y|x) - log ref(y|x)     https://arxiv.org/abs/2305.18290
           label_smoothing e: (1 - e) times that, and e times that of the exchanged pair (cDPO)
                                                                                          https://arxiv.org/abs/2310.12036
           robust         the same with -e, over 1 - 2e                                   https://arxiv.org/abs/2403.00409
           hinge          max(0, 1 - beta (r_w - r_l))                                    https://arxiv.org/abs/2305.10425
           ipo            (r_w / |w| - r_l / |l| - 1 / (2 beta))^2                        https://arxiv.org/abs/2310.12036
           sigmoid_norm   sigmoid with r_y / |y|                                          https://arxiv.org/abs/2411.15124
    cpo    those of dpo with log ref = 0                                                  https://arxiv.org/abs/2401.08417
    simpo  -log s(beta (log pi(w|x) / |w| - log pi(l|x) / |l|) - gamma)                   https://arxiv.org/abs/2405.14734
    orpo   -beta log s(log odds(w) - log odds(l)), odds(y) = p / (1 - p), p = pi(y|x)^(1/|y|)
                                                                                          https://arxiv.org/abs/2403.07691
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from unsloth_ddp.config.options import Settings

# The chosen and the rejected answer of each pair, float32 (pairs,) each.
Two = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class PairLoss:
    """Return the losses of pairs and the rewards of their answers.

    Args:
        task: dpo, orpo, simpo or cpo.
        kind: --preference_loss.
    """

    task: str
    kind: str
    beta: float
    label_smoothing: float = 0.0
    gamma: float = 0.0

    @classmethod
    def of(cls, settings: Settings) -> PairLoss:
        """Return the loss that these settings name."""
        return cls(
            settings.task,
            settings.preference_loss,
            settings.resolved_beta,
            settings.label_smoothing,
            settings.simpo_gamma,
        )

    @property
    def described(self) -> str:
        """Return the loss in words."""
        kind = f" {self.kind}" if self.task in ("dpo", "cpo") else ""
        smoothing = f", label smoothing {self.label_smoothing:g}" if self.label_smoothing else ""
        gamma = f", gamma {self.gamma:g}" if self.task == "simpo" else ""
        return f"{self.task}{kind}, beta {self.beta:g}{smoothing}{gamma}"

    def __call__(self, policy: Two, reference: Two | None, tokens: Two) -> tuple[Tensor, Two]:
        """Return the loss of each pair, (pairs,), and the rewards of its answers.

        Args:
            policy: log pi(y|x).
            reference: log ref(y|x); None without a reference.
            tokens: |y|, at least 1.
        """
        if self.task == "orpo":
            means = _ratio(policy, tokens)
            odds = tuple(mean - log1mexp(mean) for mean in means)
            return -self.beta * logsigmoid(odds[0] - odds[1]), _scaled(means, self.beta)
        if self.task == "simpo":
            rewards = _scaled(_ratio(policy, tokens), self.beta)
            return -logsigmoid(rewards[0] - rewards[1] - self.gamma), rewards
        scores = policy if reference is None else (policy[0] - reference[0], policy[1] - reference[1])
        return self._of_scores(scores, tokens), _scaled(scores, self.beta)

    def _of_scores(self, scores: Two, tokens: Two) -> Tensor:
        chosen, rejected = _ratio(scores, tokens) if self.kind in ("ipo", "sigmoid_norm") else scores
        margin, smoothing = chosen - rejected, self.label_smoothing
        if self.kind == "ipo":
            return (margin - 1 / (2 * self.beta)) ** 2
        if self.kind == "hinge":
            return torch.relu(1 - self.beta * margin)
        right, exchanged = -logsigmoid(self.beta * margin), -logsigmoid(-self.beta * margin)
        if self.kind == "robust":
            return ((1 - smoothing) * right - smoothing * exchanged) / (1 - 2 * smoothing)
        return (1 - smoothing) * right + smoothing * exchanged


def _ratio(values: Two, tokens: Two) -> Two:
    return values[0] / tokens[0], values[1] / tokens[1]


def _scaled(values: Two, factor: float) -> Two:
    return factor * values[0], factor * values[1]


def log1mexp(value: Tensor) -> Tensor:
    """Return log(1 - exp(value)) of negative values without cancellation.

    See https://cran.r-project.org/package=Rmpfr/vignettes/log1mexp-note.pdf; a value that rounds to 0 counts as -1e-7.
    """
    value = value.clamp(max=-1e-7)
    near_zero = value > -0.6931472
    # Each branch gets a value at which its gradient is finite.
    small, large = torch.where(near_zero, value, -0.5), torch.where(near_zero, -1.0, value)
    return torch.where(near_zero, torch.log(-torch.expm1(small)), torch.log1p(-torch.exp(large)))
