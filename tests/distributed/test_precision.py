"""Choose the precision that a run computes in: on a CPU, on GPUs with bf16, and on older ones (T4, V100)."""

from __future__ import annotations

import pytest
import torch

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed import runtime
from unsloth_ddp.distributed.precision import check_full_weights, choose_precision, has_bf16
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.loading.load import check_model
from unsloth_ddp.utils.errors import UserError


@pytest.fixture
def t4(monkeypatch):
    """Tell torch that the machine has T4s, with torch's own rule for bf16."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    properties = type("T4", (), {"major": 7, "minor": 5, "name": "Tesla T4", "total_memory": 15 * 2**30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.parametrize(
    ("wanted", "gpu", "bf16", "chosen"),
    [
        ("auto", None, False, "fp32"), ("auto", "T4", False, "fp16"), ("auto", "H100", True, "bf16"),
        ("fp16", "H100", True, "fp16"), ("bf16", None, False, "bf16"), ("fp32", "T4", False, "fp32"),
    ],
)  # fmt: skip
def test_auto_is_what_the_device_has(wanted, gpu, bf16, chosen):
    assert choose_precision(wanted, gpu, bf16) == chosen


def test_what_a_device_does_not_have_is_refused():
    with pytest.raises(UserError, match=r"precision bf16 is not supported by Tesla T4; use --precision fp16\."):
        choose_precision("bf16", "Tesla T4", False)
    with pytest.raises(UserError, match="precision fp16 needs a GPU"):
        choose_precision("fp16", None, False)
    assert [has_bf16(one) for one in ((7, 0), (7, 5), (8, 0), (12, 0))] == [False, False, True, True]


def test_a_t4_computes_in_fp16(t4):
    assert runtime._choose_precision("auto", True) == "fp16"
    with pytest.raises(UserError, match="bf16 is not supported by Tesla T4"):
        runtime._choose_precision("bf16", True)


def test_weights_in_16_bit_are_not_trained_in_fp16(t4, tiny_model):
    """Unsloth would load them in fp16, and the gradient scaler takes no fp16 gradients."""
    place = Runtime(Ranks(), "unsloth", "cuda", "fp16", "Tesla T4")
    with pytest.raises(UserError, match="full_weights bf16 needs precision bf16, and this run computes in fp16"):
        check_model(Settings(model=str(tiny_model), method="full", full_weights="bf16"), place)
    check_model(Settings(model=str(tiny_model), method="full"), place)
    check_full_weights("lora", "bf16", "fp16")


def test_flash_attention_is_refused_before_the_model_is_loaded(t4, tiny_model):
    place = Runtime(Ranks(), "transformers", "cuda", "fp16", "Tesla T4")
    with pytest.raises(
        UserError, match=r"flash_attention_2 needs compute capability 8\.0, which Tesla T4 does not have"
    ):
        check_model(Settings(model=str(tiny_model), attn_implementation="flash_attention_2"), place)
