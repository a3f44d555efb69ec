"""TRL's SFTConfig: every field is an option, goes through `trainer_args` and does something there, or is refused."""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import SchedulerType, TrainingArguments
from transformers.training_args import trainer_log_levels
from trl.trainer.sft_config import SFTConfig

from unsloth_ddp.config.options import OPTIONS, Settings
from unsloth_ddp.config.trainer_args import OWNED_ARGS, TEXTS
from unsloth_ddp.config.upstream_names import sft_config_fields
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.sharding import Sharding
from unsloth_ddp.training.optimizer_check import SCHEDULE_EXAMPLES
from unsloth_ddp.training.sft_config import make_config
from unsloth_ddp.utils.errors import UserError

# Read by what the kit leaves to Transformers and TRL: optimizer and schedule, hooks on the model, logs, checkpoints,
# data loaders, DDP.
WORDS = """
    lr_scheduler_kwargs optim_args adam_beta1 adam_beta2 adam_epsilon optim_target_modules
    tf32 gradient_checkpointing_kwargs activation_offloading torch_compile torch_compile_backend torch_compile_mode
    use_liger_kernel liger_kernel_config neftune_noise_alpha torch_empty_cache_steps full_determinism data_seed
    logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level
    log_level_replica disable_tqdm project trackio_space_id trackio_bucket_id trackio_static_space_id debug
    skip_memory_metrics
    eval_delay eval_on_start load_best_model_at_end metric_for_best_model
    greater_is_better
    dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
    dataloader_multiprocessing_context
    ddp_bucket_cap_mb ddp_broadcast_buffers
"""
GOES_THROUGH = set(WORDS.split())


def config_with(
    folder: Path, options: dict[str, Any] | None = None, sharding: Sharding = "none", **trainer_args: Any
) -> Any:
    settings = Settings(model="m", dataset=["d"], trainer_args=trainer_args, **(options or {}))
    runtime = Runtime(Ranks(), "transformers", "cpu", "fp32", "CPU", sharding=sharding)
    return make_config(settings, runtime, BatchPlan(1, 1, 1), folder)


def test_every_field_is_an_option_goes_through_or_is_refused() -> None:
    names = {f.name for f in dataclasses.fields(SFTConfig) if f.init}
    # Unsloth's version of the class has it.
    assert names - OPTIONS.keys() - GOES_THROUGH == OWNED_ARGS.keys() - {"max_seq_length"}
    assert not GOES_THROUGH & (OWNED_ARGS.keys() | OPTIONS.keys()) and names >= GOES_THROUGH


def test_fsdp2_averages_gradients_after_every_micro_batch(tmp_path: Path) -> None:
    def averages(sharding: Sharding) -> bool:
        kwargs = config_with(tmp_path, sharding=sharding).accelerator_config.gradient_accumulation_kwargs
        return bool(kwargs["sync_each_batch"])

    assert averages("fsdp2") and not averages("none")


def test_what_goes_through_arrives_and_nothing_is_added_to_the_loss(tmp_path: Path) -> None:
    config = config_with(tmp_path, neftune_noise_alpha=5, adam_beta2=0.9)
    assert (config.neftune_noise_alpha, config.adam_beta2) == (5, 0.9)
    assert (config.router_aux_loss_coef, config.loss_type, config.label_smoothing_factor) == (0.0, "nll", 0.0)
    assert config.average_tokens_across_devices is False


def test_what_goes_through_wins_over_what_the_kit_would_choose(tmp_path: Path) -> None:
    trainer_args = {"logging_nan_inf_filter": True, "logging_first_step": False, "ddp_broadcast_buffers": True}
    config, chosen = config_with(tmp_path, **trainer_args), config_with(tmp_path)
    assert {name: getattr(config, name) for name in trainer_args} == trainer_args
    assert {name: getattr(chosen, name) for name in trainer_args} == {
        name: not value for name, value in trainer_args.items()
    }


def test_what_the_kit_does_by_itself_is_left_to_nobody_else(tmp_path: Path) -> None:
    """An upload, and the removal of checkpoints, would come at another time and of other files."""
    config = config_with(tmp_path, {"push_to_hub": True, "save_total_limit": 2})
    assert (config.push_to_hub, config.save_total_limit) == (False, None)


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({}, "no"), ({"eval_fraction": 0.1}, "epoch"), ({"eval_dataset": ["e"]}, "epoch"),
        ({"eval_dataset": ["e"], "eval_steps": 5}, "steps"), ({"eval_fraction": 0.1, "eval_strategy": "no"}, "no"),
    ],
)  # fmt: skip
def test_rows_to_evaluate_are_evaluated(options: dict[str, Any], strategy: str, tmp_path: Path) -> None:
    assert config_with(tmp_path, options).eval_strategy.value == strategy


@pytest.mark.parametrize(
    ("method", "sharding", "kind", "expected"),
    [
        ("lora", "none", "none", None), ("lora", "none", "torch", {"use_reentrant": False}),
        ("lora", "zero3", "torch", {"use_reentrant": True}), ("full", "zero3", "torch", {"use_reentrant": False}),
    ],
)  # fmt: skip
def test_only_adapters_with_zero3_are_recomputed_in_the_reentrant_way(
    method: str, sharding: Sharding, kind: str, expected: dict[str, bool] | None, tmp_path: Path
) -> None:
    config = config_with(tmp_path, {"method": method, "gradient_checkpointing": kind}, sharding)
    assert (config.gradient_checkpointing, config.gradient_checkpointing_kwargs) == (kind != "none", expected)


def test_keywords_of_gradient_checkpointing_arrive(tmp_path: Path) -> None:
    trainer_args = {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    config = config_with(tmp_path, {"gradient_checkpointing": "torch"}, **trainer_args)
    assert config.gradient_checkpointing_kwargs == {"use_reentrant": True}


def test_what_is_accepted_is_known_to_the_libraries() -> None:
    inductor = torch._inductor.list_mode_options()
    assert set(TEXTS["torch_compile_mode"]) <= inductor.keys()
    assert set(TEXTS["log_level"]) == set(trainer_log_levels)


def test_types_are_read_from_the_source_as_python_sees_them() -> None:
    hints, read = typing.get_type_hints(TrainingArguments), sft_config_fields()
    for name in GOES_THROUGH - {"activation_offloading"}:
        parts = typing.get_args(hints[name]) or (hints[name],)
        type_names = {
            (typing.get_origin(part) or part).__name__ for part in parts if isinstance(part, type | types.GenericAlias)
        }
        assert read[name] <= type_names, name
    assert (read["adam_beta1"], read["optim_target_modules"]) == ({"float"}, {"str", "list"})
    assert (read["gradient_checkpointing_kwargs"], read["activation_offloading"]) == ({"dict"}, {"bool"})
    assert read["logging_strategy"] == set()


def test_a_compiler_that_torch_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"torch_compile_backend is 'inducter', but torch and accelerate know .*inductor"
    ):
        config_with(tmp_path, torch_compile_backend="inducter")
    assert config_with(tmp_path, torch_compile_backend="eager").torch_compile_backend == "eager"


def test_what_the_optimizer_does_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"adam_beta1 \S+ has no effect on optim sgd; remove it"):
        config_with(tmp_path, {"optim": "sgd"}, adam_beta1=0.9)
    assert config_with(tmp_path, adam_beta1=0.9).adam_beta1 == 0.9


@pytest.mark.parametrize("name", [str(kind.value) for kind in SchedulerType])
def test_every_schedule_works_or_is_refused_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    example = SCHEDULE_EXAMPLES.get(name)
    if example:
        with pytest.raises(
            UserError, match=rf"{name} does not work with lr_scheduler_kwargs left out .* give, for example"
        ):
            config_with(tmp_path, {"lr_scheduler_type": name})
    config_with(tmp_path, {"lr_scheduler_type": name, "eval_fraction": 0.1}, lr_scheduler_kwargs=example or {})


def test_a_keyword_that_a_schedule_does_not_take_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"cosine does not work with lr_scheduler_kwargs {'cycles': 2} \(.*'cycles'\); correct them"
    ):
        config_with(tmp_path, {"lr_scheduler_type": "cosine"}, lr_scheduler_kwargs={"cycles": 2})


def test_values_of_the_fields_own_types_go_through(tmp_path: Path) -> None:
    trainer_args: dict[str, Any] = {
        "eval_delay": 0,
        "log_level": "info",
        "neftune_noise_alpha": None,
        "debug": "underflow_overflow",
    }
    trainer_args |= {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "data_seed": 3}
    config = config_with(tmp_path, **trainer_args)
    assert (config.eval_delay, config.log_level, config.data_seed) == (0, "info", 3)


@pytest.mark.parametrize(
    ("schedule", "kwargs", "phrase"),
    [
        ("cosine", {"num_cycles": "x"}, "does not work with lr_scheduler_kwargs {'num_cycles': 'x'}"),
        ("polynomial", {"power": -1}, "does not work with lr_scheduler_kwargs {'power': -1}"),
        ("polynomial", {"lr_end": -0.001}, "(the learning rate becomes -"),
    ],
)
def test_keywords_that_a_schedule_reads_after_the_warm_up_are_tried(
    tmp_path: Path, schedule: str, kwargs: dict[str, Any], phrase: str
) -> None:
    with pytest.raises(UserError) as refused:
        config_with(tmp_path, {"lr_scheduler_type": schedule}, lr_scheduler_kwargs=kwargs)
    assert phrase in str(refused.value)
