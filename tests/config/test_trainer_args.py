"""Fields of SFTConfig that trainer_args may set, and those that the kit decides."""

from __future__ import annotations

from typing import Any

import pytest

from unsloth_ddp.config.options import OPTIONS
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.config.trainer_args import OWNED_ARGS, check_trainer_args
from unsloth_ddp.utils.errors import UserError


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("loss_type", "the loss is the negative log-likelihood"), ("packing", "use --packing."),
        ("eval_packing", "use --packing; what"), ("assistant_only_loss", "use --loss_on."),
        ("truncation_mode", "use --overlong."), ("optim", "use --optim."), ("max_seq_length", "use --max_length."),
        ("save_only_model", "a run goes on only with the state of its optimizer; --save_strategy no"),
        ("restore_callback_states_from_checkpoint", "a resumed run takes over the totals and the position in a"),
        ("dataloader_in_order", "a resumed run continues at the right row only if"),
    ],
)  # fmt: skip
def test_a_field_that_the_kit_decides_is_refused_with_the_option_for_it(name: str, instead: str) -> None:
    with pytest.raises(UserError) as refused:
        check_trainer_args({name: "x"})
    assert str(refused.value).startswith(f"trainer_args: {name} is decided by the kit; {instead}")


def test_what_is_refused_names_options_that_there_are() -> None:
    named = {word.strip(".,;:") for text in OWNED_ARGS.values() for word in text.split() if word.startswith("--")}
    assert {name.removeprefix("--") for name in named} - {"help"} <= OPTIONS.keys()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("adam_beta1", 2.0, "trainer_args: adam_beta1 is 2.0, but it has to be below 1."),
        ("adam_epsilon", 0, "trainer_args: adam_epsilon is 0, but it has to be above 0."),
        ("neftune_noise_alpha", "abc", "trainer_args: neftune_noise_alpha is 'abc', but it takes a number."),
        ("dataloader_num_workers", -1, "trainer_args: dataloader_num_workers is -1, but it has to be 0 or above."),
        ("dataloader_num_workers", True, "trainer_args: dataloader_num_workers is 'True', but it takes a number."),
    ],
)
def test_a_number_that_would_fail_late_is_refused_with_the_settings(name: str, value: Any, said: str) -> None:
    with pytest.raises(UserError) as refused:
        check_trainer_args({name: value})
    assert str(refused.value) == said
    check_trainer_args({name: None})


def test_a_name_of_another_tool_is_refused_with_the_option() -> None:
    with pytest.raises(UserError, match="SFTConfig has no field warmup_ratio; use --warmup_steps"):
        check_trainer_args({"warmup_ratio": 0.1})


def test_the_check_is_part_of_reading_settings() -> None:
    with pytest.raises(UserError, match="loss_type is decided by the kit"):
        parse_settings(["--model", "m", "--dataset", "d", "--trainer_args", '{"loss_type": "dft"}'])
