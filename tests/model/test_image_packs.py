"""Test packs of rows with images: each row has the loss and gradients that it has alone, with masks and kernels."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.conftest import write_jsonl
from tests.model.test_varlen import slow_varlen
from tests.plan.conftest import SHAPE
from tests.runtimes import cpu_runtime
from tests.tiny_vision import KINDS, image_rows, save_vision
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.arrow_rows import join_rows, split_rows
from unsloth_ddp.data.chat.tokenize import Encoder
from unsloth_ddp.data.images.processing import ImageProcessing, load_processing
from unsloth_ddp.data.order.collate import Flatten, PadRight
from unsloth_ddp.data.order.packing import PackingDecision, best_fit
from unsloth_ddp.data.sources.checked_rows import checked_rows
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.packing import attention, varlen
from unsloth_ddp.model.packing.obstacles import lookahead_reason
from unsloth_ddp.model.packing.row_check import rows_mix
from unsloth_ddp.model.packing.short_convolution import convolve_within_rows
from unsloth_ddp.model.towers import keep_boundaries_from_towers, own_positions
from unsloth_ddp.sizing.choose import planned_packing
from unsloth_ddp.sizing.micro_batch import RowLengths
from unsloth_ddp.training.shown.meter import real_tokens

TOLERANCE = 5e-6
IDS = np.arange(5, 200)
# Their image tokens attend to later ones, or (Qwen3.5) a state runs through the whole pack without its kernel.
WITHOUT_KERNEL = ("gemma3",)


class Tiny:
    """A tiny model with rows of 1, 0, 3 and 2 images."""

    def __init__(self, kind: str, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText

        save_vision(kind, folder)
        self.settings = Settings(model=str(folder))
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.processing: ImageProcessing = load_processing(self.settings)
        encoder = Encoder(self.processing.processor.tokenizer, supervise_all=False, processing=self.processing)
        path = write_jsonl(folder / "rows.jsonl", image_rows(folder, (1, 0, 3, 2)))
        encoded = [vars(encoder.encode(example)) for _, example in checked_rows(str(path), "train", task="sft")]
        arrays = [{name: np.array(one[name]) for name in ("input_ids", "labels")} for one in encoded]
        given = ("images", "rendered", "pixels")
        self.rows = [a | {name: one[name] for name in given} for a, one in zip(arrays, encoded, strict=True)]

    def batch(self, flatten: Flatten) -> dict[str, Any]:
        """The rows in two packs."""
        return flatten([join_rows(self.rows[:3]), join_rows(self.rows[3:])])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    made: dict[str, Tiny] = {}

    def of(kind: str) -> Tiny:
        if kind not in made:
            with pytest.MonkeyPatch.context() as patch:
                # Its processor needs that package for videos only.
                patch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
                made[kind] = Tiny(kind, tmp_path_factory.mktemp(kind))
        one = copy.copy(made[kind])
        one.model = copy.deepcopy(made[kind].model)
        return one

    return of


def losses_and_gradients(model: Any, batches: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """The loss of every supervised token in order, and the gradients of their sum with respect to all weights."""
    model.zero_grad()
    each = []
    for batch in batches:
        labels = batch.pop("labels")
        logits = model(**batch, use_cache=False).logits[:, :-1]
        losses = torch.nn.functional.cross_entropy(logits.mT, labels[:, 1:], ignore_index=-100, reduction="none")
        losses.sum().backward()
        each.append(losses[labels[:, 1:] != -100].detach())
    return torch.cat(each), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_rows_are_as_alone(one: Tiny, flatten: Flatten) -> None:
    pad = PadRight(0, one.processing)
    reference = copy.deepcopy(one.model)
    reference.set_attn_implementation("sdpa")
    expected = losses_and_gradients(reference, [pad([row]) for row in one.rows])
    found = losses_and_gradients(one.model, [one.batch(flatten)])
    for some, others in zip(found, expected, strict=True):
        assert ((some - others).norm() / others.norm()).item() < TOLERANCE


def with_state_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers of Qwen3.5 begin a state with each row, as the kernels of flash-linear-attention do."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    whole = modeling_qwen3_5.torch_chunk_gated_delta_rule

    def by_row(
        query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None, **given: Any
    ) -> Any:
        if cu_seqlens is None:
            return whole(query, key, value, g=g, beta=beta, **given)
        parts = [
            tuple(one[:, a:b] for one in (query, key, value, g, beta))
            for a, b in itertools.pairwise(cu_seqlens.tolist())
        ]
        return torch.cat([whole(q, k, v, g=gate, beta=b, **given)[0] for q, k, v, gate, b in parts], dim=1), None

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", by_row)
    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", modeling_qwen3_5.causal_conv1d_fn)


def some_of(kinds: list[str], quick: tuple[str, ...]) -> list[Any]:
    """Return the kinds as parameters; the quick ones stand for the others, which are slow."""
    return [pytest.param(kind, marks=() if kind in quick else pytest.mark.slow) for kind in kinds]


WITH_MASK = [*(kind for kind in KINDS if kind != "qwen3_5"), "gemma4 looking ahead"]


@pytest.mark.parametrize("kind", some_of(WITH_MASK, ("qwen3_vl", "gemma3", "gemma4 looking ahead")))
def test_a_row_in_a_pack_is_the_row_alone_with_a_mask(kind: str, tiny: Any) -> None:
    one = tiny(kind.split()[0])
    if "ahead" in kind:
        one.model.config.text_config.use_bidirectional_attention = "vision"
    flatten = attention.flatten_for(cpu_runtime(), one.model, PadRight(0, one.processing))
    assert_rows_are_as_alone(one, flatten)
    decision = PackingDecision(True, "a mask keeps rows apart")
    assert attention.prove_rows_apart(one.settings, cpu_runtime(), one.model, IDS, decision, one.processing) is decision


@pytest.mark.parametrize(
    "kind", some_of([kind for kind in KINDS if kind not in WITHOUT_KERNEL], ("qwen3_vl", "qwen3_5"))
)
def test_a_row_in_a_pack_is_the_row_alone_with_a_kernel(kind: str, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = tiny(kind)
    if kind == "qwen3_5":
        with_state_of_rows(monkeypatch)
        convolve_within_rows(one.model)
    called: list[int] = []

    def counted(query: Tensor, *args: Any, **given: Any) -> Tensor:
        called.append(len(query))
        return slow_varlen(query, *args, **given)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", counted)
    # Compared is in fp32, which the kernel would not take.
    monkeypatch.setattr(varlen, "SIXTEEN_BIT", (torch.float32,))
    of_towers = one.model.config.vision_config._attn_implementation
    assert varlen.obstacle(one.model) is None
    varlen.use(one.model)
    keep_boundaries_from_towers(one.model)
    assert one.model.config.vision_config._attn_implementation == of_towers
    runtime = Runtime(Ranks(), "transformers", "cuda", "fp32", "H200")
    flatten = attention.flatten_for(runtime, one.model, PadRight(0, one.processing))
    assert flatten.keys == "flash"
    assert_rows_are_as_alone(one, flatten)
    assert set(called) == {sum(len(row["input_ids"]) for row in one.rows)}
    assert rows_mix(one.model, flatten, IDS, "fp32", one.processing) is None


def test_the_question_for_a_look_ahead_compiles_nothing(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = tiny("gemma3").model, []

    def backend(graph: Any, _inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    # As Unsloth compiles the masks of Gemma 3.
    made = torch.compile(type(model).create_masks_for_generate, backend=backend)
    monkeypatch.setattr(type(model), "create_masks_for_generate", staticmethod(made))
    assert lookahead_reason(model) is not None
    assert not compiled


def test_image_tokens_that_look_ahead_take_no_kernel(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "tokens of an image attend to later ones, which kernels for packed rows do not take"
    assert {kind for kind in KINDS if lookahead_reason(tiny(kind).model)} == {"gemma3"}
    larger = tiny("gemma4").model
    larger.config.text_config.use_bidirectional_attention = "vision"
    assert lookahead_reason(larger) == reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(varlen, "is_available", lambda: True)
    runtime = Runtime(Ranks(), "transformers", "cuda", "bf16", "H200")
    with_images = attention.choose_packing(Settings(model="m"), runtime, larger, images=True)
    assert with_images == PackingDecision(False, reason)
    assert attention.choose_packing(Settings(model="m"), runtime, larger).packed
    shape = dataclasses.replace(
        SHAPE, packing=attention.packing_obstacles(larger, "transformers", unsloth_attention=False)
    )
    on_gpus = Settings(model="m", backend="transformers")
    assert planned_packing(on_gpus, shape, images=True) == PackingDecision(False, reason)
    assert planned_packing(on_gpus, shape).packed
    # A mask holds what they see: it is used where packs are asked for.
    asked = attention.choose_packing(Settings(model="m", packing="on"), runtime, tiny("gemma3").model, images=True)
    assert asked.packed and reason in asked.reason


def test_a_state_that_runs_through_the_pack_is_found(tiny: Any) -> None:
    one = tiny("qwen3_5")
    flatten = attention.flatten_for(cpu_runtime(), one.model, PadRight(0, one.processing))
    assert "depends on the row before" in str(rows_mix(one.model, flatten, IDS, "fp32", one.processing))


def test_positions_of_one_dimension_are_found_in_a_model_of_three(tiny: Any) -> None:
    one = tiny("qwen3_vl")
    flatten = Flatten("positions", padded=PadRight(0, one.processing))
    assert "other positions than the row alone" in str(rows_mix(one.model, flatten, IDS, "fp32", one.processing))


def test_packs_with_images_that_cannot_be_tried_are_not_used(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = tiny("qwen3_vl")
    monkeypatch.setattr(varlen, "is_sharded", lambda model: True)
    decision = PackingDecision(True, "a kernel keeps rows apart")
    refused = attention.prove_rows_apart(one.settings, cpu_runtime(), one.model, IDS, decision, one.processing)
    assert refused == PackingDecision(
        False, "packs with images cannot be tried before training while its weights are sharded"
    )


def test_positions_of_a_pack_are_those_of_its_rows(tiny: Any) -> None:
    one = tiny("qwen3_vl")
    flatten = attention.flatten_for(cpu_runtime(), one.model, PadRight(0, one.processing))
    batch = one.batch(flatten)
    lengths = [len(row["input_ids"]) for row in one.rows]
    assert batch["position_ids"].shape == (4, 1, sum(lengths)) and "attention_mask" not in batch
    assert batch["position_ids"][0, 0].tolist() == [place for length in lengths for place in range(length)]
    assert batch["input_ids"][0].tolist() == [token for row in one.rows for token in row["input_ids"].tolist()]
    assert len(batch["image_grid_thw"]) == 6
    assert int(real_tokens(batch)) == sum(lengths)
    for row, places in zip(one.rows, batch["position_ids"][1:].split(lengths, dim=2), strict=True):
        alone = PadRight(0, one.processing)([row])
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "attention_mask")
        given = {name: alone[name] for name in names if name in alone}
        assert torch.equal(one.model.model.get_rope_index(**given)[0], places)


def test_a_pack_without_an_image_gets_a_row_for_the_towers_where_they_are_needed(tiny: Any) -> None:
    one = tiny("qwen3_vl")
    one.processing = copy.copy(one.processing)
    one.processing.always = True
    flatten = attention.flatten_for(cpu_runtime(), one.model, PadRight(0, one.processing))
    text, small = one.rows[1], one.processing.small_row
    batch = flatten([join_rows([text])])
    assert batch["input_ids"].shape[1] == len(text["input_ids"]) + len(small["input_ids"])
    expected, _ = losses_and_gradients(one.model, [PadRight(0)([{n: text[n] for n in ("input_ids", "labels")}])])
    found, _ = losses_and_gradients(one.model, [batch])
    torch.testing.assert_close(found, expected)
    assert all(p.grad is not None for p in one.model.model.visual.parameters())


def test_worker_processes_get_positions_without_the_model(tiny: Any) -> None:
    model = tiny("qwen3_vl").model
    sent = pickle.dumps(own_positions(model))
    assert len(sent) < 50_000
    ids = torch.tensor([[5, 6, 7]])
    places, _ = pickle.loads(sent)(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids))
    assert places.tolist() == [[[0, 1, 2]]] * 3
    assert own_positions(tiny("gemma4").model) is None


def test_boundaries_of_rows_do_not_reach_towers(tiny: Any) -> None:
    one = tiny("qwen3_vl")
    given: list[set[str]] = []
    flatten = Flatten("flash", padded=PadRight(0, one.processing), positions=own_positions(one.model))
    batch = one.batch(flatten)
    batch.pop("labels")
    for keep in (lambda _: None, keep_boundaries_from_towers):
        keep(one.model)
        # Hooks run in the order of their registration.
        one.model.model.visual.register_forward_pre_hook(lambda *a: given.append(set(a[2])), with_kwargs=True)
        one.model(**batch)
    assert "cu_seq_lens_q" in given[0]
    assert not {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"} & given[-1]


def test_rows_leave_a_pack_with_their_images(tiny: Any) -> None:
    rows = tiny("qwen3_vl").rows
    for found, row in zip(split_rows(join_rows(rows)), rows, strict=True):
        assert found["images"] == row["images"] and found["rendered"] == row["rendered"]
        assert found["input_ids"].tolist() == row["input_ids"].tolist()


def test_a_plan_sums_the_pixels_of_a_packs_rows() -> None:
    packing = best_fit(np.array([4, 3, 2]), 6)
    rows = RowLengths(np.array([4, 3, 2]), np.array([2, 2, 1]), pixels=np.array([100, 10, 1])).packed(packing)
    assert sorted(rows.pixels.tolist()) == [10, 101] and rows.most_pixels(1) == 101
