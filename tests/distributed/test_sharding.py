"""Which sharding the launcher asks for, and which pairs are refused; what it computes is shown on GPUs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from tests.conftest import REPO
from tests.ranks import run_ranks
from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed import sharding as module
from unsloth_ddp.distributed.ranks import ranks_from_environment
from unsloth_ddp.distributed.runtime import started
from unsloth_ddp.distributed.sharding import (
    check_offload,
    check_sharding,
    complete_environment,
    copies_from_environment,
    describe_sharding,
    offload_from_environment,
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


@pytest.mark.parametrize("sharding", ["zero2", "zero3", "fsdp2"])
def test_an_offload_config_is_its_sharding_with_parts_in_host_memory(sharding):
    environ, plain = launched(f"{sharding}_offload"), launched(sharding)
    expected = "optimizer" if sharding == "zero2" else "parameters"
    assert (sharding_from_environment(environ), offload_from_environment(environ)) == (sharding, expected)
    assert offload_from_environment(plain) == "none"
    changed = {name for name in environ if environ[name] != plain.get(name)}
    assert (
        changed
        == {
            "zero2": {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"},
            "zero3": {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"},
            "fsdp2": {"FSDP_OFFLOAD_PARAMS"},
        }[sharding]
    )


def test_accelerate_reads_the_policy_from_the_environment(monkeypatch):
    from accelerate import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    for name in ("fsdp2", "fsdp2_offload"):
        environ = {
            key: value for key, value in launched(name).items() if key.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))
        }
        for key, value in environ.items():
            monkeypatch.setenv(key, value)
        policy = FullyShardedDataParallelPlugin().cpu_offload
        assert isinstance(policy, CPUOffloadPolicy) == name.endswith("offload")


def test_offload_in_a_deepspeed_config_file_is_read(tmp_path):
    path = tmp_path / "zero.json"
    environ = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}

    def offload(**section):
        path.write_text(json.dumps({"zero_optimization": section}))
        return offload_from_environment(environ)

    cpu = {"device": "cpu"}
    assert offload(stage=2) == offload(stage=3, offload_param={"device": "none"}) == "none"
    assert offload(stage=2, offload_optimizer=cpu) == "optimizer"
    assert offload(stage=3, offload_optimizer=cpu, offload_param=cpu) == "parameters"
    for section, reason in (
        (
            {"stage": 3, "offload_optimizer": {"device": "nvme"}},
            "offload_optimizer_device nvme is not supported; use cpu",
        ),
        ({"stage": 2, "offload_optimizer": cpu, "offload_param": cpu}, "ZeRO-2 keeps the weights whole"),
        ({"stage": 3, "offload_param": cpu}, "without offload_optimizer_device cpu is not supported"),
    ):
        with pytest.raises(UserError, match=reason):
            offload(**section)


@pytest.mark.parametrize(
    ("offload", "sharding", "options", "reason"),
    [
        ("parameters", "fsdp2", {"method": "qlora"}, "have no CPU kernels; use accelerate_configs/fsdp2.yaml"),
        ("parameters", "fsdp2", {"optim": "paged_adamw_8bit"}, "optim paged_adamw_8bit needs a GPU, but"),
        # accelerate would train with Adam instead, and say nothing.
        ("optimizer", "zero2", {"optim": "sgd"}, "optim sgd cannot be combined with an optimizer in host memory"),
        ("optimizer", "zero2", {}, r"no C\+\+ compiler \(no-such-compiler\); install g\+\+"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_host_memory_is_refused(monkeypatch, offload, sharding, options, reason):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match=reason):
        check_offload(offload, sharding, settings(**options))


def test_host_memory_needs_gpus_to_compute_on():
    check_offload("none", "fsdp2", settings(), "cpu")
    with pytest.raises(
        UserError, match=r"fsdp2 with parameters in host memory needs GPUs.*use accelerate_configs/fsdp2.yaml"
    ):
        check_offload("parameters", "fsdp2", settings(), "cpu")


def test_other_settings_go_with_host_memory_and_the_table_says_so(monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/usr/bin/{name}")
    check_offload("none", "none", settings(method="qlora"))
    check_offload("optimizer", "zero2", settings(method="qlora"))
    for sharding in ("zero3", "fsdp2"):
        check_offload("parameters", sharding, settings())
    assert describe_sharding("zero2", "none") == "zero2"
    assert describe_sharding("zero3", "parameters") == "zero3, parameters and optimizer in host memory"


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("UNSLOTH_TP_SIZE", "2"),
        ("UNSLOTH_PP_SIZE", "2"),
        ("UNSLOTH_FSDP2", "native"),
        ("UNSLOTH_FSDP2_BACKEND", "Native"),
    ],
)
def test_unsloth_does_not_split_the_model_itself(name, value):
    with pytest.raises(UserError, match=rf"{name}={value} lets Unsloth split the model.*unset it"):
        sharding_from_environment({name: value})


def test_every_variable_that_splits_a_model_in_unsloth_is_refused():
    root = Path(importlib.util.find_spec("unsloth").origin).parent
    texts = (path.read_text(encoding="utf-8") for path in root.rglob("*.py"))
    read = {name for text in texts for name in re.findall(r"UNSLOTH_[A-Z]+_SIZE\b|UNSLOTH_FSDP2(?:_BACKEND)?\b", text)}
    assert "UNSLOTH_FSDP2" in read and read <= module.SPLITS_OF_UNSLOTH.keys()


@pytest.mark.parametrize(
    ("environ", "sharding"),
    [
        ({"UNSLOTH_TP_SIZE": "1", "UNSLOTH_PP_SIZE": ""}, "none"),
        ({"UNSLOTH_FSDP2": "1", "UNSLOTH_FSDP2_BACKEND": "accelerate"}, "fsdp2"),
    ],
)
def test_values_that_split_nothing_stay(environ, sharding):
    assert sharding_from_environment(environ) == sharding


PARALLELISM = "PARALLELISM_CONFIG_"


def copies(processes: int, nodes: int, **sizes: str) -> int:
    environ = {"UNSLOTH_FSDP2": "1", **{PARALLELISM + name: size for name, size in sizes.items()}}
    return copies_from_environment(environ, processes, nodes)


def test_the_hybrid_config_makes_one_copy_a_node():
    environ = launched("fsdp2_hybrid")
    assert {name for name in environ if environ[name] != launched("fsdp2").get(name)} == {
        "ACCELERATE_USE_PARALLELISM_CONFIG", *(name for name in environ if name.startswith(PARALLELISM))
    }  # fmt: skip
    assert sharding_from_environment(environ) == "fsdp2"
    assert [copies_from_environment(environ, nodes * 4, nodes) for nodes in (1, 2, 3)] == [1, 2, 3]
    # accelerate itself would take the word for a number.
    complete_environment("fsdp2", environ)
    assert "ACCELERATE_USE_PARALLELISM_CONFIG" not in environ


def test_sizes_of_parallelism_config_are_copies_and_parts():
    assert copies(8, 2) == copies(8, 2, DP_SHARD_SIZE="8") == 1
    assert copies(8, 2, DP_REPLICATE_SIZE="4") == copies(8, 2, DP_REPLICATE_SIZE="4", DP_SHARD_SIZE="2") == 4
    assert copies(6, 3, DP_REPLICATE_SIZE="nodes", DP_SHARD_SIZE="2", TP_SIZE="1", CP_BACKEND="torch") == 3
    assert describe_sharding("fsdp2", "none", 2, 8) == "fsdp2, 2 copies, each split over 4 processes"
    with pytest.raises(UserError, match="dp_replicate_size 2 with parameters in host memory has not been tried"):
        copies_from_environment({**launched("fsdp2_hybrid"), "FSDP_OFFLOAD_PARAMS": "true"}, 8, 2)
    # Refused as one process with FSDP2.
    assert copies(1, 1, DP_REPLICATE_SIZE="2") == 1
    with pytest.raises(UserError, match="one process was started"):
        check_sharding("fsdp2", settings(), "cuda", 1)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"DP_REPLICATE_SIZE": "3"}, "dp_replicate_size 3 does not fit 8 processes on 2 nodes.* use .*hybrid.yaml"),
        ({"DP_REPLICATE_SIZE": "2", "DP_SHARD_SIZE": "2"}, "_size 2 x dp_shard_size 2 does not fit 8 processes"),
        ({"DP_SHARD_SIZE": "4"}, "dp_shard_size 4 does not fit 8 processes"),
        ({"DP_REPLICATE_SIZE": "8"}, "leaves one of 8 processes for each replica .*fsdp2.yaml, or .* multi_node.yaml"),
        ({"DP_REPLICATE_SIZE": "two"}, "dp_replicate_size is two, but it takes a whole number above 0, or nodes"),
        ({"DP_SHARD_SIZE": "-1"}, "dp_shard_size is -1, but it takes a whole number above 0.$"),
        ({"TP_SIZE": "2"}, "parallelism_config with tp_size 2 is not supported with sharding fsdp2; use"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(sizes, reason):
    with pytest.raises(UserError, match=reason):
        copies(8, 2, **sizes)


def say_refusals() -> None:
    """Start with sizes that are wrong everywhere, then with a size or an option of which each node has its own."""
    rank = int(os.environ["RANK"])
    for size, rate in (("3", 0.1), ("nodes" if rank < 2 else "1", 0.1), ("1", 0.1 if rank < 2 else 0.2)):
        os.environ[PARALLELISM + "DP_REPLICATE_SIZE"] = size
        chosen = settings(use_cpu=True, learning_rate=rate)
        with pytest.raises(UserError) as refused, started(chosen, ranks_from_environment()):
            pass
        print(f"refused: {refused.value}")


def test_every_rank_says_the_same_sentence(tmp_path):
    result = run_ranks(
        4, say_refusals, folder=tmp_path, environ={"UNSLOTH_FSDP2": "1"},
        environ_of=lambda rank: {"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"},
    ).check()  # fmt: skip
    said = [[line for line in output.splitlines() if line.startswith("refused")] for output in result.outputs]
    assert said[0] == said[1] == said[2] == said[3]
    assert "dp_replicate_size 3 does not fit 4 processes on 2 nodes" in said[0][0]
    assert "rank 2 " in said[0][1]
    assert (
        "was started with sharding fsdp2 instead of fsdp2, 2 copies, each split over 2 processes as rank 0"
        in said[0][1]
    )
    assert "rank 2 " in said[0][2] and "was started with another --learning_rate as rank 0" in said[0][2]


@pytest.mark.parametrize("name", ["zero2", "zero3", "ddp"])
def test_copies_go_with_fsdp2_only(name):
    environ = {**launched(name), "ACCELERATE_USE_PARALLELISM_CONFIG": "true", PARALLELISM + "DP_REPLICATE_SIZE": "2"}
    sharding = "none" if name == "ddp" else name
    with pytest.raises(UserError, match=f"dp_replicate_size 2 is not supported with sharding {sharding}; use"):
        sharding_from_environment(environ)
    # Without accelerate's switch the sizes mean nothing.
    del environ["ACCELERATE_USE_PARALLELISM_CONFIG"]
    assert sharding_from_environment(environ) == sharding


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
    ],
)
def test_pairs_that_do_not_exist_are_refused_with_the_reason(monkeypatch, sharding, options, device, processes, reason):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UserError, match=reason):
        check_sharding(sharding, settings(**options), device, processes)


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3", "fsdp2"])
def test_another_reference_is_loaded_whole_or_by_fsdp2(monkeypatch, sharding, method):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    with_reference = settings(method=method, task="dpo", reference_model="other")
    if sharding in ("none", "fsdp2"):
        check_sharding(sharding, with_reference, "cuda", 2)
        # Of a stream it computes each step.
        with_reference = dataclasses.replace(with_reference, streaming=True)
    if sharding == "none":
        check_sharding(sharding, with_reference, "cuda", 2)
        return
    with pytest.raises(UserError, match=f"reference_model other does not work with sharding {sharding}"):
        check_sharding(sharding, with_reference, "cuda", 2)


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3", "fsdp2"])
def test_every_other_pair_is_let_through(monkeypatch, sharding, method):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: object())
    if (sharding, method) != ("zero3", "qlora"):
        check_sharding(sharding, settings(method=method), "cuda", 2)


def test_fsdp2_runs_on_cpu_processes_too() -> None:
    check_sharding("fsdp2", settings(), "cpu", 2)
    assert module.loads_in_shards("fsdp2", "transformers")
    assert not module.loads_in_shards("fsdp2", "unsloth")
    assert not module.loads_in_shards("none", "transformers")
    assert not module.loads_in_shards("zero3", "transformers")


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw_8bit", "paged_adamw_32bit", "lion_32bit", "rmsprop_bnb"])
def test_fsdp2_refuses_optimizers_that_read_whole_weights(optimizer: str) -> None:
    with pytest.raises(UserError, match=f"optim {optimizer} cannot be combined with sharding fsdp2"):
        check_sharding("fsdp2", settings(optim=optimizer), "cuda", 2)
    check_sharding("fsdp2", settings(optim="adamw_torch_8bit"), "cuda", 2)
    check_sharding("none", settings(optim=optimizer), "cuda", 2)


def test_missing_deepspeed_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="uv sync --extra deepspeed"):
        check_sharding("zero2", settings(), "cuda", 2)


def test_what_has_no_effect_or_is_slow_is_said():
    for kind in ("none", "zero2"):
        assert sharding_warnings(kind, settings(compare_answers=5), 4) == []
    assert "compare_answers is ignored" in sharding_warnings("fsdp2", settings(compare_answers=5), 1)[0]
    said = [len(sharding_warnings("fsdp2", settings(), *of)) for of in ((1, 1), (2, 1), (2, 2), (2, 4), (4, 2))]
    assert said == [0, 1, 0, 0, 1]
    assert "use fsdp2_hybrid.yaml where it fits on a node" in sharding_warnings("fsdp2", settings(), 2)[0]
    assert "zero3 over 2 nodes" in (zero3 := sharding_warnings("zero3", settings(), 2)[0]) and "use zero2.yaml" in zero3
    assert "full_weights bf16" in sharding_warnings("zero2", settings(method="full", full_weights="bf16"), 1)[0]


@pytest.mark.parametrize("path", sorted((REPO / "accelerate_configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_takes_every_key(path):
    config = load_config_from_file(str(path))
    assert set(yaml.safe_load(path.read_text())) <= set(vars(config))
