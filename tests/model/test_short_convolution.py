"""Compare short convolutions within the rows of a pack with Transformers' own of one row."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.lfm2 import modeling_lfm2

from tests.tiny_models import tiny_model
from unsloth_ddp.data.order.collate import Flatten
from unsloth_ddp.model.packing import short_convolution
from unsloth_ddp.model.packing.row_check import rows_mix
from unsloth_ddp.model.packing.short_convolution import causal_convolution, convolve_within_rows, convolving_layers

TRANSFORMERS = inspect.unwrap(modeling_lfm2.causal_conv1d_fn)


@pytest.fixture(autouse=True)
def _own_function_again() -> Iterator[None]:
    kept = modeling_lfm2.causal_conv1d_fn
    yield
    modeling_lfm2.causal_conv1d_fn = kept


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_of_a_pack_is_the_row_alone(activation: str | None, biased: bool) -> None:
    torch.manual_seed(0)
    rows = [torch.randn(1, 6, length) for length in (5, 1, 9)]
    weight, bias = torch.randn(6, 3), torch.randn(6) if biased else None
    numbers = torch.tensor([[0] * 5 + [1] + [2] * 9])
    packed = causal_convolution(torch.cat(rows, dim=2), weight, bias, activation, seq_idx=numbers)
    alone = [TRANSFORMERS(row, weight, bias, activation) for row in rows]
    torch.testing.assert_close(packed, torch.cat(alone, dim=2))
    torch.testing.assert_close(causal_convolution(rows[2], weight, bias, activation), alone[2])


def test_16_bits_are_summed_in_32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 4, 12), torch.randn(4, 4)
    halves = [one.bfloat16() for one in (hidden, weight)]
    expected = TRANSFORMERS(*[half.float() for half in halves]).bfloat16()
    computed = causal_convolution(*halves)
    assert computed.dtype == torch.bfloat16
    torch.testing.assert_close(computed, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("family", "kind"), [("lfm2", "Lfm2ForCausalLM"), ("lfm2_moe", "Lfm2MoeForCausalLM")])
def test_rows_of_hybrid_models_stay_apart(family: str, kind: str) -> None:
    model: Any = tiny_model(family, kind).float()
    ids = np.arange(5, 200)
    assert rows_mix(model, Flatten("positions"), ids, "fp32") == "the loss of a row depends on the row before it"
    assert convolving_layers(model)
    convolve_within_rows(model)
    assert rows_mix(model, Flatten("positions", row_of_token=True), ids, "fp32") is None


def test_an_installed_kernel_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_convolution, "PACKAGE", "numpy")
    kept = modeling_lfm2.causal_conv1d_fn
    convolve_within_rows(tiny_model("lfm2", "Lfm2ForCausalLM"))
    assert modeling_lfm2.causal_conv1d_fn is kept
    monkeypatch.undo()
    convolve_within_rows(tiny_model("lfm2", "Lfm2ForCausalLM"))
    assert modeling_lfm2.causal_conv1d_fn is causal_convolution


def test_models_without_such_layers_have_none() -> None:
    assert convolving_layers(tiny_model("llama", "LlamaForCausalLM")) == []
