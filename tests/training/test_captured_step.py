"""Micro-batches of fixed shape: the loss and gradients of the model's own forward pass, summed over a step."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters

from tests.data.test_fixed_shape import pack_of, rows_of
from tests.data.test_packing import KV, make
from tests.tiny_models import save_tiny
from unsloth_ddp.data.order.collate import Collate, Flatten, PadRight
from unsloth_ddp.data.order.fixed_shape import FixedShape
from unsloth_ddp.model.forward import head_loss as head_module
from unsloth_ddp.model.forward.head_loss import Logits, head_loss
from unsloth_ddp.model.forward.packed_forward import PackedForward
from unsloth_ddp.model.modules import text_decoder, without_dropout
from unsloth_ddp.training.step.capture_check import FP8_TOLERANCES, TOLERANCES, capture_sizes, check_capture
from unsloth_ddp.training.step.captured_step import CapturedStep, CaptureFailed

SHAPE = FixedShape.that_holds(tokens=256, rows=12, longest=128)
DEVICE = torch.device("cpu")


def model_of(method: str) -> Any:
    model = make("Llama", **KV)
    model.set_attn_implementation("sdpa")
    if method == "lora":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    return model.train()


def captured_of(model: Any, *, recompute: bool = False) -> CapturedStep:
    forward = PackedForward(model, SHAPE, recompute=recompute)
    return CapturedStep(model, forward, contextlib.nullcontext, torch.float32, DEVICE)


def batches() -> list[dict[str, Any]]:
    collate = Collate(PadRight(0), Flatten("positions"), shape=SHAPE)
    lengths: list[list[int]] = [[60, 50, 30], [128, 100], [9]]
    return [collate([pack_of(of)]) for of in lengths]


def ordinary_sum(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], ignore_index=-100, reduction="sum")


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_step_of_replayed_and_ordinary_micro_batches_has_the_gradients_of_ordinary_ones(
    method: str, recompute: bool
) -> None:
    model = model_of(method)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = sum(ordinary_sum(model, batch) for batch in batches()) / 7
    expected.backward()
    reference = gradients(model)
    captured, divisor = captured_of(model, recompute=recompute), torch.tensor(7.0)
    for turn in range(3):
        # As the optimizer does between steps.
        model.zero_grad()
        total = torch.zeros(())
        for index, batch in enumerate(batches()):
            if index == turn:
                loss = ordinary_sum(model, batch) / 7
                loss.backward()
                total += loss.detach()
            else:
                total += captured.run(batch, divisor)[0]
        torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradients(model), reference, rtol=1e-4, atol=1e-6)


def test_packs_of_one_row_each_have_the_gradients_of_ordinary_ones() -> None:
    shape = FixedShape.of_single_rows(2, 128)
    collate = Collate(PadRight(0), Flatten("positions"), shape=shape)
    packs = [pack_of([of]) for of in (100, 60, 128)]
    assert_same_gradients(shape, [collate([pack]) for pack in packs], [collate(packs[:2]), collate(packs[2:])])


def assert_same_gradients(shape: FixedShape, ordinary: list[dict[str, Any]], captured: list[dict[str, Any]]) -> None:
    """Check that captured micro-batches of a shape have the gradients of ordinary ones."""
    model = model_of("lora")
    sum(ordinary_sum(model, batch) for batch in ordinary).backward()
    expected = gradients(model)
    model.zero_grad()
    step = CapturedStep(model, PackedForward(model, shape), contextlib.nullcontext, torch.float32, DEVICE)
    for batch in captured:
        step.run(batch, torch.ones(()))
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-6)


def test_the_peak_before_a_new_graph_is_kept_once_training_began(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, counted = captured_of(model_of("lora")), [5]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: counted[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: counted.__setitem__(0, 0))
    captured._count_anew()
    assert (captured.peak_bytes, counted) == (0, [0])
    captured.in_trial = False
    counted[0] = 7
    # An evaluation took the memory of all graphs.
    captured.forget()
    captured._count_anew()
    assert (captured.peak_bytes, counted) == (7, [0])


def test_a_capture_leaves_gradients_as_they_were_also_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_of(model_of("lora"))
    captured.run(batches()[0], torch.ones(()))
    initial = gradients_of(captured)
    assert initial.any()

    def record(compute: Any, warm_up: int) -> None:
        for flat in captured.gradients.flat:
            flat += 1
        compute()

    monkeypatch.setattr(captured, "_capture_on_gpu", record)
    captured._capture_beside_gradients(lambda: None, 1)
    assert torch.equal(gradients_of(captured), initial)
    with pytest.raises(CaptureFailed, match="no such layer"):
        captured._capture_beside_gradients(fail, 1)
    assert torch.equal(gradients_of(captured), initial)

    def short(tensor: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as changed, pytest.raises(CaptureFailed, match="CUDA out of memory"):
        changed.setattr(torch.Tensor, "clone", short)
        captured._capture_beside_gradients(lambda: None, 1)
    assert torch.equal(gradients_of(captured), initial)


def test_a_capture_that_fails_does_not_stay_open_in_the_generator_and_the_allocator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Follow what was seen on a GPU, where the generator refused to draw until it got a new state."""
    captured, calls = captured_of(model_of("full")), []

    @contextlib.contextmanager
    def graph(graph: object, *, pool: object, **_: object) -> Iterator[None]:
        calls.append(("begin", pool))
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    generator = SimpleNamespace(
        clone_state=lambda: "copy", graphsafe_set_state=lambda state: calls.append(("generator", state))
    )
    stand_ins: dict[str, Any] = {"CUDAGraph": object, "graph_pool_handle": lambda: (0, 7), "graph": graph}
    stand_ins |= {"synchronize": lambda _: None, "current_stream": lambda _: None, "current_device": lambda: 0}
    for name, value in (stand_ins | {"default_generators": (generator,)}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("endAllocateToPool", "releasePool"):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", lambda *at, name=name: calls.append((name, *at)), raising=False)
    with pytest.raises(CaptureFailed, match="a previous error during capture"):
        captured._capture_beside_gradients(lambda: None, 0)
    assert calls == [
        ("begin", (0, 7)),
        ("generator", "copy"),
        ("endAllocateToPool", 0, (0, 7)),
        ("releasePool", 0, (0, 7)),
    ]


def gradients_of(captured: CapturedStep) -> torch.Tensor:
    return torch.cat(captured.gradients.flat)


def test_only_the_first_capture_of_a_number_of_tokens_is_warmed_up_twice() -> None:
    shape = dataclasses.replace(SHAPE, smaller=(128,))
    model = model_of("lora")
    captured = CapturedStep(model, PackedForward(model, shape), contextlib.nullcontext, torch.float32, DEVICE)
    counts = []
    for lengths in ([100], [90, 60], [60, 60, 1, 1, 1, 1, 1, 1, 1]):
        padded_batch = shape.pad(*rows_of(lengths))
        assert padded_batch is not None
        counts.append((padded_batch.sizes[:2], captured._warm_up(padded_batch.tokens)))
        captured.run({"padded_batch": padded_batch}, torch.ones(()))
    assert counts == [((128, 8), 2), ((256, 8), 2), ((128, 16), 1)]
    # A graph in the pool of those that are dropped would keep their memory.
    captured._pool = object()
    captured.forget()
    assert captured._warm_up(128) == 2 and captured._pool is None


def test_a_capture_follows_its_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, passes = captured_of(model_of("lora")), []
    for name in ("synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: 1, replay=lambda: None))
    monkeypatch.setattr(captured.forward, "compiled_layers", contextlib.nullcontext)
    captured._capture_on_gpu(lambda: passes.append(1), 2)
    assert len(passes) == 3


@pytest.mark.parametrize("sequences", [0, 2])
def test_every_number_of_tokens_is_captured_before_training(sequences: int) -> None:
    shape = FixedShape.of_single_rows(2, 300) if sequences else FixedShape.that_holds(tokens=500, rows=8, longest=500)
    shape = dataclasses.replace(shape, smaller=(256,))
    model = with_dropout_of(0.5)
    captured = CapturedStep(model, PackedForward(model, shape), contextlib.nullcontext, torch.float32, DEVICE)
    example = pack_of([9])
    captured.run({"padded_batch": shape.pad(*example.values())}, torch.ones(()))
    for p in captured.trained:
        p.grad = None
    state = torch.get_rng_state()
    assert capture_sizes(captured, example) is None
    assert {sizes[0] for sizes in captured.graphs} == {256, shape.tokens} and len(captured.graphs) == 2
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in captured.trained)
    captured.forget()
    captured.forward.layers[1].register_forward_pre_hook(fail)
    assert capture_sizes(captured, example) == "trying it failed: no such layer"
    assert all(p.grad is None for p in captured.trained)


def test_micro_batches_padded_to_several_sizes_have_the_gradients_of_ordinary_ones() -> None:
    shape = dataclasses.replace(SHAPE, smaller=(128,))
    collate = Collate(PadRight(0), Flatten("positions"), shape=shape)
    padded = [collate([pack_of(of)]) for of in ([60, 50], [128, 100], [9])]
    assert [batch["padded_batch"].tokens for batch in padded] == [128, 256, 128]
    assert_same_gradients(shape, padded, padded)


def test_counts_come_with_the_loss() -> None:
    batch = batches()[0]
    _, step = captured_of(model_of("lora")).run(batch, torch.ones(()))
    assert int(step.supervised) == int((batch["labels"][0, 1:] != -100).sum()) and int(step.tokens) == 140


def test_the_check_accepts_the_same_pass_and_names_another_one() -> None:
    model = model_of("lora")
    model.base_model.model.lm_head.weight.grad = None
    captured, batch = captured_of(model), batches()[1]
    assert check_capture(captured, batch, lambda rows: ordinary_sum(model, rows)) is None
    assert all(p.grad is None for p in model.parameters())
    difference = check_capture(captured, batch, lambda rows: 1.02 * ordinary_sum(model, rows))
    assert difference is not None and difference.startswith("its loss would differ by 2.0e-02")
    other = batches()[2]
    difference = check_capture(
        captured, batch, lambda rows: ordinary_sum(model, rows) + 0 * ordinary_sum(model, other).square() + _bent(model)
    )
    assert difference is not None and difference.startswith("its gradients would differ by")
    wide = check_capture(
        captured,
        batch,
        lambda rows: ordinary_sum(model, rows) + _bent(model),
        TOLERANCES._replace(gradients=float("inf")),
    )
    assert wide is None


@pytest.mark.parametrize(("factor", "difference"), [(1.01, None), (1.03, "its loss would differ by 2.9e-02")])
def test_losses_in_fp8_may_differ_more(factor: float, difference: str | None) -> None:
    model = model_of("lora")
    captured, batch = captured_of(model), batches()[1]
    fp8, bf16 = (
        check_capture(captured, batch, lambda rows: factor * ordinary_sum(model, rows), allowed)
        for allowed in (FP8_TOLERANCES, TOLERANCES)
    )
    assert fp8 == difference and str(bf16).startswith("its loss would differ by")


@pytest.mark.parametrize(("part", "off"), [("loss", 0.004), ("loss", 0.006), ("gradients", 0.04), ("gradients", 0.06)])
def test_the_check_allows_half_a_percent_of_the_loss_and_five_of_the_gradients(part: str, off: float) -> None:
    model = model_of("lora")
    captured, batch = captured_of(model), batches()[1]

    def ordinary(micro_batch: dict[str, Any]) -> torch.Tensor:
        loss = ordinary_sum(model, micro_batch)
        changed = loss / (1 + off)
        # The other part stays as it is.
        return changed.detach() + loss - loss.detach() if part == "loss" else loss.detach() + changed - changed.detach()

    difference = check_capture(captured, batch, ordinary)
    assert (difference is None) == (off in (0.004, 0.04))
    assert difference is None or difference.startswith(f"its {part} would differ by {off:.1e}")


def test_the_check_counts_gradients_that_the_backend_does_not_compute() -> None:
    model = model_of("lora")
    captured, batch = captured_of(model), batches()[1]

    def of_one_weight(micro_batch: dict[str, Any]) -> torch.Tensor:
        loss, weight = ordinary_sum(model, micro_batch), captured.trained[0]
        (gradient,) = torch.autograd.grad(loss, [weight])
        return loss.detach() + ((weight - weight.detach()) * gradient).sum()

    difference = check_capture(captured, batch, of_one_weight)
    assert difference is not None and difference.startswith("its gradients would differ by")


def test_code_compiled_by_unsloth_before_is_dropped_and_the_captured_pass_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, order = model_of("lora"), list[str]()
    captured, batch = captured_of(model), batches()[1]

    def drop(trainer: Any) -> None:
        assert trainer.model is model
        model.zero_grad(set_to_none=True)
        order.append("dropped")

    def ordinary(micro_batch: dict[str, Any]) -> torch.Tensor:
        order.append("ordinary")
        # Nothing that it would compile is used again.
        assert torch._dynamo.eval_frame._stance.stance == "force_eager"
        return ordinary_sum(model, micro_batch)

    run = captured.run
    monkeypatch.setitem(sys.modules, "unsloth.models._utils", SimpleNamespace(_unsloth_reset_stray_compile_cache=drop))
    monkeypatch.setattr(captured, "run", lambda *arguments: (order.append("captured"), run(*arguments))[1])
    assert check_capture(captured, batch, ordinary) is None
    assert order == ["ordinary", "dropped", "captured"]


def _bent(model: Any) -> torch.Tensor:
    """Zero, with a gradient."""
    weight = next(p for p in model.parameters() if p.requires_grad)
    return 1000 * (weight - weight.detach()).sum()


def with_dropout_of(p: float) -> Any:
    model = make("Llama", **KV)
    model.set_attn_implementation("sdpa")
    config = LoraConfig(
        r=4, lora_dropout=p, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
    )
    return get_peft_model(model, config).train()


def test_dropout_is_left_out_of_the_check_and_back_afterwards() -> None:
    model = with_dropout_of(0.5)
    captured, batch = captured_of(model), batches()[1]
    with without_dropout(model) as dropped:
        assert dropped
        assert check_capture(captured, batch, lambda rows: ordinary_sum(model, rows)) is None
    first, second = (captured.run(batch, torch.ones(()))[0].item() for _ in range(2))
    assert first != second
    with without_dropout(model_of("lora")) as dropped:
        assert not dropped


def fail(*arguments: Any) -> None:
    raise ValueError("no such layer")


def test_a_pass_that_fails_is_named() -> None:
    model = model_of("lora")
    captured = captured_of(model)
    captured.forward.layers[1].register_forward_pre_hook(fail)
    obstacle = check_capture(captured, batches()[0], lambda rows: rows["labels"].sum() * _bent(model))
    assert obstacle == "trying it failed: no such layer"


def test_models_whose_head_is_no_plain_matrix_are_refused() -> None:
    model = make("Llama", **KV)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(NotImplementedError, match="head is not a plain matrix"):
        PackedForward(model, SHAPE)


def test_the_head_is_compiled_once_for_any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(head_module._chunk, dynamic=False, backend="aot_eager")
    # A CPU does not take the compiled function.
    monkeypatch.setattr(head_module, "_chunk", compiled)
    weight, every = torch.randn(30, 8), torch.randint(0, 30, (4096,))
    try:
        for count in (128, 384, 3000):
            hidden, labels = torch.randn(count, 8), every[:count]
            computed = head_loss(hidden, weight, labels, torch.float32)
            expected = torch.nn.functional.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
            torch.testing.assert_close(computed, expected)
        assert counters["stats"]["unique_graphs"] == 1
    finally:
        torch._dynamo.reset()


def gemma_4(*, sharing: int) -> tuple[CapturedStep, dict[str, Any]]:
    """Return the step of a Gemma 4 whose last layers take the keys and values of earlier ones, and a micro-batch."""
    sizes = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 6, "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16, "global_head_dim": 32, "vocab_size": 200, "hidden_size_per_layer_input": 0,
    }  # fmt: skip
    types = ["sliding_attention", "full_attention"] * 3
    config = transformers.Gemma4TextConfig(**sizes, layer_types=types, num_kv_shared_layers=sharing)
    model = transformers.Gemma4ForCausalLM(config).train()
    model.set_attn_implementation("sdpa")
    shape = FixedShape.of_single_rows(1, 128)
    batch = Collate(PadRight(0), Flatten("positions"), shape=shape)([pack_of([128])])
    return CapturedStep(model, PackedForward(model, shape), contextlib.nullcontext, torch.float32, DEVICE), batch


def graphs_of(step: CapturedStep, batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many graphs are compiled for a pass as it would be captured."""
    really = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **_: really(call, dynamic=False, backend="eager"))
    torch._dynamo.reset()
    counters.clear()
    try:
        step.try_pass(batch)
        return int(counters["stats"]["unique_graphs"])
    finally:
        torch._dynamo.reset()


def test_layers_that_keep_keys_for_no_other_layer_are_compiled_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    # Sliding layers, full layers, and the last norm.
    assert graphs_of(*gemma_4(sharing=0), monkeypatch) == 3


def test_the_first_layer_is_compiled_with_the_others_though_embeddings_are_frozen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("lora")
    # The layers, and the last norm.
    assert len(text_decoder(model).layers) > 1 and graphs_of(captured_of(model), batches()[0], monkeypatch) == 2
    assert not model.get_input_embeddings()(torch.arange(4)).requires_grad


def test_layers_that_take_the_keys_of_others_still_find_them() -> None:
    step, batch = gemma_4(sharing=2)
    torch.testing.assert_close(step.run(batch, torch.ones(()))[0], ordinary_sum(step.model, batch).detach())


@pytest.mark.parametrize(
    ("class_name", "text"),
    [
        ("Gemma3ForConditionalGeneration", {}),
        ("Gemma4ForConditionalGeneration", {"final_logit_softcapping": 2.0}),
        ("Cohere2ForCausalLM", {"logit_scale": 0.25}),
        ("GraniteForCausalLM", {"logits_scaling": 8.0}),
        ("Qwen3VLForConditionalGeneration", {}),
        ("Mistral3ForConditionalGeneration", {}),
        ("DeepseekV3ForCausalLM", {}),
    ],
)
def test_heads_and_decoders_of_todays_models_give_the_models_own_loss(
    class_name: str, text: dict[str, Any], tmp_path: Path
) -> None:
    config = getattr(transformers, class_name).config_class
    model = save_tiny(config.model_type, class_name, tmp_path).float().train()
    for name, value in text.items():
        assert hasattr(model.config.get_text_config(), name)
        setattr(model.config.get_text_config(), name, value)
        if hasattr(model, name):
            setattr(model, name, value)
    for parameter in model.parameters():
        # Larger weights, so that a cap changes the logits.
        parameter.data.mul_(3 if parameter.dim() > 1 else 1)
    batch = batches()[0]
    expected = ordinary_sum(model, batch)
    expected.backward()
    weights = [(p, p.grad.clone()) for p in text_decoder(model).parameters() if p.grad is not None]
    model.zero_grad()
    loss, _ = captured_of(model).run(batch, torch.ones(()))
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    off = sum(float((p.grad - g).square().sum()) for p, g in weights) / sum(float(g.square().sum()) for _, g in weights)
    assert off < 1e-8


@pytest.mark.parametrize("changed", [Logits(), Logits(factor=0.25), Logits(factor=2.0, cap=3.0)])
@pytest.mark.parametrize("trained", [False, True])
def test_the_head_in_chunks_is_cross_entropy(monkeypatch: pytest.MonkeyPatch, trained: bool, changed: Logits) -> None:
    monkeypatch.setattr(head_module, "CHUNK", 16)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(50, 8, generator=generator, requires_grad=True)
    weight = torch.randn(30, 8, generator=generator, requires_grad=trained)
    labels = torch.randint(0, 30, (50,), generator=generator)
    labels[np.array([0, 7, 49])] = -100
    ours = head_loss(hidden, weight, labels, torch.float32, changed)
    logits = hidden @ weight.t() * changed.factor
    logits = torch.tanh(logits / changed.cap) * changed.cap if changed.cap else logits
    expected = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    inputs = [hidden, weight] if trained else [hidden]
    torch.testing.assert_close(ours, expected)
    for gradient, other in zip(
        torch.autograd.grad(ours * 3, inputs), torch.autograd.grad(expected * 3, inputs), strict=True
    ):
        torch.testing.assert_close(gradient, other)
