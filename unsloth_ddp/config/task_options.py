"""Declare the options that say what is trained: text, or preferences between answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from unsloth_ddp.config.declare import option
from unsloth_ddp.utils.errors import UserError

if TYPE_CHECKING:
    from unsloth_ddp.config.options import Settings

# Tasks whose rows are pairs of a chosen and a rejected answer, and of them those that compare with a reference model.
PAIR_TASKS = ("dpo", "orpo", "simpo", "cpo")
REFERENCE_TASKS = ("dpo",)
# Values that differ between tasks, where the user gives none: those of TRL's trainers and of the SimPO paper.
BETA = {"simpo": 2.0}
SFT_WEIGHT = {"orpo": 1.0, "cpo": 1.0}


@dataclass
class TaskSettings:
    """Task"""

    task: Literal["sft", "dpo", "orpo", "simpo", "cpo"] = option(
        "sft",
        "sft: learn the answers of the rows; dpo, orpo, simpo, cpo: prefer the chosen answer of a row to the rejected one.",
        on_resume="refuse",
        summary=True,
    )
    beta: float | None = option(
        None,
        "Strength of the preference term: of the stay near the reference (dpo), of the odds ratio (orpo), of the margin (simpo, "
        "cpo). Default: 0.1; with simpo 2.",
        above=0,
        on_resume="refuse",
        summary=True,
    )
    preference_loss: Literal["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust"] = option(
        "sigmoid",
        "Loss of a pair with dpo and cpo. sigmoid_norm and ipo divide log-probabilities by the tokens of the answer.",
        on_resume="refuse",
        summary=True,
    )
    label_smoothing: float = option(
        0.0,
        "Probability that a pair is in the wrong order, with sigmoid, sigmoid_norm and robust.",
        at_least=0,
        below=0.5,
        on_resume="refuse",
        summary=True,
    )
    simpo_gamma: float = option(
        0.5, "Margin that simpo asks for between the rewards of a pair.", at_least=0, on_resume="refuse", summary=True
    )
    sft_weight: float | None = option(
        None,
        "Weight of the cross entropy of the chosen answers, a token mean, beside the preference term. Default: 1 with orpo and "
        "cpo, otherwise 0.",
        at_least=0,
        on_resume="refuse",
        summary=True,
    )
    reference: Literal["auto", "adapter_off", "precomputed"] = option(
        "auto",
        "Reference of dpo. adapter_off: the model without its adapter, in each step; precomputed: computed once before step 1 and "
        "kept in the checkpoints; auto: adapter_off with an adapter, precomputed with --method full.",
        on_resume="refuse",
        summary=True,
    )

    @property
    def trains_pairs(self) -> bool:
        """Return whether a row is a pair of answers."""
        return self.task in PAIR_TASKS

    @property
    def resolved_beta(self) -> float:
        """Return --beta, or the task's default."""
        return BETA.get(self.task, 0.1) if self.beta is None else self.beta

    @property
    def resolved_sft_weight(self) -> float:
        """Return --sft_weight, or the task's default."""
        return SFT_WEIGHT.get(self.task, 0.0) if self.sft_weight is None else self.sft_weight


def check_task(settings: Settings) -> None:
    """Refuse options that do nothing, or do not work, with the task.

    Raises:
        UserError: naming the option and its fix.
    """
    standard, task = TaskSettings(), settings.task
    of_pairs = {
        "beta": PAIR_TASKS,
        "preference_loss": ("dpo", "cpo"),
        "label_smoothing": ("dpo", "cpo"),
        "simpo_gamma": ("simpo",),
        "sft_weight": PAIR_TASKS,
        "reference": REFERENCE_TASKS,
    }
    for name, tasks in of_pairs.items():
        value = getattr(settings, name)
        if value != getattr(standard, name) and task not in tasks:
            raise UserError(f"{name} {value} is for --task {' or '.join(tasks)}, and task is {task}; leave it out.")
    if not settings.trains_pairs:
        return
    if settings.label_smoothing and settings.preference_loss in ("hinge", "ipo"):
        raise UserError(
            f"label_smoothing {settings.label_smoothing} has no effect on preference_loss {settings.preference_loss}; leave "
            "it out, or give --preference_loss sigmoid."
        )
    refused = {
        "packing on": settings.packing == "on" and "pairs are padded; give --packing auto",
        "global_batch_tokens": settings.global_batch_tokens is not None
        and "it counts packs and pairs are padded; give --global_batch_size",
        "cuda_graphs on": settings.cuda_graphs == "on" and "they need packed rows; give --cuda_graphs auto",
        "backend unsloth": settings.backend == "unsloth"
        and "its fused loss returns no log-probabilities; give --backend transformers",
        "loss_on all": settings.loss_on == "all" and "only answers are compared; leave it out",
        "reference adapter_off": settings.reference == "adapter_off"
        and settings.method == "full"
        and "method full has no adapter; give --reference precomputed",
        "reference precomputed": settings.reference == "precomputed"
        and settings.streaming
        and "streamed rows are not known before they are trained; leave --streaming out",
        "method full": settings.method == "full"
        and settings.streaming
        and task in REFERENCE_TASKS
        and "its reference is computed before step 1 and streamed rows are not known then; leave --streaming out",
    }
    for what, reason in refused.items():
        if reason:
            raise UserError(f"{what} does not work with task {task}: {reason}.")
