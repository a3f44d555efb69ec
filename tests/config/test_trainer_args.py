"""Fields of SFTConfig that trainer_args may set, and those that the kit decides."""

from __future__ import annotations

from typing import Any

import pytest

from unsloth_ddp.config.options import OPTIONS, Settings
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.config.trainer_args import OWNED_ARGS, check_trainer_args
from unsloth_ddp.utils.errors import UserError


def check(given: dict[str, Any], **options: Any) -> None:
    check_trainer_args(Settings(model="m", dataset=["d"], trainer_args=given, **options))


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
        check({name: "x"})
    assert str(refused.value).startswith(f"trainer_args: {name} is set by the kit; {instead}")


def test_what_is_refused_names_options_that_there_are() -> None:
    named = {word.strip(".,;:") for text in OWNED_ARGS.values() for word in text.split() if word.startswith("--")}
    assert {name.removeprefix("--") for name in named} - {"help"} <= OPTIONS.keys()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("adam_beta1", 2.0, "trainer_args: adam_beta1 is 2.0, but it has to be below 1."),
        ("adam_epsilon", 0, "trainer_args: adam_epsilon is 0, but it has to be above 0."),
        ("neftune_noise_alpha", "abc", "trainer_args: neftune_noise_alpha is 'abc', but it takes a number."),
        (
            "neftune_noise_alpha",
            1e308,
            "trainer_args: neftune_noise_alpha is 1e+308, but it has to be 1,000,000 or below.",
        ),
        ("adam_epsilon", "1e-8", "trainer_args: adam_epsilon is '1e-8', but it takes a number; in YAML write 1.0e-8."),
        ("dataloader_num_workers", -1, "trainer_args: dataloader_num_workers is -1, but it has to be 0 or above."),
        (
            "dataloader_num_workers",
            True,
            "trainer_args: dataloader_num_workers is 'True', but it takes a whole number.",
        ),
    ],
)
def test_a_number_that_would_fail_late_is_refused_with_the_settings(name: str, value: Any, said: str) -> None:
    with pytest.raises(UserError) as refused:
        check({name: value})
    assert str(refused.value) == said
    check({name: None})


def test_a_name_of_another_tool_is_refused_with_the_option() -> None:
    with pytest.raises(UserError, match="SFTConfig has no field warmup_ratio; use --warmup_steps"):
        check({"warmup_ratio": 0.1})


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("load_best_model_at_end", "false", "but it takes true or false."),
        ("torch_compile", 1, "but it takes true or false."),
        ("dataloader_num_workers", 1.5, "but it takes a whole number."),
        ("data_seed", 1.5, "but it takes a whole number."),
        ("metric_for_best_model", 3, "but it takes a text."),
        ("metric_for_best_model", "accuracy", "but it takes loss, eval_loss."),
        ("liger_kernel_config", "x", "but it takes a mapping."),
        ("gradient_checkpointing_kwargs", 5, "but it takes a mapping."),
        ("activation_offloading", "no", "but it takes true or false."),
        ("log_level", "loud", "but it takes detail, debug,"),
        ("logging_strategy", "never", "but it takes no, steps, epoch."),
        ("debug", "everything", "but it takes underflow_overflow."),
        ("torch_compile_mode", "fastest", "but it takes default, reduce-overhead,"),
        ("greater_is_better", True, "keeps the checkpoint with the highest loss"),
        ("nonsense", 1, "SFTConfig has no field nonsense; the documentation of TRL lists them."),
        ("neftune_noise_alfa", 1, "did you mean neftune_noise_alpha?"),
    ],
)
def test_a_value_that_a_field_does_not_take_is_refused_with_the_settings(name: str, value: Any, takes: str) -> None:
    with pytest.raises(UserError) as refused:
        check({name: value}, gradient_checkpointing="torch", eval_fraction=0.1)
    assert str(refused.value).startswith("trainer_args: ") and takes in str(refused.value)
    assert name in str(refused.value)


def test_a_package_that_a_field_needs_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    with pytest.raises(UserError, match=r"use_liger_kernel needs the package liger-kernel, which is not installed"):
        check({"use_liger_kernel": True})


def test_the_check_is_part_of_reading_settings() -> None:
    with pytest.raises(UserError, match="loss_type is set by the kit"):
        parse_settings(["--model", "m", "--dataset", "d", "--trainer_args", '{"loss_type": "dft"}'])
