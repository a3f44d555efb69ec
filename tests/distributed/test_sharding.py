"""Which sharding the launcher asks for, and which pairs are refused; what it computes is shown on GPUs."""

from __future__ import annotations

import json

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from tests.conftest import REPO
from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed import sharding as module
from unsloth_ddp.distributed.sharding import (
    check_sharding,
    complete_environment,
    sharding_from_environment,
    sharding_warnings,
)
from unsloth_ddp.utils.errors import UserError


def launched(name: str) -> dict[str, str]:
    """The environment that accelerate launch gives a process for one of the kit's configs."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    config = str(REPO / "accelerate_configs" / f"{name}.yaml")
    words = ["--config_file", config, "--num_processes", "2", "train_ddp.py"]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    # Set by launch_command itself, which would go on to start the processes.
    args.deepspeed_fields_from_accelerate_config = ""
    return prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)


@pytest.mark.parametrize(
    ("name", "expected"), [("ddp", "none"), ("zero2", "zero2"), ("zero3", "zero3"), ("fsdp2",) * 2]
)
def test_each_config_is_read_back_from_what_accelerate_launch_sets(name, expected):
    environ = launched(name)
    assert sharding_from_environment(environ) == expected
    # Or the launcher's numbers would contradict those of the batch plan.
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in environ or "zero" not in name
    assert "ACCELERATE_GRADIENT_CLIPPING" not in environ or "zero" not in name


def test_unsloths_switch_means_what_the_config_does():
    environ = {"UNSLOTH_FSDP2": "1", "FSDP_RESHARD_AFTER_FORWARD": "false"}
    complete_environment(sharding_from_environment(environ), environ)
    expected = launched("fsdp2")
    for name in module.FSDP2_ENVIRONMENT:
        assert environ[name] == ("false" if name == "FSDP_RESHARD_AFTER_FORWARD" else expected[name]), name


def test_a_deepspeed_config_file_is_read(tmp_path):
    path = tmp_path / "zero.json"
    environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    assert sharding_from_environment(environ) == "zero3"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    with pytest.raises(UserError, match=r"stage 1 is not supported; use accelerate_configs/zero2.yaml"):
        sharding_from_environment(environ)
    for broken in ("[]", "{", '{"zero_optimization": 3}'):
        path.write_text(broken)
        with pytest.raises(UserError, match=f"{path} cannot be read"):
            sharding_from_environment(environ)


def test_fsdp1_is_refused():
    with pytest.raises(UserError, match=r"FSDP version 1 is.*fsdp2\.yaml"):
        sharding_from_environment({"ACCELERATE_USE_FSDP": "true"})


def settings(**options) -> Settings:
    return Settings(model="m", dataset=["d"], **options)


@pytest.mark.parametrize(
    ("sharding", "options", "device", "processes", "reason"),
    [
        ("zero2", {}, "cpu", 2, "needs GPUs"),
        ("fsdp2", {}, "cuda", 1, "one process was started"),
        ("zero3", {"method": "qlora"}, "cuda", 2, "packed 4-bit weights; use fsdp2, or zero2"),
        ("zero3", {"gradient_checkpointing": "unsloth"}, "cuda", 2, "use --gradient_checkpointing torch"),
        ("fsdp2", {"gradient_checkpointing": "unsloth"}, "cuda", 2, "use --gradient_checkpointing torch"),
        ("zero3", {"method": "full"}, "cuda", 2, "use --backend transformers, or sharding fsdp2"),
    ],
)
def test_pairs_that_do_not_exist_are_refused_with_the_reason(monkeypatch, sharding, options, device, processes, reason):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UserError, match=reason):
        check_sharding(sharding, settings(**options), device, "unsloth", processes)


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3", "fsdp2"])
def test_every_other_pair_is_let_through(monkeypatch, sharding, method):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    if (sharding, method) != ("zero3", "qlora"):
        backend = "transformers" if (sharding, method) == ("zero3", "full") else "unsloth"
        check_sharding(sharding, settings(method=method), "cuda", backend, 2)


def test_fsdp2_runs_on_cpu_processes_too() -> None:
    check_sharding("fsdp2", settings(), "cpu", "transformers", 2)
    assert module.loads_in_shards("fsdp2", "transformers")
    assert not module.loads_in_shards("fsdp2", "unsloth")
    assert not module.loads_in_shards("zero3", "transformers")


def test_missing_deepspeed_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="uv sync --extra deepspeed"):
        check_sharding("zero2", settings(), "cuda", "unsloth", 2)


def test_what_has_no_effect_is_said():
    assert sharding_warnings("none", settings(compare_answers=5), 4) == []
    assert sharding_warnings("zero2", settings(compare_answers=5), 4) == []
    assert "compare_answers is ignored" in sharding_warnings("fsdp2", settings(compare_answers=5), 1)[0]
    assert "ZeRO-3 over 2 nodes" in sharding_warnings("zero3", settings(), 2)[0]
    assert "full_weights bf16" in sharding_warnings("zero2", settings(method="full", full_weights="bf16"), 1)[0]


@pytest.mark.parametrize("path", sorted((REPO / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_takes_every_key(path):
    config = load_config_from_file(str(path))
    assert set(yaml.safe_load(path.read_text())) <= set(vars(config))
