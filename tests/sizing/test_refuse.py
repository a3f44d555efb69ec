"""Test that a run is refused for memory only if its weights alone are too much, on every rank and before a download."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.conftest import DEMO_MODEL
from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.ranks import Ranks, this_location
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.plan.compute import OFFLOADS, is_supported
from unsloth_ddp.sizing import refuse
from unsloth_ddp.sizing.count import read_model_shape
from unsloth_ddp.sizing.estimate import Workload, estimate_memory
from unsloth_ddp.sizing.refuse import certain_tensors, check_memory, least_bytes
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.memory_limits import BYTES_PACKED

SETTINGS = {"model": str(DEMO_MODEL), "dataset": ["d"], "optim": "adamw_torch"}
# 1000 values in a layer's matrix, 100 in the embedding, 10 that are no matrix.
TENSORS = [("l.weight", "BF16", [100, 10]), ("embed.weight", "BF16", [10, 10]), ("norm", "F32", [10])]


def runtime(**options: Any) -> Runtime:
    ranks = Ranks(rank=0, local_rank=0, world_size=4, local_world_size=2)
    created = Runtime(ranks, "transformers", "cuda", "bf16", "GPU", **options)
    created.locations.append(this_location(ranks))
    return created


@pytest.mark.parametrize(
    ("method", "options", "gpu", "host"),
    [
        ("lora", {}, 1110 * 2, 0),
        ("lora", {"sharding": "fsdp2"}, 1110 * 2 / 4, 0),
        ("lora", {"sharding": "fsdp2", "copies": 2}, 1110 * 2 / 2, 0),
        ("lora", {"sharding": "zero2"}, 1110 * 2, 0),
        ("lora", {"sharding": "zero3"}, 1110 * 2 / 4, 0),
        ("qlora", {}, 1000 * BYTES_PACKED + 110 * 2, 0),
        # fp32 weights, gradients and two states of Adam.
        ("full", {}, 1110 * 16, 0),
        ("full", {"sharding": "fsdp2"}, 1110 * 16 / 4, 0),
        # 16-bit weights; gradients, copies and states in fp32.
        ("full", {"sharding": "zero2"}, 1110 * (2 + 16 / 4), 0),
        ("full", {"sharding": "zero2", "offload": "optimizer"}, 1110 * 2, 1110 * 16 / 4 * 2),
        ("full", {"sharding": "zero3", "offload": "parameters"}, 0, 1110 * 18 / 4 * 2),
        # A part passes through the GPU.
        ("lora", {"sharding": "fsdp2", "offload": "parameters"}, 1110 * 2 / 4, 1110 * 2 / 4 * 2),
    ],
)
def test_weights_gradients_and_states_count(method: Any, options: dict[str, Any], gpu: float, host: float) -> None:
    needed = least_bytes(TENSORS, Settings(**SETTINGS, method=method), runtime(**options))
    assert needed == pytest.approx((gpu, host), abs=1)


def test_weights_that_are_packed_or_in_fp8_are_not_counted_larger() -> None:
    eight = [("l.weight", "F8_E4M3", [100, 10]), ("k.weight", "U8", [500, 1])]
    assert least_bytes(eight, Settings(**SETTINGS), runtime())[0] == 1500
    assert least_bytes(TENSORS, Settings(**SETTINGS, fp8=True), runtime())[0] == 1110
    # bitsandbytes packs them if they are read.
    assert least_bytes(eight[:1], Settings(**SETTINGS, method="qlora"), runtime())[0] == 515
    assert least_bytes([], Settings(**SETTINGS), runtime()) == (0, 0)


def test_what_paged_optimizers_can_move_is_not_counted() -> None:
    paged = Settings(**{**SETTINGS, "optim": "paged_adamw_8bit"}, method="full")
    assert least_bytes(TENSORS, paged, runtime())[0] == 1110 * 8


@pytest.mark.parametrize(
    "optim", ["galore_adamw", "apollo_adamw", "galore_adamw_8bit", "schedule_free_sgd", "an_optimizer_of_tomorrow"]
)
def test_states_that_an_optimizer_may_not_keep_for_every_weight_are_not_counted(optim: str) -> None:
    full = Settings(**{**SETTINGS, "optim": optim}, method="full", full_weights="bf16")
    assert least_bytes(TENSORS, full, runtime())[0] == 1110 * 4


@pytest.mark.parametrize(
    ("config", "read"),
    [
        ({}, ["embed", "model.layers.1.w", "model.layers.2.w"]),
        ({"num_hidden_layers": 2, "tie_word_embeddings": True}, ["embed", "model.layers.1.w"]),
        ({"num_hidden_layers": 2, "tie_word_embeddings": False}, ["embed", "model.layers.1.w", "lm_head.weight"]),
        (
            {"num_hidden_layers": 9, "text_config": {"num_hidden_layers": 2, "tie_word_embeddings": False}},
            ["embed", "model.layers.1.w", "lm_head.weight"],
        ),
        (
            {"tie_word_embeddings": False, "text_config": {"num_hidden_layers": 2, "tie_word_embeddings": True}},
            ["embed", "model.layers.1.w"],
        ),
        ({"num_hidden_layers": None, "text_config": None}, ["embed", "model.layers.1.w", "model.layers.2.w"]),
    ],
)
def test_what_loading_may_leave_out_is_not_counted(config: dict[str, Any], read: list[str]) -> None:
    names = ["embed", "model.layers.1.w", "model.layers.2.w", "lm_head.weight"]
    names += ["mtp.layers.0.w", "model.mtp_layers.0.w", "model.visual.blocks.0.w", "vision_tower.w", "audio_tower.w"]
    certain = certain_tensors([(name, "BF16", [1]) for name in names], config)
    assert [name for name, _, _ in certain] == read


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_the_plan_never_estimates_less(method: Any) -> None:
    settings = Settings(**SETTINGS, method=method)
    shape = read_model_shape(settings)
    tensors = refuse.read_tensors(settings)
    ways: list[Any] = [(s, "none") for s in ("none", "zero2", "zero3", "fsdp2")]
    for sharding, offload in (way for way in [*ways, *OFFLOADS] if is_supported(method, *way)):
        work = Workload(1, 2, 4, "adamw_torch", "torch", 4, "transformers", offload=offload)
        planned = estimate_memory(shape, method, sharding, work)
        gpu, host = least_bytes(tensors, settings, runtime(sharding=sharding, offload=offload))
        # The least counts the constants of 4-bit weights generously.
        assert gpu <= planned.total * 1.05 and host <= planned.host * 2 * 1.05, (sharding, offload)


def gpus_of(monkeypatch: pytest.MonkeyPatch, total: int, host: int | None) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, total))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 0.5)
    monkeypatch.setattr(refuse, "available_bytes", lambda: host)


def test_the_sentence_names_both_sizes_and_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    # The demo's model has 966,144 values.
    settings = Settings(**SETTINGS)
    gpus_of(monkeypatch, 966_144 * 4, 966_143)
    check_memory(settings, runtime())
    offloaded = runtime(sharding="fsdp2", offload="parameters")
    with pytest.raises(UserError) as refused:
        check_memory(settings, offloaded)
    assert (
        "method lora with fsdp2, parameters and optimizer in host memory needs at least 943.5 KiB on every node, and "
        "943.5 KiB are available to rank 0"
    ) in str(refused.value)
    assert str(refused.value).endswith("; use more nodes, or accelerate_configs/fsdp2.yaml with more GPUs.")
    gpus_of(monkeypatch, 966_144 * 4 - 2, None)
    with pytest.raises(
        UserError, match=r"method lora without sharding needs at least 1.8 MiB on every GPU, and rank 0 "
    ):
        check_memory(settings, runtime())
    check_memory(settings, offloaded)
    # Layers that the model's class does not read.
    with monkeypatch.context() as patch:
        patch.setattr(refuse, "read_model_file", lambda *_: {"num_hidden_layers": 0})
        check_memory(settings, runtime())
    # A CPU run has no GPU's memory to fill.
    cpu = runtime()
    cpu.device_type = "cpu"
    gpus_of(monkeypatch, 0, 0)
    check_memory(settings, cpu)


def test_another_reference_model_counts_while_both_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(**SETTINGS, task="dpo", reference_model=str(DEMO_MODEL), full_weights="bf16")
    gpus_of(monkeypatch, 2 * 966_144 * 4 - 2, None)
    with pytest.raises(UserError, match=rf"model {DEMO_MODEL} beside reference_model {DEMO_MODEL} does not fit: "):
        check_memory(settings, runtime())
    gpus_of(monkeypatch, 2 * 966_144 * 4, None)
    check_memory(settings, runtime())
    # Each of four GPUs has a quarter of both with FSDP2.
    gpus_of(monkeypatch, 2 * 966_144 - 2, None)
    with pytest.raises(UserError, match="beside reference_model"):
        check_memory(settings, runtime(sharding="fsdp2"))
    gpus_of(monkeypatch, 2 * 966_144, None)
    check_memory(settings, runtime(sharding="fsdp2"))
    # The trained model alone needs more later, with gradients and two states.
    full = dataclasses.replace(settings, method="full")
    gpus_of(monkeypatch, 2 * 966_144 * 8 - 2, None)
    with pytest.raises(UserError, match=rf"model {DEMO_MODEL} does not fit: method full"):
        check_memory(full, runtime())
    # Of a stream it stays beside them.
    gpus_of(monkeypatch, 2 * 966_144 * 10 - 2, None)
    with pytest.raises(UserError, match=rf"model {DEMO_MODEL} beside reference_model {DEMO_MODEL} does not fit: "):
        check_memory(dataclasses.replace(full, streaming=True), runtime())
    check_memory(full, runtime())
