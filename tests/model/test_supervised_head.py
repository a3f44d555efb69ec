"""The output head over supervised tokens only: the same loss and gradients, from fewer products."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor

from tests.data.test_packing import KV, make
from unsloth_ddp.data.chat.labels import IGNORED, MULTIPLE, supervised_positions
from unsloth_ddp.data.order.collate import Collate, Flatten, PadRight
from unsloth_ddp.model.forward.supervised_head import (
    ROWS,
    SEARCHED,
    SupervisedHead,
    fits_fused_head,
    head_with_equal_loss,
)


def random_labels(rows: int, tokens: int, share: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, 64, (rows, tokens), generator=generator)
    return torch.where(torch.rand(labels.shape, generator=generator) < share, labels, IGNORED)


@pytest.mark.parametrize(("rows", "tokens", "share"), [(1, 1000, 0.2), (3, 400, 0.5), (1, 300, 0.0), (8, 100, 0.1)])
def test_positions_are_those_before_a_label(rows: int, tokens: int, share: float) -> None:
    labels = random_labels(rows, tokens, share)
    expected = [
        (row * tokens + at, int(labels[row, at + 1]))
        for row in range(rows)
        for at in range(tokens - 1)
        if labels[row, at + 1] != IGNORED
    ]
    found = supervised_positions(labels)
    positions, following = found["supervised_positions"][0].tolist(), found["shift_labels"][0].tolist()
    assert len(positions) == len(following) > 0 and len(positions) % MULTIPLE == 0
    assert list(zip(positions, following, strict=True))[: len(expected)] == expected
    assert set(following[len(expected) :]) <= {IGNORED}
    assert len(positions) - len(expected) <= MULTIPLE


@pytest.mark.parametrize(("tokens", "share"), [(1000, 1.0), (1000, 0.95), (10_000, 0.93), (100, 0.1)])
def test_nothing_is_selected_where_little_would_be_saved(tokens: int, share: float) -> None:
    assert supervised_positions(random_labels(1, tokens, share)) == {}


def batch_of(rows: int, tokens: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(1))
    labels = torch.where(random_labels(rows, tokens, 0.2) == IGNORED, IGNORED, ids)
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model: Any, batch: dict[str, Tensor], **more: Tensor) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    loss = model(**batch, **more, use_cache=False, num_items_in_batch=torch.tensor(7.0)).loss
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(("rows", "tokens"), [(1, 700), (4, 200)])
def test_the_loss_and_its_gradients_stay_and_the_head_sees_less(rows: int, tokens: int) -> None:
    model = make("Llama", **KV).train()
    seen = []
    model.lm_head.register_forward_hook(lambda _, inputs, out: seen.append(inputs[0].shape[1] * inputs[0].shape[0]))
    batch = batch_of(rows, tokens)
    head = SupervisedHead(model)
    whole = loss_and_gradients(model, batch)
    chosen = supervised_positions(batch["labels"])
    with head.at(chosen["supervised_positions"]):
        selected = loss_and_gradients(model, batch, shift_labels=chosen["shift_labels"])
    torch.testing.assert_close(selected[0], whole[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(selected[1], whole[1], rtol=1e-4, atol=1e-6)
    assert seen == [rows * tokens, chosen["shift_labels"].numel()]
    assert model(**batch, use_cache=False).logits.shape == (rows, tokens, 64), "outside it the head sees all"


def test_positions_are_selected_from_a_tuple_too() -> None:
    model = make("Llama", **KV)
    batch = batch_of(2, 200)
    positions = supervised_positions(batch["labels"])["supervised_positions"]
    whole = model.get_decoder()(batch["input_ids"], use_cache=False, return_dict=False)
    with SupervisedHead(model).at(positions):
        chosen = model.get_decoder()(batch["input_ids"], use_cache=False, return_dict=False)
    assert torch.equal(chosen[0][0], whole[0].flatten(0, 1)[positions[0]]) and len(chosen) == len(whole)


def learned_rows() -> list[dict[str, Any]]:
    """Four rows of which nothing is learned, whose loss is 0 however it is computed, and four others."""
    batch = batch_of(4, 300)
    learned = [{name: value[i].numpy() for name, value in batch.items()} for i in range(4)]
    # No token comes before the first label.
    unlearned = np.where(np.arange(300) > 0, IGNORED, 5)
    return [{**one, "labels": unlearned} for one in learned] + learned


def loss_of(model: Any, takes_labels: bool = True) -> Callable[[SupervisedHead, dict[str, Tensor]], Tensor]:
    """A loss that takes the labels of chosen positions, or does not."""

    def loss(head: SupervisedHead, batch: dict[str, Tensor]) -> Tensor:
        batch = dict(batch)
        positions = batch.pop("supervised_positions", None)
        if not takes_labels and "shift_labels" in batch:
            # What a loss over all labels would make of fewer hidden states: those of other tokens.
            chosen = batch["shift_labels"].shape[1]
            batch["shift_labels"] = batch["labels"].flatten()[:chosen][None].contiguous()
        with head.at(positions):
            return model(**batch, use_cache=False, num_items_in_batch=torch.ones(())).loss

    return loss


def head_for(model: Any, examples: Any = None, rows: int = 8, loss: Any = None) -> SupervisedHead | None:
    """head_with_equal_loss with the kit's own batches."""
    collate = Collate(PadRight(0), Flatten("unsloth"))
    return head_with_equal_loss(model, examples or learned_rows(), rows, collate, loss or loss_of(model))


def test_a_model_that_takes_labels_of_chosen_tokens_gets_them() -> None:
    model = make("Llama", **KV).train()
    # Dropout, as adapters have it, would make any two losses differ.
    torch.nn.init.normal_(model.lm_head.weight)
    model.lm_head = torch.nn.Sequential(torch.nn.Dropout(0.5), model.lm_head)
    assert head_for(model) is not None
    assert model.training


@pytest.mark.parametrize(("per_device", "rows"), [(1, 1), (8, ROWS)])
def test_no_more_rows_are_compared_than_a_micro_batch_has(per_device: int, rows: int) -> None:
    model = make("Llama", **KV)
    seen, loss = [], loss_of(model)

    def counted(head: SupervisedHead, batch: dict[str, Tensor]) -> Tensor:
        seen.append(len(batch["labels"]))
        return loss(head, batch)

    assert head_for(model, rows=per_device, loss=counted) is not None
    assert seen == [rows, rows]


def test_a_loss_of_zero_proves_nothing() -> None:
    assert head_for(make("Llama", **KV), loss=lambda head, batch: torch.zeros(())) is None


def test_a_loss_that_would_change_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = make("Llama", **KV)
    with caplog.at_level(logging.WARNING):
        assert head_for(model, loss=loss_of(model, takes_labels=False)) is None
    assert "because the loss would change from" in caplog.text


def test_a_failed_check_leaves_the_compiled_loss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loss = ModuleType("unsloth_zoo.fused_losses.cross_entropy_loss")
    loss._FUSED_CE_COMPILE_SUPPORTED = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, loss.__name__, loss)
    model = make("Llama", **KV)
    whole = loss_of(model)

    def fails(head: SupervisedHead, batch: dict[str, Tensor]) -> Tensor:
        if "shift_labels" in batch:
            loss._FUSED_CE_COMPILE_SUPPORTED = False  # type: ignore[attr-defined]
            raise ValueError("Expected input batch_size (128) to match target batch_size (512).")
        return whole(head, batch)

    with caplog.at_level(logging.WARNING):
        assert head_for(model, loss=fails) is None
    assert "because selecting supervised tokens failed: Expected input batch_size (128)" in caplog.text
    assert loss._FUSED_CE_COMPILE_SUPPORTED is None  # type: ignore[attr-defined]


class Unlearned:
    """More rows than anyone would look through, of none of which anything is learned."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert index < SEARCHED
        return {"input_ids": np.arange(9), "labels": np.full(9, IGNORED)}


LEARNED_WHOLE = [{"input_ids": np.arange(300) % 64, "labels": np.arange(300) % 64}]


@pytest.mark.parametrize("examples", [Unlearned(), LEARNED_WHOLE], ids=["nothing learned", "all learned"])
def test_no_loss_is_computed_where_selecting_saves_nothing(examples: Any) -> None:
    assert head_for(make("Llama", **KV), examples, loss=lambda *given: pytest.fail("a loss was computed")) is None


def test_a_batch_holds_supervised_positions_on_request() -> None:
    rows = [{"input_ids": np.arange(1000), "labels": np.where(np.arange(1000) < 900, IGNORED, np.arange(1000))}]
    collate = Collate(PadRight(0), Flatten("unsloth"))
    assert "shift_labels" not in collate(rows)
    collate.head_chooses = True
    assert collate(rows)["supervised_positions"][0, :100].tolist() == list(range(899, 999))


@pytest.mark.parametrize(
    ("kind", "fits"),
    [
        ("Llama", True), ("Gemma2", True), ("GPT2", True), ("OPT", True), ("Mamba", True),
        # A layer before the output embedding; a cap that TRL's head does not know.
        ("Bert", False), ("Electra", False), ("RecurrentGemma", False), ("xLSTM", False),
    ],
)  # fmt: skip
def test_a_fused_head_is_used_where_it_makes_the_models_logits(kind: str, fits: bool) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes, num_key_value_heads=2, head_dim=8, vocab_size=32)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert fits_fused_head(model) is fits


def test_no_fused_head_is_used_where_transformers_does_not_know_the_head() -> None:
    """A model that brings its own code may give its head another name than lm_head."""
    model = make("Llama")
    model.output = model.lm_head
    del model.lm_head
    assert model.get_output_embeddings() is None
    assert not fits_fused_head(model)


def test_a_fused_head_is_used_under_an_adapter() -> None:
    model = make("Llama")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    assert fits_fused_head(adapted)
