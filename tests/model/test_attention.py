"""Test which attention kernel is selected for packed rows, with stand-ins for Unsloth and the GPU."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from tests.data.test_packing import KV, both_ways, make, token_losses
from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward import attention, varlen
from unsloth_ddp.model.forward.packing_obstacles import lost_boundaries_reason
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
    model.config = SimpleNamespace(head_dim=128, _attn_implementation="sdpa")  # type: ignore[assignment]
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


@pytest.mark.parametrize("name", ["BioGpt", "Falcon", "OPT", "XGLM"])
def test_models_whose_masks_lose_positions_do_not_pack_without_a_kernel(name: str) -> None:
    sizes = {"ffn_dim": 48, "d_model": 32, "num_layers": 2, "word_embed_proj_dim": 32, "attention_heads": 2}
    model = make(name, **(sizes if name in ("OPT", "XGLM") else {}))
    _, _, padded, packed = both_ways()
    assert (token_losses(model, packed) - token_losses(model, padded)).abs().max() > 1e-4, (
        "this model keeps rows apart now"
    )
    runtime = cpu_runtime()
    with pytest.raises(
        UserError, match=f"packing on would mix rows, because the masks of {name.lower()} models do not keep rows apart"
    ):
        attention.choose_packing(Settings(model="m", packing="on"), runtime, model)
    assert not attention.choose_packing(Settings(model="m"), runtime, model).packed


def test_a_kernel_needs_no_mask_unless_the_model_does_not_pass_boundaries() -> None:
    assert lost_boundaries_reason("gpt_oss", "flash-attn", "flash_attention_2") is None
    assert "masks of gpt_oss" in str(lost_boundaries_reason("gpt_oss", None, "eager"))
    assert "gptj models do not pass row boundaries" in str(
        lost_boundaries_reason("gptj", "flash-attn", "flash_attention_2")
    )
    assert lost_boundaries_reason("gptj", None, "sdpa") is None
