"""Model FLOPs utilization: the work of a token as the plan counts it, and the peaks of GPUs by their names."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import DEMO_MODEL
from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.adapter.lora import lora_config
from unsloth_ddp.sizing.count import read_model_shape
from unsloth_ddp.training.shown.mfu import Utilization, flops_a_token, peak_flops


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("path", ["demo", "tied"])
def test_the_work_of_a_token_is_what_the_plan_counts(method, path, tiny_model, tmp_path) -> None:
    from peft import get_peft_model

    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL if path == "demo" else tiny_model)
    if path == "tied":
        model.config.tie_word_embeddings = True
        model.tie_weights()
    model.save_pretrained(tmp_path)
    settings = Settings(model=str(tmp_path), method=method)
    if method == "lora":
        model = get_peft_model(model, lora_config(settings, model))
    assert flops_a_token(model) == read_model_shape(settings).flops_a_token(method)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362.05e12),
        ("Tesla T4", 65e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 3090", 71.2e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12),
        ("NVIDIA GeForce RTX 5090 D v2", None),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA GB200", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA H20", None),
        ("CPU", None),
    ],
)
def test_a_gpu_is_known_by_its_exact_name(name: str, peak: float | None) -> None:
    assert peak_flops(name, "bf16") == peak
    assert peak_flops(name, "fp32") is None


def test_mfu_is_the_share_of_one_gpu() -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    work = flops_a_token(model)
    assert work is not None
    runtime = Runtime(Ranks(world_size=4), "transformers", "cuda", "bf16", "NVIDIA H200")
    assert Utilization(model, runtime).metrics(4e6) == {"mfu": pytest.approx(1e6 * work / 989e12)}
    runtime.device_name = "CPU"
    assert Utilization(model, runtime).metrics(4e6) == {}


def test_a_model_with_experts_or_images_has_none() -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    model.config.num_experts = 8
    assert flops_a_token(model) is None
    del model.config.num_experts
    model.config.vision_config = SimpleNamespace()
    assert flops_a_token(model) is None
    assert torch.is_tensor(model.get_output_embeddings().weight)
