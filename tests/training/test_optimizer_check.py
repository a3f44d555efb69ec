"""Optimizers and their arguments are built before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.training_args import OptimizerNames

from unsloth_ddp.config.options import Settings
from unsloth_ddp.training.optimizer_check import check_optimizer
from unsloth_ddp.utils.errors import UserError


def refusal(optim: str, **trainer_args: Any) -> str:
    with pytest.raises(UserError) as refused:
        check_optimizer(Settings(optim=optim, trainer_args=trainer_args))
    return str(refused.value)


@pytest.mark.parametrize("optim", [str(name.value) for name in OptimizerNames])
def test_every_optimizer_is_built_or_refused_in_one_sentence(optim: str) -> None:
    try:
        check_optimizer(Settings(optim=optim))
    except UserError as refused:
        assert str(refused).startswith(f"optim {optim} ")
    else:
        assert optim not in ("lomo", "adalomo", "galore_adamw_layerwise", "apollo_adamw_layerwise")


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "adamw_8bit", "lion_8bit"])
def test_common_optimizers_are_accepted(optim: str) -> None:
    check_optimizer(Settings(optim=optim))


@pytest.mark.parametrize(
    ("optim", "trainer_args", "phrase"),
    [
        ("lomo", {}, "optim lomo changes weights during the backward pass"),
        ("galore_adamw_layerwise", {}, "optim galore_adamw_layerwise changes weights during the backward pass"),
        ("galore_adamw", {}, "optim galore_adamw cannot be built: You need to "),
        ("adamw_torch", {"adam_beta1": 2.0}, "optim adamw_torch cannot be built with trainer_args {\"adam_beta1\": "
            "2.0}: Inv"),
        ("adamw_torch", {"optim_args": "nonsense"}, "optim adamw_torch cannot be built with trainer_args"),
        ("adamw_torch", {"optim_target_modules": "all-linear"}, "optim_target_modules has no effect on optim "
            "adamw_torch;"),
        ("adamw_torch", {"optim_args": "momentum=0.9"}, "optim_args 'momentum=0.9' has no effect on optim "
            "adamw_torch;"),
    ],
)  # fmt: skip
def test_an_optimizer_that_would_fail_late_is_refused(optim: str, trainer_args: dict[str, Any], phrase: str) -> None:
    message = refusal(optim, **trainer_args)
    assert phrase in message and message.endswith(".")


def test_arguments_that_an_optimizer_reads_are_accepted() -> None:
    check_optimizer(Settings(optim="sgd", trainer_args={"optim_args": "momentum=0.9"}))
