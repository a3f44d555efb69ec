"""Test when FlashAttention 4 replaces torch's kernel, with a stand-in for the package: its kernels need a GPU."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from torch.nn.attention import _fa4, current_flash_attention_impl

from tests.data.test_packing import KV, make
from unsloth_ddp.data.order.fixed_shape import FixedShape
from unsloth_ddp.model.forward.packed_forward import PackedForward
from unsloth_ddp.model.packing import varlen


@pytest.fixture
def flash_attention_4(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stand in for the package, so that torch can register it as its flash attention."""
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        module: Any = ModuleType(name)
        module.__path__ = []
        module._flash_attn_fwd = module._flash_attn_bwd = None
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("UNSLOTH_FLASH_ATTENTION_IMPL", raising=False)
    monkeypatch.delenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", raising=False)
    # torch keeps what it has imported.
    _fa4._fa4_import_module.cache_clear()
    yield
    _fa4._fa4_import_module.cache_clear()


@pytest.mark.usefixtures("flash_attention_4")
def test_flash_attention_4_is_active_in_a_captured_pass_alone() -> None:
    model = make("Llama", **KV)
    shapes = [FixedShape.of_single_rows(2, 128), FixedShape.that_holds(256, 12, 128)]
    assert [PackedForward(model, shape).dense for shape in shapes] == [True, False]
    for shape in shapes:
        forward = PackedForward(model, shape, flash_attention_4=True)
        assert not forward.dense
        with contextlib.suppress(KeyError), forward.passes():
            assert current_flash_attention_impl() == "FA4"
            raise KeyError
        assert current_flash_attention_impl() is None
        with PackedForward(model, shape).passes():
            assert current_flash_attention_impl() is None


@pytest.mark.usefixtures("flash_attention_4")
def test_flash_attention_4_is_taken_on_hopper_where_it_can_be_used_and_is_not_turned_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        varlen.has_flash_attention_4(9) and not varlen.has_flash_attention_4(8) and not varlen.has_flash_attention_4(10)
    )
    assert current_flash_attention_impl() is None
    for value, taken in (("off", False), ("None", False), ("fa3", False), ("FA4", True), ("auto", True)):
        monkeypatch.setenv("UNSLOTH_FLASH_ATTENTION_IMPL", value)
        assert varlen.has_flash_attention_4(9) == taken, value
    with varlen.flash_attention_4():
        assert not varlen.has_flash_attention_4(9), "another choice of the process is left alone"
    # Another version of the package, FlashAttention 2 alone, and nothing.
    _fa4._fa4_import_module.cache_clear()
    with monkeypatch.context() as patched:
        patched.delattr(sys.modules["flash_attn.cute.interface"], "_flash_attn_fwd")
        assert not varlen.has_flash_attention_4(9)
    assert "FlashAttention 4 is installed and cannot be used: Module 'flash_attn.cute.interface'" in caplog.text
    caplog.clear()
    monkeypatch.delitem(sys.modules, "flash_attn.cute.interface")
    for name in ("flash_attn.cute", "flash_attn"):
        monkeypatch.setitem(sys.modules, name, None)
        assert not varlen.has_flash_attention_4(9) and not caplog.records
