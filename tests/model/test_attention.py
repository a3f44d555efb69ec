"""Test which attention kernel is selected for packed rows, with stand-ins for Unsloth and the GPU."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.data.test_packing import KV, make
from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.packing import PackingDecision
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.compile_options import BLOCK_COMPILE
from unsloth_ddp.model.packing import attention, varlen
from unsloth_ddp.utils.errors import UserError


def found_by_unsloth() -> Any:
    """Evaluate Unsloth's `_TORCH_VARLEN_ATTN` from its source, since Unsloth cannot be imported without a GPU."""
    spec = importlib.util.find_spec("unsloth")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "utils" / "attention_dispatch.py").read_text(encoding="utf-8"))
    name = "_TORCH_VARLEN_ATTN"
    [value] = [n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name]
    called = ast.unparse(value.value.func) if isinstance(value.value, ast.Call) else ""
    made = [n for n in tree.body if n is value or (isinstance(n, ast.FunctionDef) and n.name == called)]
    namespace: dict[str, Any] = {"torch": torch, "os": __import__("os")}
    exec(compile(ast.Module(made, []), "attention_dispatch.py", "exec"), namespace)
    return namespace[name]


def stand_in_for_unsloth(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Give an import of Unsloth's attention dispatch, which selects `backend` and found the kernels of this machine."""
    dispatch = ModuleType("unsloth.utils.attention_dispatch")
    dispatch.XFORMERS, dispatch.FLASH_VARLEN = "xformers", "flash_varlen"  # type: ignore[attr-defined]
    dispatch.select_attention_backend = lambda use_varlen: backend  # type: ignore[attr-defined]
    dispatch._TORCH_VARLEN_ATTN = found_by_unsloth()  # type: ignore[attr-defined]
    utils = ModuleType("unsloth.utils")
    utils.attention_dispatch = dispatch  # type: ignore[attr-defined]
    for module in (ModuleType("unsloth"), utils, dispatch):
        monkeypatch.setitem(sys.modules, module.__name__, module)


class QAttention(torch.nn.Linear):
    """Stand in for an attention layer whose forward pass is Unsloth's."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    forward.__module__ = "unsloth.models.qwen3"


@pytest.mark.parametrize(
    ("switch", "flash", "there"),
    [("1", True, True), ("off", True, False), ("0", True, False), ("1", False, False)],
)
def test_torchs_kernel_is_used_where_unsloth_found_it(
    switch: str, flash: bool, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNSLOTH_TORCH_VARLEN", switch)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: flash)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    stand_in_for_unsloth(monkeypatch, "sdpa")
    model = QAttention(1, 1)
    model.config = transformers.Qwen3Config(head_dim=128, attn_implementation="sdpa")  # type: ignore[assignment]
    setup = attention._attention_setup(Settings(model="m"), Runtime(Ranks(), "unsloth", "cuda", "bf16", "H200"), model)
    assert setup.torch_varlen is there
    assert attention.select_varlen_kernel(setup) == ("torch's varlen_attn" if there else None)


def test_the_largest_head_counts_where_layers_differ() -> None:
    config = transformers.Gemma4TextConfig(num_hidden_layers=6)
    with pytest.raises(RuntimeError):
        _ = config.head_dim
    assert attention._largest_head(config) == 512


@pytest.mark.parametrize(
    ("name", "asked", "packed"), [("Qwen3", None, True), ("Qwen3", "sdpa", False), ("Nemotron", None, False)]
)
def test_attention_of_transformers_uses_the_selected_kernel(
    name: str, asked: str | None, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(varlen, "is_available", lambda: True)
    model = make(name, **KV, head_dim=16)
    model.set_attn_implementation("sdpa")
    runtime = Runtime(Ranks(), "transformers", "cuda", "bf16", "H200")
    choice = attention.choose_packing(Settings(model="m", attn_implementation=asked), runtime, model)
    assert choice.packed is packed
    assert (model.config._attn_implementation == varlen.NAME) is packed
    assert attention.keys_for_packs(runtime, model) == ("flash" if packed else "positions")
    if asked:
        assert choice.reason == "backend transformers (bf16, sdpa) has no attention kernel for packed rows"


@pytest.mark.parametrize("xformers", [False, True])
def test_a_t4_packs_with_xformers_only(xformers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's kernel is flash attention, which needs compute capability 8; xformers has one for 7.5."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    stand_in_for_unsloth(monkeypatch, "xformers" if xformers else "sdpa")
    model = make("Qwen3", **KV, head_dim=16)
    model.unsloth_layer = QAttention(1, 1)
    runtime = Runtime(Ranks(), "unsloth", "cuda", "fp16", "Tesla T4")
    choice = attention.choose_packing(Settings(model="m"), runtime, model)
    assert choice.packed is xformers
    assert choice.reason == (
        "xformers keeps rows apart"
        if xformers
        else "backend unsloth (fp16) on Tesla T4 (compute capability 7.5, older than flash attention) has no attention "
        "kernel for packed rows"
    )


def test_attention_that_unsloth_has_chosen_and_nothing_replaces_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    stand_in_for_unsloth(monkeypatch, "sdpa")
    model = make("Gemma3Text", **KV, head_dim=16)
    model.set_attn_implementation("flex_attention")
    choice = attention.choose_packing(Settings(model="m"), Runtime(Ranks(), "unsloth", "cuda", "bf16", "H200"), model)
    assert not choice.packed
    assert choice.reason == (
        "Unsloth computes the model's attention with flex_attention, which takes no boundaries of rows; "
        "--backend transformers may pack them"
    )


IDS = np.arange(3, 60)
BY_MASK = PackingDecision(True, "a mask keeps rows apart")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        # Masks made without positions.
        ("BioGpt", {}),
        ("Falcon", {}),
        ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
        ("XGLM", {"ffn_dim": 48, "d_model": 32, "num_layers": 2, "attention_heads": 2}),
        # States and convolutions.
        ("Lfm2", {**KV, "layer_types": ["conv", "full_attention"]}),
        (
            "Qwen3Next",
            {**KV, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "num_experts": 2},
        ),
        # Positions that depend on the place in the pack.
        ("Bloom", {}),
        ("Roberta", {"is_decoder": True}),
    ],
)
def test_a_model_that_mixes_rows_is_found_by_trying_it(name: str, config: dict[str, Any]) -> None:
    model, runtime = make(name, **config), cpu_runtime()
    mixed = attention.prove_rows_apart(Settings(model="m"), runtime, model, IDS, BY_MASK)
    assert not mixed.packed
    with pytest.raises(UserError, match=f"packing on would mix rows, because {re.escape(mixed.reason)}"):
        attention.prove_rows_apart(Settings(model="m", packing="on"), runtime, model, IDS, BY_MASK)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Llama", KV),
        ("Mistral", {**KV, "sliding_window": 8}),
        ("GPT2", {"resid_pdrop": 0.5}),
        # Its dropout is in functions, not in layers.
        ("SeedOss", {**KV, "head_dim": 16, "attention_dropout": 0.5, "residual_dropout": 0.5}),
        ("Gemma2", {**KV, "head_dim": 16}),
        ("Qwen3Moe", {**KV, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}),
        # Its config adds a loss of the routers, which training leaves out.
        (
            "Qwen3Moe",
            {**KV, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
        ),
    ],
)
def test_a_model_that_keeps_rows_apart_packs_and_is_left_as_it_was(name: str, config: dict[str, Any]) -> None:
    model = make(name, **config)
    before = torch.get_rng_state()
    assert attention.prove_rows_apart(Settings(model="m"), cpu_runtime(), model, IDS, BY_MASK) is BY_MASK
    assert torch.equal(torch.get_rng_state(), before) and not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_attention_that_ignores_the_border_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Llama", **KV)
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda position_ids=None, **given: forward(**given))
    mixed = attention.prove_rows_apart(Settings(model="m"), cpu_runtime(), model, IDS, BY_MASK)
    assert mixed == PackingDecision(False, "the loss of a row depends on the row before it")


@pytest.mark.parametrize(("backend", "set_to"), [("unsloth", "0"), ("transformers", None)])
def test_layers_of_packs_that_were_tried_stay_uncompiled_with_unsloth(
    backend: Any, set_to: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Put back after the test, as it was not set before.
    monkeypatch.setenv(BLOCK_COMPILE, "")
    monkeypatch.delenv(BLOCK_COMPILE)
    model = make("Llama", **KV)
    varlen.use(model)
    runtime = dataclasses.replace(cpu_runtime(), backend=backend)
    assert attention.prove_rows_apart(Settings(model="m"), runtime, model, IDS, BY_MASK) is BY_MASK
    assert os.environ.get(BLOCK_COMPILE) == set_to


@pytest.mark.parametrize("sharding", ["fsdp2", "zero3"])
def test_masks_that_cannot_be_tried_are_not_used(sharding: Any) -> None:
    with torch.device("meta"):
        model = make("Llama", **KV)
    runtime = dataclasses.replace(cpu_runtime(), sharding=sharding)
    refused = attention.prove_rows_apart(Settings(model="m"), runtime, model, IDS, BY_MASK)
    assert "cannot be tried" in refused.reason and not refused.packed
    model.config._attn_implementation = varlen.NAME
    assert attention.prove_rows_apart(Settings(model="m"), runtime, model, IDS, BY_MASK) is BY_MASK
