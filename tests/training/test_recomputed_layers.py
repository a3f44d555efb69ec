"""Captured passes with gradient checkpointing torch: layers are computed again in the backward pass, in the graph."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
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
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.collate import Collate, Flatten, PadRight
from unsloth_ddp.data.order.fixed_shape import FixedShape, PaddedBatch
from unsloth_ddp.distributed.exit_codes import quiet
from unsloth_ddp.model.forward import packed_forward, varlen
from unsloth_ddp.model.forward.gradient_checkpointing import GradientCheckpointing
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.model.forward.packed_forward import PackedForward
from unsloth_ddp.sizing.micro_batch import MicroBatchDecision
from unsloth_ddp.training.shown.meter import Meter, OwnWorkTimer, Totals
from unsloth_ddp.training.step import cuda_graphs
from unsloth_ddp.training.step.capture_check import OUT_OF_MEMORY, draws_random_numbers
from unsloth_ddp.training.step.captured_step import CapturedStep, CaptureFailed
from unsloth_ddp.training.step.cuda_graphs import CudaGraphs
from unsloth_ddp.training.step.optimizer_step import OptimizerStep
from unsloth_ddp.training.tasks.text import TextTask
from unsloth_ddp.utils.errors import UserError


def passed(captured: CapturedStep, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the gradients of one micro-batch."""
    for parameter in captured.trained:
        parameter.grad = None
    loss, _ = captured.run(batch, torch.ones(()))
    return loss.clone(), torch.cat([p.grad.flatten() for p in captured.trained])


def kept_bytes(captured: CapturedStep, batch: dict[str, Any]) -> int:
    """Return what the forward pass keeps for the backward pass, without parameters."""
    kept: list[torch.Tensor] = []
    parameters = {p.data_ptr() for p in captured.forward.decoder.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        captured.run(batch, torch.ones(()))
    return sum(t.numel() * t.element_size() for t in kept if t.data_ptr() not in parameters)


@pytest.mark.parametrize("library", ["none", "torch"])
def test_layers_are_computed_twice_keep_less_and_give_the_same_gradients(library: str) -> None:
    model = model_of("lora")
    batch = batches()[1]
    wanted = passed(captured_of(model), batch)
    if library == "torch":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    captured, calls = captured_of(model, recompute=True), []
    for layer in captured.forward.layers:
        layer.register_forward_pre_hook(lambda layer, given: calls.append(layer))
    found = passed(captured, batch)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert len(calls) == 2 * len(captured.forward.layers)
    recomputed = kept_bytes(captured, batch)
    captured.recompute_layers(False)
    # A graph would replay the layers as they were captured.
    assert not captured.graphs
    assert torch.equal(passed(captured, batch)[1], wanted[1])
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
    query: Any, key: Any, value: Any, starts: torch.Tensor, *others: Any, **given: Any
) -> torch.Tensor:
    """Compute torch's varlen_attn on a CPU."""
    row = torch.bucketize(torch.arange(query.shape[0]), starts, right=True)
    mask = (row[:, None] == row[None]).tril()
    heads = (one.transpose(0, 1)[None] for one in (query, key, value))
    attended = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True)
    return attended[0].transpose(0, 1)


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
                for batch, wanted in zip(packs, plain, strict=True):
                    loss, gradient = passed(captured, batch)
                    torch.testing.assert_close(loss, wanted[0], rtol=1e-2, atol=0)
                    assert (gradient - wanted[1]).norm() < 0.05 * wanted[1].norm()
                    graphs.append(counters["stats"]["unique_graphs"])
    finally:
        torch._dynamo.reset()
    # The layers' two, as the first one's input has no gradient, and the last norm.
    assert graphs == [3] * 8 and not counters["graph_break"]


UNSLOTH_LAYER = """
def run_attention(**given):
    raise AssertionError("Unsloth's own attention was called")

def forward(self, hidden_states, position_embeddings, **given):
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (one(hidden_states).view(shape).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
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
    before = family.run_attention
    wanted, found = (passed(captured_of(model, recompute=recompute), batches()[1]) for recompute in (False, True))
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    assert family.run_attention is before


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

    def attend(*given: Any, **more: Any) -> torch.Tensor:
        called.append(given)
        return attend_within_rows(*given, **more)

    monkeypatch.setattr(upstream, "varlen_attn", attend, raising=False)
    collate = Collate(PadRight(0), Flatten("positions"), shape=shape)
    packs = [pack_of(of) for of in lengths]
    model = model_of("lora").bfloat16()
    wanted = sum(ordinary_sum(model, collate([pack])) for pack in packs)
    wanted.backward()
    expected = gradients(model)
    model.zero_grad()
    if unsloth:
        as_of_unsloth(model, monkeypatch)
    else:
        varlen.use(model.get_base_model())
    forward = PackedForward(model, shape)
    captured = CapturedStep(model, forward, contextlib.nullcontext, torch.bfloat16, torch.device("cpu"))
    loss, found = passed(captured, collate(packs))
    torch.testing.assert_close(loss, wanted.detach().float(), rtol=1e-2, atol=0)
    assert (found - expected).norm() < 0.05 * expected.norm()
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
    seen = []
    captured = captured_of(model)
    captured.forward.layers[0].register_forward_pre_hook(lambda *_: seen.append(getattr(kernels, switch)))
    captured.run(batches()[0], torch.ones(()))
    assert seen == [on] and getattr(kernels, switch) is False


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
    forward.layers[1].register_forward_hook(lambda layer, given, output: output + 0 * torch.rand(1))
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


class Rows:
    """Return packed rows, as many as make a run long enough."""

    def __init__(self) -> None:
        lengths: list[list[int]] = [[60, 50, 30], [128, 100], [9]] * 100
        self.examples = [pack_of(of) for of in lengths]
        self.units, self.streamed, self.processing = len(lengths), False, None
        self.packing = SimpleNamespace(starts=np.cumsum([0, *map(len, lengths)]), longest=128)

    def lengths(self) -> np.ndarray:
        return np.array([*(len(one["input_ids"]) for one in self.examples), 1])


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "is_available", lambda: True)
    monkeypatch.setattr(cuda_graphs, "use_capture_stream", lambda device: None)


def unprepared(model: Any, **options: Any) -> tuple[CudaGraphs, MicroBatchRunner]:
    runtime = SimpleNamespace(
        device_type="cuda", precision="bf16", sharding="none", gather=lambda one: [one], locations=["rank 0"],
        ranks=SimpleNamespace(world_size=1, rank=0),
    )  # fmt: skip
    collate, rows = Collate(PadRight(0), Flatten("positions")), Rows()
    settings = Settings(model="m", dataset=["d"], max_length=256, **options)
    data = SimpleNamespace(train=rows, plan=BatchPlan(1, 2, 1))
    graphs = CudaGraphs(settings, runtime, data, collate, torch.device("cpu"), model)
    runner = MicroBatchRunner(
        model,
        torch.device("cpu"),
        lambda model, batch, divisor: ordinary_sum(model, batch),
        collate,
        lambda: torch.autocast("cpu", torch.bfloat16),
    )
    return graphs, runner


def prepared(model: Any, kind: str, **options: Any) -> CudaGraphs:
    graphs, runner = unprepared(model, **options)
    if kind == "torch":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    graphs.prepare(runner, MicroBatchDecision(kind, 1, ""), BatchPlan(1, 2, 1))
    return graphs


def tried(graphs: CudaGraphs, runner: MicroBatchRunner, kind: str) -> torch.Tensor | None:
    """Return the gradients of a trial of one pack, None where the backend computes it."""
    compute = graphs.trial_pass(runner, None, kind, 1)
    batch = runner.batch_of([Rows().examples[0]])
    assert ("padded_batch" in batch) == (compute is not None)
    if compute is None:
        return None
    runner.model.zero_grad()
    compute(batch)
    # Their memory is free for what is tried next.
    assert graphs._tried is not None and not graphs._tried[1].gradients._flat
    found = gradients(runner.model)
    runner.model.zero_grad()
    return found


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", ["none", "torch"])
def test_memory_is_tried_with_the_pass_that_is_captured_afterwards(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = model_of("lora"), []
    graphs, runner = unprepared(model)

    @contextlib.contextmanager
    def compiled_layers(forward: PackedForward) -> Iterator[None]:
        compiled.append(forward)
        yield

    dropped: list[Any] = []
    unsloth = SimpleNamespace(_unsloth_reset_stray_compile_cache=lambda trainer: dropped.append(trainer.model))
    monkeypatch.setitem(sys.modules, "unsloth.models._utils", unsloth)
    # Compiling takes long on a CPU.
    monkeypatch.setattr(PackedForward, "compiled_layers", compiled_layers)
    found = tried(graphs, runner, kind)
    assert found is not None and graphs._tried is not None
    step = graphs._tried[1]
    assert step.forward.recompute == (kind == "torch") and (compiled, dropped) == ([step.forward], [model])
    runner.loss_sum(runner.batch_of([Rows().examples[0]])).backward()
    wanted = gradients(model)
    assert (found - wanted).norm() < 0.05 * wanted.norm()
    model.zero_grad()
    # Another kind takes the same step, another size another one, and what cannot be captured none.
    assert tried(graphs, runner, "none") is not None and graphs._tried[1] is step
    graphs.prepare(runner, MicroBatchDecision(kind, 1, ""), BatchPlan(1, 2, 1))
    assert graphs.captured is step and graphs._tried is None
    assert tried(graphs, runner, "unsloth") is None


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("options", [{}, {"cuda_graphs": "off"}])
def test_the_search_tries_captured_passes_with_the_buffers_of_the_exchange(options: dict[str, Any]) -> None:
    graphs, runner = unprepared(model_of("lora"), **options)
    exchange: Any = SimpleNamespace(buffers="buffers")
    checkpointing: Any = SimpleNamespace(level=0)
    step = OptimizerStep(None, checkpointing, graphs, exchange, None, torch.device("cpu"), 2)
    search = step.search(graphs.settings, SimpleNamespace(sharding="none"), graphs.data, runner)
    if options:
        assert search.captured_pass is None
    else:
        assert (search.captured_pass.func, search.captured_pass.args) == (graphs.trial_pass, (runner, "buffers"))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_pass_that_cannot_be_computed_is_tried_as_the_backend_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("lora")
    graphs, runner = unprepared(model)
    errors: list[Exception] = [ValueError("no such kernel"), torch.OutOfMemoryError("CUDA out of memory.")]

    def fail(*_: object) -> None:
        raise errors[0]

    monkeypatch.setattr(PackedForward, "loss_sum", fail)
    found = tried(graphs, runner, "none")
    runner.loss_sum(runner.batch_of([Rows().examples[0]])).backward()
    assert torch.equal(found, gradients(model))
    del errors[0]
    with pytest.raises(torch.OutOfMemoryError):
        tried(graphs, runner, "none")


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("errors", [1, 2])
def test_a_captured_pass_is_compared_for_one_pack_where_the_backends_takes_too_much_memory(
    errors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, runner = unprepared(model_of("lora"))
    tokens: list[int] = []

    def ordinary(model: Any, batch: dict[str, Any], divisor: torch.Tensor) -> torch.Tensor:
        tokens.append(batch["input_ids"].shape[1])
        if len(tokens) <= errors:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return ordinary_sum(model, batch)

    graphs.prepare(dataclasses.replace(runner, loss=ordinary), MicroBatchDecision("none", 2, ""), BatchPlan(2, 1, 1))
    assert tokens == [140 + 228, 140]
    assert (graphs.rejected, graphs.captured is None) == ((errors == 2),) * 2
    assert errors == 1 or graphs.choice.reason == OUT_OF_MEMORY


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("options", "tries"),
    [
        ({}, True),
        # Compiling is in vain for a short run, and --method full may not be captured after all.
        ({"max_steps": 20}, False), ({"max_steps": 20, "cuda_graphs": "on"}, True),
        ({"method": "full"}, False), ({"method": "full", "cuda_graphs": "on"}, True),
        ({"cuda_graphs": "off"}, False), ({"gradient_checkpointing": "unsloth"}, False),
    ],
)  # fmt: skip
def test_memory_is_tried_with_captured_passes_where_the_run_will_capture_them(
    options: dict[str, Any], tries: bool
) -> None:
    assert unprepared(model_of("lora"), **options)[0].tries_passes() is tries


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kind", ["none", "torch"])
def test_both_kinds_are_captured_and_a_change_of_kind_captures_anew(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    graphs = prepared(model_of("lora"), kind)
    captured = graphs.captured
    assert graphs.choice.uses_graphs and captured is not None and captured.forward.recompute == (kind == "torch")
    assert not captured.in_trial
    batch = graphs.collate([Rows().examples[0]])
    first = graphs.run(batch, torch.ones(()))
    assert first is not None and captured.graphs
    loss = first[0].clone()
    graphs.use("torch")
    assert graphs.captured is captured and not captured.graphs and captured.forward.recompute
    again = graphs.run(batch, torch.ones(()))
    assert again is not None and torch.equal(again[0], loss)
    assert capsys.readouterr().out == ""
    graphs.use("unsloth")
    assert graphs.run(batch, torch.ones(())) is None and "padded_batch" not in graphs.collate([Rows().examples[0]])
    assert "no longer replayed on rank 0: gradient checkpointing unsloth moves the inputs" in capsys.readouterr().err


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_capture_that_fails_while_training_is_reported_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    graphs = prepared(model_of("lora"), "none")
    assert graphs.captured is not None
    batch = graphs.collate([Rows().examples[0]])

    def fail(*_: object) -> None:
        raise CaptureFailed("operation failed during capture")

    monkeypatch.setattr(graphs.captured, "run", fail)
    monkeypatch.setattr(logging.getLogger("unsloth_ddp"), "propagate", True)
    # Other processes than the main one have no standard output.
    with quiet():
        assert graphs.run(batch, torch.ones(())) is None
    assert graphs.captured is None
    assert "no longer replayed on rank 0: operation failed during capture" in capsys.readouterr().err
    assert "the step is not captured: operation failed during capture" in caplog.text


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_step_that_runs_out_of_memory_drops_its_graphs_and_goes_on_recomputing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, one = model_of("lora"), torch.ones(())
    graphs = prepared(model, "none")
    runtime: Any = SimpleNamespace(backend="transformers", sharding="none")
    settings = Settings(model="m", dataset=["d"], gradient_checkpointing="auto")
    cpu = torch.device("cpu")
    meter = Meter(
        lambda sums: sums[None], 1, cpu, OwnWorkTimer(cpu), Totals(), TextTask(None, divides=True, fused_head=False)
    )
    checkpointing = GradientCheckpointing(model, runtime, settings)
    task: Any = SimpleNamespace(units=lambda batch, runner: one)
    step = OptimizerStep(task, checkpointing, graphs, None, meter, cpu, 1)
    held = []
    monkeypatch.setattr(gc, "collect", lambda: held.append(len(graphs.captured.graphs)))

    def compute(model: Any, batch: dict[str, Any], divisor: torch.Tensor) -> torch.Tensor:
        if checkpointing.kind == "none":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        loss = ordinary_sum(model, batch) / divisor
        loss.backward()
        return loss.detach()

    first, larger = (graphs.collate([Rows().examples[index]]) for index in (0, 1))
    assert step.begin([first, larger], 0.0, None, lambda units: torch.ones(())) == 1
    step.micro_batch(compute, model, first, one, last=False)
    assert graphs.captured.graphs
    # Memory runs out in the second micro-batch, which is larger than what was captured.
    del larger["padded_batch"]
    step.micro_batch(compute, model, larger, one, last=True)
    assert held[0] == 0 and checkpointing.kind == "torch" and graphs.captured.forward.recompute
    found = gradients(model)
    model.zero_grad()
    sum(ordinary_sum(model, batch) for batch in (first, larger)).backward()
    torch.testing.assert_close(found, gradients(model))
    model.zero_grad()
    assert graphs.run(first, one) is not None and graphs.captured.graphs
    found = gradients(model)
    model.zero_grad()
    ordinary_sum(model, first).backward()
    assert (found - gradients(model)).norm() < 0.05 * found.norm()


@pytest.mark.usefixtures("as_on_a_gpu")
def test_dropout_is_captured_without_recomputing_only(capsys: pytest.CaptureFixture[str]) -> None:
    graphs = prepared(with_dropout_of(0.1), "none")
    assert graphs.choice.uses_graphs
    graphs.use("torch")
    assert graphs.captured is None
    assert "gradient checkpointing torch would draw another dropout mask" in capsys.readouterr().err
    refused = prepared(with_dropout_of(0.1), "torch")
    assert not refused.choice.uses_graphs and refused.choice.reason.startswith(
        "gradient checkpointing torch would draw another dropout mask"
    )
    with pytest.raises(
        UserError,
        match="cuda_graphs on is not possible, because gradient checkpointing torch would draw another dropout mask",
    ):
        prepared(with_dropout_of(0.1), "torch", cuda_graphs="on")


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gradient_checkpointing": "unsloth"}, "gradient checkpointing unsloth moves the inputs of layers"),
        (
            {"gradient_checkpointing": "torch", "lora_dropout": 0.1},
            "gradient checkpointing torch would draw another dropout mask",
        ),
        ({"gradient_checkpointing": "torch", "lora_dropout": 0.1, "method": "full"}, ""),
        ({"gradient_checkpointing": "auto", "lora_dropout": 0.1}, ""),
        ({"gradient_checkpointing": "torch"}, ""),
    ],
)
def test_what_the_settings_rule_out_is_known_before_memory_is_tried(options: dict[str, Any], reason: str) -> None:
    runtime = SimpleNamespace(
        device_type="cuda", precision="bf16", sharding="none", ranks=SimpleNamespace(world_size=1)
    )
    settings = Settings(model="m", dataset=["d"], **options)
    data = SimpleNamespace(train=Rows(), plan=BatchPlan(1, 2, 1))
    collate = Collate(PadRight(0), Flatten("positions"))
    graphs = CudaGraphs(settings, runtime, data, collate, torch.device("cpu"), model_of("lora"))
    assert graphs.choice.uses_graphs == (not reason) and graphs.choice.reason.startswith(reason)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_model_that_cannot_be_called_is_not_captured() -> None:
    model = model_of("lora")
    model.get_base_model().get_decoder().layers[1].register_forward_pre_hook(fail)
    graphs = prepared(model, "torch")
    assert graphs.choice.reason == "trying it failed: no such layer" and graphs.captured is None
