"""Captured passes with gradient checkpointing torch: layers are computed again in the backward pass, in the graph."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

from tests.data.test_fixed_shape import pack_of
from tests.training.test_captured_step import (
    SHAPE,
    batches,
    captured_of,
    fail,
    gradients,
    model_of,
    ordinary_sum,
    with_dropout_of,
)
from unsloth_ddp.data.order.collate import Collate, Flatten, PadRight
from unsloth_ddp.data.order.fixed_shape import FixedShape, PaddedBatch
from unsloth_ddp.model.forward import packed_forward
from unsloth_ddp.model.forward.packed_forward import PackedForward
from unsloth_ddp.model.packing import varlen
from unsloth_ddp.training.step.capture_check import draws_random_numbers
from unsloth_ddp.training.step.captured_step import CapturedStep


def passed(captured: CapturedStep, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the gradients of one micro-batch."""
    for parameter in captured.trained:
        parameter.grad = None
    loss, _ = captured.run(batch, torch.ones(()))
    return loss.clone(), torch.cat([p.grad.flatten() for p in captured.trained])


def kept_bytes(captured: CapturedStep, batch: dict[str, Any]) -> int:
    """Return what the forward pass keeps for the backward pass, without parameters."""
    saved: list[torch.Tensor] = []
    parameters = {p.data_ptr() for p in captured.forward.decoder.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        captured.run(batch, torch.ones(()))
    return sum(t.numel() * t.element_size() for t in saved if t.data_ptr() not in parameters)


@pytest.mark.parametrize("library", ["none", "torch"])
def test_layers_are_computed_twice_keep_less_and_give_the_same_gradients(library: str) -> None:
    model = model_of("lora")
    batch = batches()[1]
    expected = passed(captured_of(model), batch)
    if library == "torch":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    captured, calls = captured_of(model, recompute=True), []
    for layer in captured.forward.layers:
        layer.register_forward_pre_hook(lambda layer, inputs: calls.append(layer))
    twice = passed(captured, batch)
    assert torch.equal(twice[0], expected[0]) and torch.equal(twice[1], expected[1])
    assert len(calls) == 2 * len(captured.forward.layers)
    recomputed = kept_bytes(captured, batch)
    captured.recompute_layers(False)
    # A graph would replay the layers as they were captured.
    assert not captured.graphs
    assert torch.equal(passed(captured, batch)[1], expected[1])
    assert 4 * recomputed < kept_bytes(captured, batch)


@pytest.mark.parametrize("fails", [False, True])
def test_the_librarys_own_checkpointing_is_back_after_a_pass(fails: bool) -> None:
    model = model_of("lora")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    captured = captured_of(model, recompute=True)
    layers = captured.forward.layers
    if fails:
        layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="no such layer") if fails else contextlib.nullcontext():
        captured.run(batches()[0], torch.ones(()))
    assert all(layer.gradient_checkpointing is True and layer._compiled_call_impl is None for layer in layers)
    assert model.is_gradient_checkpointing


def attend_within_rows(
    query: Any, key: Any, value: Any, starts: torch.Tensor, *others: Any, **options: Any
) -> torch.Tensor:
    """Compute torch's varlen_attn on a CPU."""
    row = torch.bucketize(torch.arange(query.shape[0]), starts, right=True)
    mask = (row[:, None] == row[None]).tril()
    heads = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
    return attended[0].transpose(0, 1)


@pytest.mark.slow
def test_recomputing_does_not_compile_layers_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.attention.varlen as upstream

    monkeypatch.setattr(upstream, "varlen_attn", attend_within_rows, raising=False)
    # inductor takes half a minute on a CPU; what decides about compiling again comes before it.
    compile_of_torch = torch.compile

    def compile_eager(function: Any, *, dynamic: bool, options: Any) -> Any:
        return compile_of_torch(function, dynamic=dynamic, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", compile_eager)
    torch._dynamo.reset()
    counters.clear()
    model = model_of("lora").bfloat16()
    varlen.use(model.get_base_model())
    collate = Collate(PadRight(0), Flatten("positions"), shape=SHAPE)
    packs = [*batches(), collate([pack_of([20] * 9)])]
    assert len({batch["padded_batch"].rows for batch in packs}) > 1
    plain = [passed(captured_of(model), batch) for batch in packs]
    captured = captured_of(model, recompute=True)
    graphs = []
    try:
        with captured.forward.compiled_layers():
            for _ in range(2):
                for batch, expected in zip(packs, plain, strict=True):
                    loss, gradient = passed(captured, batch)
                    torch.testing.assert_close(loss, expected[0], rtol=1e-2, atol=0)
                    assert (gradient - expected[1]).norm() < 0.05 * expected[1].norm()
                    graphs.append(counters["stats"]["unique_graphs"])
    finally:
        torch._dynamo.reset()
    # That of the layers, and the last norm.
    assert graphs == [2] * 8 and not counters["graph_break"]


UNSLOTH_LAYER = """
def run_attention(**given):
    raise AssertionError("Unsloth's own attention was called")

def forward(self, hidden_states, position_embeddings, **given):
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    projections = self.q_proj, self.k_proj, self.v_proj
    query, key, value = (projection(hidden_states).view(shape).transpose(1, 2) for projection in projections)
    query, key = rotate(query, key, *position_embeddings)
    attended = run_attention(config=self.settings, context=self.settings, Q=query, K=key, V=value)
    return self.o_proj(attended.reshape(*hidden_states.shape[:-1], -1)), None
"""


def as_of_unsloth(model: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Let the model's attention layers call run_attention as Unsloth's do; return the module that has it."""
    family = ModuleType("unsloth.models.family")
    family.rotate = apply_rotary_pos_emb
    exec(UNSLOTH_LAYER, vars(family))
    monkeypatch.setitem(sys.modules, family.__name__, family)
    kind = type("FamilyAttention", (LlamaAttention,), {"forward": family.forward})
    for module in model.modules():
        if isinstance(module, LlamaAttention):
            module.__class__ = kind
            module.settings = SimpleNamespace(flash_varlen_kwargs=None, is_causal=True, sliding_window=None)
    return family


def test_unsloths_attention_is_replaced_in_the_backward_pass_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("lora")
    family = as_of_unsloth(model, monkeypatch)
    attention = family.run_attention
    expected, recomputed = (
        passed(captured_of(model, recompute=recompute), batches()[1]) for recompute in (False, True)
    )
    assert torch.equal(recomputed[0], expected[0]) and torch.equal(recomputed[1], expected[1])
    assert family.run_attention is attention


@pytest.mark.parametrize("unsloth", [False, True])
@pytest.mark.parametrize(
    ("lengths", "shape"),
    [([[100], [60]], FixedShape.of_single_rows(2, 128)), ([[60, 50, 18], [70, 40]], SHAPE)],
)
def test_rows_are_kept_apart_by_boundaries_or_as_sequences(
    unsloth: bool, lengths: list[list[int]], shape: FixedShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 16 bit, since other attention is taken in 32."""
    import torch.nn.attention.varlen as upstream

    called = []

    def attend(*arguments: Any, **more: Any) -> torch.Tensor:
        called.append(arguments)
        return attend_within_rows(*arguments, **more)

    monkeypatch.setattr(upstream, "varlen_attn", attend, raising=False)
    collate = Collate(PadRight(0), Flatten("positions"), shape=shape)
    packs = [pack_of(of) for of in lengths]
    model = model_of("lora").bfloat16()
    expected_loss = sum(ordinary_sum(model, collate([pack])) for pack in packs)
    expected_loss.backward()
    expected = gradients(model)
    model.zero_grad()
    if unsloth:
        as_of_unsloth(model, monkeypatch)
    else:
        varlen.use(model.get_base_model())
    forward = PackedForward(model, shape)
    captured = CapturedStep(model, forward, contextlib.nullcontext, torch.bfloat16, torch.device("cpu"))
    loss, gradient = passed(captured, collate(packs))
    torch.testing.assert_close(loss, expected_loss.detach().float(), rtol=1e-2, atol=0)
    assert (gradient - expected).norm() < 0.05 * expected.norm()
    assert bool(called) is (not shape.sequences)


def test_the_last_norm_is_compiled_unless_unsloth_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: print)
    for unsloth in (False, True):
        model = model_of("lora")
        if unsloth:
            as_of_unsloth(model, monkeypatch)
        forward = PackedForward(model, SHAPE)
        with forward.compiled_layers():
            assert all(layer._compiled_call_impl is print for layer in forward.layers)
            assert (forward.decoder.norm._compiled_call_impl is None) is unsloth
        assert all(layer._compiled_call_impl is None for layer in [*forward.layers, forward.decoder.norm])
    # A model whose last norm has another name.
    del forward.decoder.norm
    with forward.compiled_layers():
        pass


@pytest.mark.parametrize(("variable", "on"), [(None, True), ("0", False)])
def test_unsloths_fused_norm_is_on_inside_a_pass_unless_the_user_decided(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, on: bool
) -> None:
    name, switch, environ = packed_forward.FUSED_NORM
    kernels = ModuleType(name)
    setattr(kernels, switch, False)
    monkeypatch.setitem(sys.modules, name, kernels)
    monkeypatch.delenv(environ, raising=False)
    if variable is not None:
        monkeypatch.setenv(environ, variable)
    model = model_of("lora")
    as_of_unsloth(model, monkeypatch)
    switches = []
    captured = captured_of(model)
    captured.forward.layers[0].register_forward_pre_hook(lambda *_: switches.append(getattr(kernels, switch)))
    captured.run(batches()[0], torch.ones(()))
    assert switches == [on] and getattr(kernels, switch) is False


def test_random_numbers_of_a_forward_pass_are_noticed_and_left_as_they_were() -> None:
    step = SHAPE.parts(batches()[0]["padded_batch"])
    model = with_dropout_of(0.1)
    forward, state = PackedForward(model, SHAPE), torch.get_rng_state()
    assert forward.draws_random_numbers(step)
    assert torch.equal(torch.get_rng_state(), state)
    model.eval()
    assert not forward.draws_random_numbers(step)
    model = with_dropout_of(0.0)
    forward = PackedForward(model, SHAPE)
    assert not forward.draws_random_numbers(step)
    # Not a dropout layer: noise that a model adds by itself.
    forward.layers[1].register_forward_hook(lambda layer, inputs, output: output + 0 * torch.rand(1))
    assert forward.draws_random_numbers(step)


def test_the_rows_that_random_numbers_are_looked_for_with_come_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, batch, moved = captured_of(model_of("lora")), batches()[0], []
    monkeypatch.setattr(PaddedBatch, "to", lambda padded_batch, device: moved.append(device) or padded_batch)
    assert draws_random_numbers(captured, batch) == (False, None)
    # As a loader leaves it: runners move tensors only.
    assert moved == [captured.device]


def test_another_librarys_checkpoint_function_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_of(model_of("lora"), recompute=True)
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", fail)
    with pytest.raises(NotImplementedError, match="test_captured_step has replaced torch's checkpoint function"):
        captured.run(batches()[0], torch.ones(()))


# ---- what a run decides ----
