"""What is read from this machine, and what a run will write to it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import DEMO_MODEL, REPO
from unsloth_ddp.config.options import Settings
from unsloth_ddp.preflight.between import bandwidth
from unsloth_ddp.preflight.checks import Finding, run_check, run_or_none, run_with_limit
from unsloth_ddp.preflight.node import disks, identity, machine, network

CONFIG = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "dtype": "bfloat16",
}  # fmt: skip


def test_an_adapter_is_not_larger_than_estimated(tiny_model):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    made = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    trainable = sum(p.numel() for p in made.parameters() if p.requires_grad)
    config = json.loads((tiny_model / "config.json").read_text())
    assert trainable <= disks.adapter_parameters(config, model.num_parameters(), 8, 0) < 4 * trainable


def test_weights_are_counted_as_they_lie_on_disk():
    config, weights = disks.read_model_size(Settings(model=str(DEMO_MODEL)))
    parameters = sum(t.numel() * t.element_size() for t in load_file(DEMO_MODEL / "model.safetensors").values())
    assert config is not None and config["hidden_size"] > 0
    assert parameters <= weights < parameters * 1.01


def test_a_run_of_full_parameters_writes_far_more_than_an_adapter():
    weights = 16 * 2**30
    lora = disks.estimate_run_bytes(Settings(method="lora"), CONFIG, weights)
    full = disks.estimate_run_bytes(Settings(method="full"), CONFIG, weights)
    # 8.6e9 parameters in fp32: three checkpoints (two kept, one being written) of weights and two states, and the end.
    assert full == pytest.approx((3 * 3 + 1) * 4 * weights / 2, rel=0.01)
    assert 1e9 < lora < full / 50
    merged = disks.estimate_run_bytes(Settings(method="lora", merge=True), CONFIG, weights)
    assert merged - lora == pytest.approx(weights)
    assert disks.estimate_run_bytes(Settings(method="full"), None, 0) == disks.UNKNOWN_MODEL["full"]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (Settings(save_total_limit=2), 3),
        (Settings(save_strategy="no"), 0),
        (Settings(save_total_limit=None, max_steps=100, save_steps=10), 10),
        (Settings(save_total_limit=None), disks.CHECKPOINTS_IF_UNLIMITED),
    ],
)
def test_how_many_checkpoints_are_on_disk_at_once(settings, kept):
    assert disks.count_checkpoints(settings) == kept


def test_a_port_in_use_names_its_holder():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert f"(pid {os.getpid()})" in str(network.find_port_holder(port))
    assert network.find_port_holder(port) is None


def test_names_are_resolved_and_known_to_be_here():
    assert network.is_here(["127.0.0.1"]) and not network.is_here(["192.0.2.1"])
    assert network.resolve_name("no-such-host.invalid") == []
    assert network.resolve_name("127.0.0.1") == ["127.0.0.1"]


def test_infiniband_is_read_as_the_kernel_words_it(tmp_path):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (port / "state").write_text("4: ACTIVE\n")
    (found,) = network.read_infiniband_ports(tmp_path)
    assert found == {"name": "mlx5_0:1", "rate": "400 Gb/sec (4X NDR)", "state": "4: ACTIVE", "link_layer": "unknown"}


def test_a_check_that_raises_or_hangs_is_a_warning(stuck):
    def broken() -> Finding:
        raise PermissionError("not for you")

    raised = run_check("disk", 1, broken)
    assert (raised.verdict, raised.values[1]) == ("warning", "not checked: PermissionError: not for you")
    began = time.monotonic()
    hung = run_check("disk", 1, stuck, seconds=0.2)
    assert (hung.verdict, time.monotonic() - began < 50) == ("warning", True)


def test_bounded_returns_raises_and_ends(stuck):
    assert run_with_limit(lambda: 3, 60) == 3
    with pytest.raises(KeyError):
        run_with_limit(lambda: {}[1], 60)
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        run_with_limit(stuck, 0.1)


def test_a_disk_that_hangs_is_not_waited_for(stuck, monkeypatch):
    assert run_or_none(lambda: 3, 60) == 3 and run_or_none(stuck, 0.1) is None
    monkeypatch.setattr(identity, "describe_data", lambda settings: stuck())
    found = identity.collect_identity(Settings(model=str(DEMO_MODEL)), {}, seconds=0)
    assert found["unknown"]["data"] == "TimeoutError: no answer within 1 s"
    assert found["settings"]["model"] == str(DEMO_MODEL)


def test_files_are_known_by_content(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(bytes(5000))
    before = identity.describe_data(Settings(dataset=[str(path)]))["dataset rows.jsonl"]["content"]
    assert before.startswith("1 file, 5,000 bytes, xxh3 ")
    path.write_bytes(bytes(4999) + b"x")
    assert identity.describe_data(Settings(dataset=[str(path)]))["dataset rows.jsonl"]["content"] != before


def test_a_models_files_are_known_by_content_and_checked(tmp_path):
    folder, base = (shutil.copytree(REPO / "demo/vision_model", tmp_path / name) for name in ("model", "base"))
    (tmp_path / "reference_model").mkdir()
    described = {"base_model_name_or_path": str(base), "peft_type": "LORA"}
    (tmp_path / "reference_model/adapter_config.json").write_text(json.dumps(described))
    save_file({"a": torch.zeros(1)}, tmp_path / "reference_model/adapter_model.safetensors")
    settings = Settings(model=str(folder), task="dpo", reference_model=str(tmp_path / "reference_model"))
    before = identity.describe_models(settings)
    names = {"chat_template.jinja", "config.json", "generation_config.json", "processor_config.json", "tokenizer.json"}
    names |= {"model.safetensors", "tokenizer_config.json"}
    adapter = {f"reference_model/adapter_{file}" for file in ("config.json", "model.safetensors")}
    assert before.keys() == names | {f"reference_base/{name}" for name in names} | adapter
    for changed, path in {
        "processor_config.json": folder / "processor_config.json",
        "reference_model/adapter_config.json": tmp_path / "reference_model/adapter_config.json",
    }.items():
        path.write_text(path.read_text() + " ")
        after = identity.describe_models(settings)
        assert {name for name in before if before[name] != after[name]} == {changed}
        before = after
    (folder / "model.safetensors").write_bytes(b"x")
    assert "model.safetensors is damaged" in identity.describe_models(Settings(model=str(folder)))["model"]["refused"]
    assert "missing" in identity.describe_models(Settings(model=str(tmp_path / "no" / "model")))["model"]


def test_a_folder_to_be_streamed_is_known_by_names_and_sizes_and_needs_no_cache(tmp_path):
    (tmp_path / "shards" / "a").mkdir(parents=True)
    for name in ("a/1.jsonl", "2.jsonl"):
        (tmp_path / "shards" / name).write_bytes(bytes(100))
    streamed = Settings(dataset=[str(tmp_path / "shards")], streaming=True, max_steps=1)
    before = identity.describe_data(streamed)["dataset shards"]
    assert before["content"].startswith("200 B, names and sizes")
    (tmp_path / "shards" / "2.jsonl").rename(tmp_path / "shards" / "3.jsonl")
    assert identity.describe_data(streamed)["dataset shards"] != before
    assert "missing" in identity.describe_data(Settings(dataset=streamed.dataset))["dataset shards"]
    file = str(tmp_path / "shards" / "3.jsonl")
    assert disks.read_data_sizes(Settings(dataset=[file], eval_dataset=[file])) == [100, 100]
    assert disks.read_data_sizes(Settings(dataset=[file], eval_dataset=[file], streaming=True)) == [100]


def test_hub_sources_are_known_by_the_caches_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "c0ffee" + "0" * 34
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "not in the Hub's cache" in identity.describe_models(Settings(model="a/b"))["model"]["refused"]
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert identity.describe_models(Settings(model="a/b")) == {"model": {"hub": None}}
    (tmp_path / "models--a--b" / "refs").mkdir(parents=True)
    (tmp_path / "models--a--b" / "refs" / "main").write_text(f"{commit}\n")
    assert identity.describe_models(Settings(model="a/b")) == {"model": {"hub": commit}}
    pinned = Settings(model="a/b", model_revision="d" * 40)
    assert identity.describe_models(pinned) == {"model": {"hub": "d" * 40}}
    rows = Settings(dataset=["o/r", "o/s"], dataset_revision=["e" * 40, "f" * 40])
    assert identity.describe_data(rows) == {"dataset r (1)": {"hub": "e" * 40}, "dataset s (2)": {"hub": "f" * 40}}


def test_secrets_do_not_leave_the_node(monkeypatch):
    # A secret in the options themselves is refused when they are parsed.
    settings = Settings(model=str(DEMO_MODEL), trainer_args={"adam_beta1": 0.8})
    found = identity.collect_identity(settings, {"UNSLOTH_API_KEY": "sk-123", "NCCL_DEBUG": "INFO", "HOME": "/root"})
    assert "sk-123" not in json.dumps(found)
    assert found["flags"] == {"NCCL_DEBUG": "INFO"}
    assert found["settings"]["trainer_args"]["adam_beta1"] == 0.8


def test_a_part_of_the_identity_that_fails_leaves_the_rest(monkeypatch):
    def broken(settings: Settings) -> dict:
        raise OSError("stale file handle")

    monkeypatch.setattr(identity, "describe_data", broken)
    found = identity.collect_identity(Settings(model=str(DEMO_MODEL)), {})
    assert found["unknown"] == {"data": "OSError: stale file handle"}
    assert found["versions"]["torch"] and "config.json" in found["model"]


class FakeProperties:
    """What torch.cuda.get_device_properties gives."""

    name, total_memory, major, minor = "NVIDIA H200", 150 * 10**9, 9, 0


def test_gpus_are_read_from_torch(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: FakeProperties())
    gpu = {"name": "NVIDIA H200", "memory": 150 * 10**9, "capability": "9.0"}
    assert machine.read_gpus(cpu=False) == ([gpu, gpu], "")
    assert machine.read_gpus(cpu=True) == ([], "")

    def broken() -> None:
        raise RuntimeError("Found no NVIDIA driver\non your system")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", broken)
    assert machine.read_gpus(cpu=False) == ([], "Found no NVIDIA driver on your system")


def test_a_stuck_driver_is_not_waited_for(monkeypatch, stuck):
    monkeypatch.setattr(machine, "query_gpus", stuck)
    monkeypatch.setattr(machine, "GPU_SECONDS", 0.1)
    assert machine.read_gpus(cpu=False)[1].startswith("TimeoutError")


@pytest.mark.parametrize(
    ("world", "per_node", "expected"),
    [
        (4, 2, {"inside": [[0, 1], [2, 3]], "between": [[0, 2]], "all": [[0, 1, 2, 3]]}),
        (4, 4, {"inside": [[0, 1, 2, 3]]}),
        (3, 1, {"between": [[0, 1, 2]]}),
    ],
)
def test_what_is_measured(world, per_node, expected):
    assert dict(bandwidth.scopes(world, per_node)) == expected
