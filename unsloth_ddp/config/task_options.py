"""Declare the options of tasks: what is trained, preferences between answers, and images beside text."""

from dataclasses import dataclass
from typing import Literal

from unsloth_ddp.config.declare import option

# Tasks whose rows are pairs of a chosen and a rejected answer; tasks that learn preferences; tasks with a reference
# model.
PAIR_TASKS = ("dpo", "orpo", "simpo", "cpo")
PREFERENCE_TASKS = (*PAIR_TASKS, "kto")
REFERENCE_TASKS = ("dpo", "kto")
# Values that differ between tasks, where the user gives none: those of TRL's trainers and of the SimPO paper.
BETA = {"simpo": 2.0}
SFT_WEIGHT = {"orpo": 1.0, "cpo": 1.0}


@dataclass(frozen=True)
class TaskSettings:
    """Task"""

    task: Literal["sft", "dpo", "orpo", "simpo", "cpo", "kto"] = option(
        "sft",
        "sft: learn the answers of the rows; dpo, orpo, simpo, cpo: prefer the chosen answer of a row to the rejected "
        "one; kto: learn from answers that are labelled as desirable or undesirable.",
        on_resume="refuse",
    )
    beta: float | None = option(
        None,
        "Strength of the preference term: of the stay near the reference (dpo, kto), of the odds ratio (orpo), of the "
        "margin (simpo, cpo). Default: 0.1; with simpo 2.",
        above=0,
        on_resume="refuse",
    )
    preference_loss: Literal["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust"] = option(
        "sigmoid",
        "Loss of a pair with dpo and cpo. sigmoid_norm and ipo divide log-probabilities by the tokens of the answer.",
        on_resume="refuse",
    )
    label_smoothing: float = option(
        0.0,
        "Probability that a pair is in the wrong order, with sigmoid, sigmoid_norm and robust.",
        at_least=0,
        below=0.5,
        on_resume="refuse",
    )
    simpo_gamma: float = option(
        0.5, "Margin that simpo asks for between the rewards of a pair.", at_least=0, on_resume="refuse"
    )
    sft_weight: float | None = option(
        None,
        "Weight of the cross entropy of the chosen answers, a token mean, beside the preference term. Default: 1 with "
        "orpo and cpo, otherwise 0.",
        at_least=0,
        on_resume="refuse",
    )
    reference: Literal["auto", "adapter_off", "precomputed"] = option(
        "auto",
        "Reference of dpo and kto. adapter_off: the model without its adapter, in each step; precomputed: computed "
        "once before step 1 and "
        "kept in the checkpoints; auto: adapter_off with an adapter, precomputed with --method full.",
        on_resume="refuse",
    )
    reference_model: str | None = option(
        None,
        "Hub id or folder of another model, or of an adapter, as the reference of dpo and kto, computed once before "
        "step 1, or in each step with --streaming. Default: the model itself.",
        on_resume="refuse",
        path="read",
    )
    reference_model_revision: str | None = option(
        None, "Branch, tag or commit of the reference model on the Hub.", on_resume="refuse"
    )

    desirable_weight: float = option(1.0, "Weight of the desirable answers with kto.", at_least=0, on_resume="refuse")
    undesirable_weight: float = option(
        1.0, "Weight of the undesirable answers with kto.", at_least=0, on_resume="refuse"
    )

    @property
    def trains_preferences(self) -> bool:
        """Return whether a task compares answers instead of learning them."""
        return self.task in PREFERENCE_TASKS

    @property
    def resolved_beta(self) -> float:
        """Return --beta, or the task's default."""
        return BETA.get(self.task, 0.1) if self.beta is None else self.beta

    @property
    def resolved_sft_weight(self) -> float:
        """Return --sft_weight, or the task's default."""
        return SFT_WEIGHT.get(self.task, 0.0) if self.sft_weight is None else self.sft_weight


@dataclass(frozen=True)
class ImageSettings:
    """Images"""

    image_folder: list[str] = option(
        [],
        "Folders of the images that rows name by relative paths, looked up in this order; default: beside the rows' "
        "file, then the working folder.",
        path="read",
        on_resume="allow",  # the images are compared themselves
    )
    download_images: bool = option(
        False,
        "Download images that rows name by http(s) addresses, once for all runs of a node, into HF_HOME; each has at "
        "most 100 MB and 60 seconds.",
        on_resume="allow",  # the images are compared themselves
    )
    image_max_pixels: int | None = option(
        None,
        "Scale larger images down to about so many pixels before the model's processor sees them; fewer pixels are "
        "fewer tokens.",
        at_least=1024,
        at_most=64_000_000,
        on_resume="refuse",
    )
