"""Packs: how rows are put into them, how many fill a step, when there are any, and that a row's loss is its own."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny_models import tiny_model
from unsloth_ddp.data.arrow_rows import ArrowRows, PackedRows
from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.data.dataset import TOKEN_FEATURES, row_lengths
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.collate import Collate, Flatten, PadRight
from unsloth_ddp.data.order.packing import (
    BatchRequest,
    Packing,
    PackingDecision,
    best_fit,
    capacity_for,
    decide_packing,
    plan_step,
)
from unsloth_ddp.model.packing.attention import AttentionSetup, select_varlen_kernel
from unsloth_ddp.model.packing.obstacles import mixing_reason, state_reason
from unsloth_ddp.training.shown.meter import real_tokens
from unsloth_ddp.training.tasks.text import supervised_tokens
from unsloth_ddp.utils.errors import UserError

CAPACITY = 100
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=200)


def naive_best_fit(lengths: list[int]) -> list[int]:
    """Tokens of each pack, sorted: one row after the other, longest first, into the tightest pack that takes it."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, space in enumerate(spaces) if space >= length]
        if fitting:
            spaces[min(fitting, key=lambda i: spaces[i])] -= length
        else:
            spaces.append(CAPACITY - length)
    return sorted(CAPACITY - space for space in spaces)


def check_packing(packing: Packing, lengths: np.ndarray) -> None:
    assert sorted(packing.rows.tolist()) == list(range(len(lengths)))
    for index in range(len(packing)):
        members = packing.members(index)
        assert len(members) > 0
        assert members.tolist() == sorted(members.tolist())
        assert lengths[members].sum() == packing.tokens[index]
        assert len(members) == 1 or packing.tokens[index] <= packing.capacity


@given(LENGTHS)
def test_packs_are_those_of_best_fit_decreasing(lengths: list[int]) -> None:
    packing = best_fit(np.array(lengths), CAPACITY)
    check_packing(packing, np.array(lengths))
    assert sorted(packing.tokens.tolist()) == naive_best_fit(lengths)
    again = best_fit(np.array(lengths), CAPACITY)
    assert all(np.array_equal(getattr(packing, f.name), getattr(again, f.name)) for f in dataclasses.fields(Packing))


def test_a_million_rows_are_packed_in_seconds() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.4, 0.8, 1_000_000).astype(np.int64), 1, 2048)
    began = time.process_time()
    packing = best_fit(lengths, 2048)
    assert time.process_time() - began < 20
    assert packing.fill > 0.99
    assert np.array_equal(np.bincount(packing.rows, minlength=len(lengths)), np.ones(len(lengths)))
    assert packing.tokens.max() <= 2048


# ---- how many packs fill a step ----

CHATS = np.clip(np.random.default_rng(0).lognormal(5.4, 0.8, 5000).astype(np.int64), 1, 2048)
PACK = PackingDecision(True, "a kernel keeps rows apart")
PAD = PackingDecision(False, "there is no kernel")


def planned(
    lengths: np.ndarray = CHATS, choice: PackingDecision = PACK, **asked: Any
) -> tuple[BatchPlan, Packing | None, PackingDecision]:
    defaults = {"packing": "auto", "max_length": 2048, "per_device": 1, "processes": 1}
    return plan_step(BatchRequest(**{**defaults, **asked}), lengths, choice)


@pytest.mark.parametrize("processes", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("asked", [{}, {"global_batch": 32, "per_device": 2}, {"global_batch": 64, "per_device": 4}])
def test_auto_keeps_about_the_rows_of_an_unpacked_step(processes: int, asked: dict[str, int]) -> None:
    unpacked, none, _ = planned(choice=PAD, processes=processes, **asked)
    plan, packing, _ = planned(processes=processes, **asked)
    assert none is None
    assert packing is not None
    check_packing(packing, CHATS)
    assert plan.per_device <= asked.get("per_device", 1)
    assert plan.global_batch * packing.rows_a_pack == pytest.approx(unpacked.global_batch, rel=0.2)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"global_batch": 16},
        {"global_batch": 32},
        {"global_batch": 64},
        {"global_batch": 256},
        {"global_tokens": 65536},
    ],
)
def test_auto_takes_the_same_steps_when_processes_are_added(asked: dict[str, int]) -> None:
    plans = [planned(processes=processes, **asked) for processes in (1, 2, 4, 8)]
    assert len({plan.global_batch for plan, _, _ in plans}) == 1
    first = plans[0][1]
    assert first is not None
    for _, packing, _ in plans:
        assert packing is not None
        assert np.array_equal(packing.rows, first.rows) and np.array_equal(packing.starts, first.starts)


@pytest.mark.parametrize(("length", "rows"), [(2048, 32), (1100, 32), (700, 32), (1, 16)])
def test_rows_that_fill_packs_badly_still_make_the_step_asked_for(length: int, rows: int) -> None:
    plan, packing, _ = planned(np.full(3000, length), global_batch=rows)
    assert packing is not None
    assert plan.global_batch * packing.rows_a_pack == pytest.approx(rows, rel=0.3)


def test_auto_makes_shorter_packs_of_short_rows_rather_than_a_larger_step() -> None:
    lengths = np.random.default_rng(0).integers(10, 44, 760)
    plan, packing, _ = planned(lengths, processes=2, global_batch=16, per_device=4)
    assert packing is not None
    assert packing.capacity < 300
    assert plan.global_batch * packing.rows_a_pack == pytest.approx(16, rel=0.15)


def test_packs_of_few_rows_let_longer_rows_be_packs_by_themselves() -> None:
    plan, packing, choice = planned(processes=8, global_batch=16)
    assert packing is not None and choice == PACK
    assert plan == BatchPlan(1, 1, 8)
    assert packing.capacity < CHATS.max() == packing.longest
    alone = CHATS[[packing.members(index)[0] for index in np.flatnonzero(np.diff(packing.starts) == 1)]]
    assert set(CHATS[packing.capacity < CHATS]) <= set(alone)
    assert packing.tokens[packing.tokens > packing.capacity].sum() == CHATS[packing.capacity < CHATS].sum()


@given(LENGTHS, st.integers(1, 24))
def test_the_capacity_for_some_rows_a_pack_is_the_least_that_could_do(lengths: list[int], tenths: int) -> None:
    rows, array = 1 + tenths / 10, np.array(lengths)

    def packs(capacity: int) -> int:
        return sum(n > capacity for n in lengths) + math.ceil(sum(n for n in lengths if n <= capacity) / capacity)

    capacity = capacity_for(array, rows, CAPACITY)
    assert min(lengths) <= capacity <= CAPACITY
    assert capacity == CAPACITY or len(lengths) >= rows * packs(capacity)
    assert capacity == min(lengths) or len(lengths) < rows * packs(capacity - 1)
    assert len(best_fit(array, capacity)) >= packs(capacity)


def test_on_counts_packs() -> None:
    plan, packing, _ = planned(packing="on", global_batch=16, per_device=2, processes=2)
    assert plan == BatchPlan(2, 4, 2)
    assert packing is not None and packing.capacity == 2048
    plan, _, _ = planned(packing="on", accumulation=3, per_device=2, processes=2)
    assert plan == BatchPlan(2, 3, 2)


def test_on_without_a_batch_is_nearest_to_sixteen_rows() -> None:
    plan, packing, _ = planned(packing="on")
    assert packing is not None
    assert abs(plan.global_batch * packing.rows_a_pack - 16) <= packing.rows_a_pack / 2


@pytest.mark.parametrize("mode", ["on", "auto"])
@pytest.mark.parametrize(
    ("tokens", "per_device", "processes"), [(32768, 1, 1), (32768, 2, 2), (100_000, 4, 2), (12_000, 4, 2), (1, 1, 2)]
)
def test_a_batch_in_tokens_is_the_nearest_that_divides(mode: str, tokens: int, per_device: int, processes: int) -> None:
    plan, packing, _ = planned(packing=mode, global_tokens=tokens, per_device=per_device, processes=processes)
    assert packing is not None
    held = plan.global_batch * packing.tokens_a_pack
    least = processes * packing.tokens_a_pack
    assert abs(held - tokens) <= least / 2 or held == pytest.approx(least)
    assert plan.per_device <= per_device


def test_two_batches_that_disagree_are_refused_and_two_that_agree_are_not() -> None:
    plan, _, _ = planned(packing="on", global_tokens=8 * 2048, global_batch=8)
    assert plan.global_batch == 8
    with pytest.raises(
        UserError, match=r"16384 is 8 packs a step and global_batch_size \(4 packs\) is 4; give only one"
    ):
        planned(packing="on", global_tokens=8 * 2048, global_batch=4)
    with pytest.raises(UserError, match=r"is 8 packs a step and gradient_accumulation_steps \(3 packs\) is 3"):
        planned(packing="on", global_tokens=8 * 2048, accumulation=3)
    plan, _, _ = planned(global_tokens=8 * 2048, global_batch=round(8 * 2048 / CHATS.mean()))
    assert plan.global_batch == 8
    with pytest.raises(UserError, match=r"global_batch_size \(400 rows\)"):
        planned(global_tokens=8 * 2048, global_batch=400)


def test_a_batch_in_tokens_without_packing_is_refused_with_the_reason() -> None:
    with pytest.raises(
        UserError, match="global_batch_tokens 4096 needs packed rows, and rows are padded: there is no ker"
    ):
        planned(choice=PAD, global_tokens=4096)


# ---- whether ----


@pytest.mark.parametrize(
    ("wanted", "kernel", "wrong", "packed", "reason"),
    [
        ("auto", "xformers", None, True, "xformers keeps rows apart"),
        ("auto", None, None, False, "a CPU has no attention kernel for packed rows"),
        ("auto", "xformers", "it remembers", False, "it remembers"),
        ("on", "xformers", None, True, "as set; xformers keeps rows apart"),
        (
            "on",
            None,
            None,
            True,
            "as set; a CPU has no attention kernel for packed rows, so a mask keeps rows apart",
        ),
        ("off", "xformers", None, False, "--packing off"),
        ("off", "xformers", "it remembers", False, "--packing off"),
    ],
)
def test_the_choice_and_its_reason(wanted, kernel, wrong, packed, reason) -> None:
    choice = decide_packing(wanted, "a CPU has no attention kernel for packed rows", kernel, wrong)
    assert choice.packed == packed
    assert choice.reason.startswith(reason)


def test_packing_that_would_mix_rows_is_refused() -> None:
    with pytest.raises(UserError, match="packing on would mix rows, because it remembers; use --packing auto or off"):
        decide_packing("on", "a CPU", "xformers", "it remembers")


H200 = AttentionSetup("cuda", sixteen_bit=True, head_dim=128, unsloth_attention=True, capability=9, torch_varlen=True)
TRANSFORMERS = {"unsloth_attention": False, "replaceable": True}


@pytest.mark.parametrize(
    ("changed", "kernel"),
    [
        ({}, "torch's varlen_attn"),
        ({"flash_attn": True}, "flash-attn"),
        ({"capability": 7}, None),
        ({"capability": 7, "xformers": True}, "xformers"),
        ({"torch_varlen": False}, None),
        ({"torch_varlen": False, "xformers": True}, "xformers"),
        ({"sixteen_bit": False, "flash_attn": True}, None),
        ({"head_dim": 512}, None),
        ({"head_dim": 20}, None),
        ({"device_type": "cpu"}, None),
        (TRANSFORMERS, "torch's varlen_attn"),
        ({**TRANSFORMERS, "capability": 7}, None),
        ({**TRANSFORMERS, "torch_varlen": False, "xformers": True, "flash_attn": True}, None),
        ({**TRANSFORMERS, "replaceable": False}, None),
        ({**TRANSFORMERS, "implementation": "torch_varlen"}, "torch's varlen_attn"),
        # The attention that models with sinks have.
        ({**TRANSFORMERS, "implementation": "eager"}, "torch's varlen_attn"),
        ({**TRANSFORMERS, "implementation": "eager", "replaceable": False}, None),
        ({**TRANSFORMERS, "implementation": "eager", "chosen_by_unsloth": True}, None),
        ({**TRANSFORMERS, "implementation": "flash_attention_2", "replaceable": False}, "flash-attn"),
    ],
)
def test_the_kernel_for_packed_rows(changed: dict[str, Any], kernel: str | None) -> None:
    assert select_varlen_kernel(dataclasses.replace(H200, **changed)) == kernel


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
KV = {"num_key_value_heads": 1}


def make(name: str, **config: Any) -> Any:
    """A tiny model of a class of Transformers, with random weights."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}Config")
    model = transformers.AutoModelForCausalLM.from_config(kind(**{**SIZES, **config}), attn_implementation="eager")
    return model.float().eval()


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("Mamba", {"state_size": 4}, "the model takes no position_ids"),
        ("Llama4Text", {**KV, "layer_types": ["chunked_attention", "full_attention"]}, "chunked attention"),
    ],
)
def test_models_that_would_mix_rows_are_known(name: str, config: dict[str, Any], reason: str) -> None:
    assert reason in str(mixing_reason(make(name, **config)))


def test_layers_with_a_state_are_known() -> None:
    model = tiny_model("qwen3_next", "Qwen3NextForCausalLM")
    assert "Qwen3NextGatedDeltaNet layers carry a state" in str(state_reason(model))
    assert mixing_reason(model) is state_reason(make("Llama")) is None
    # Its convolutions are computed within rows.
    assert state_reason(make("Lfm2", **KV, layer_types=["conv", "full_attention"])) is None


# ---- what a pack is, and that a row's loss is its own ----


def tokenized(lengths: list[int], vocabulary: int = 64) -> datasets.Dataset:
    """Random rows, about half of the tokens supervised, and the filler."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, vocabulary, length).tolist() for length in [*lengths, 1]]
    labels = [[i if rng.random() < 0.5 else IGNORED for i in row] for row in ids[:-1]]
    columns = {
        "input_ids": ids,
        "labels": [*labels, [IGNORED]],
        "overlong": [False] * len(ids),
        "supervised": [0] * len(ids),
    }
    return datasets.Dataset.from_dict(columns, features=TOKEN_FEATURES).with_format(
        "numpy", columns=["input_ids", "labels"]
    )


ROWS = [17, 3, 1, 24, 9, 9, 30, 5, 2, 12]


def both_ways() -> tuple[datasets.Dataset, Packing, dict[str, Any], dict[str, Any]]:
    """The same rows as one padded and one packed micro-batch, each with the filler."""
    rows = tokenized(ROWS)
    packing = best_fit(row_lengths(rows)[:-1], 32)
    packs = PackedRows(ArrowRows(rows), packing)
    collate = Collate(PadRight(0), Flatten("unsloth"))
    order = [*packing.rows.tolist(), len(ROWS)]
    return rows, packing, collate([rows[i] for i in order]), collate([packs[i] for i in range(len(packs))])


def test_a_packed_micro_batch_holds_each_row_with_its_own_positions() -> None:
    rows, packing, padded, packed = both_ways()
    assert row_lengths(rows).tolist() == [*ROWS, 1]
    at = 0
    for row in [*packing.rows.tolist(), len(ROWS)]:
        length = len(rows[row]["input_ids"])
        span = slice(at, at + length)
        assert packed["input_ids"][0, span].tolist() == rows[row]["input_ids"].tolist()
        assert packed["position_ids"][0, span].tolist() == list(range(length))
        assert packed["labels"][0, span].tolist() == [IGNORED, *rows[row]["labels"].tolist()[1:]]
        at += length
    assert packed["input_ids"].shape == (1, at)
    assert packed["packed_seq_lengths"].tolist() == [len(rows[i]["input_ids"]) for i in [*packing.rows, len(ROWS)]]
    assert padded["input_ids"].shape == (len(ROWS) + 1, max(ROWS))


def test_the_divisor_and_the_counted_tokens_are_those_of_padded_rows() -> None:
    _, _, padded, packed = both_ways()
    assert supervised_tokens(packed["labels"]) == supervised_tokens(padded["labels"]) > 20
    # Rows of one token count as fillers, packed or not.
    assert real_tokens(packed) == real_tokens(padded) == sum(ROWS) - 1


def test_flash_attention_is_told_where_rows_begin() -> None:
    rows = tokenized(ROWS)
    packs = PackedRows(ArrowRows(rows), best_fit(np.array(ROWS), 32))
    batch = Flatten("flash")([packs[0], packs[1]])
    lengths = np.concatenate([packs[0]["lengths"], packs[1]["lengths"]])
    assert batch["cu_seq_lens_q"].tolist() == [0, *np.cumsum(lengths).tolist()]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert torch.equal(batch["cu_seq_lens_k"], batch["cu_seq_lens_q"])
    assert batch["max_length_q"] == batch["max_length_k"] == lengths.max()


def token_losses(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The loss of every supervised next token, in order."""
    inputs = {k: v for k, v in batch.items() if k not in ("labels", "packed_seq_lengths")}
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none", ignore_index=IGNORED)
    return losses[targets != IGNORED]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("name", "config"),
    [("Llama", KV), ("Qwen3", {**KV, "head_dim": 16}), ("Mistral", {**KV, "sliding_window": 8}), ("GPT2", {})],
)
def test_every_token_loss_is_the_same_packed_or_padded(name: str, config: dict[str, Any], attention: str) -> None:
    model = make(name, **config)
    model.set_attn_implementation(attention)
    assert mixing_reason(model) is None
    _, _, padded, packed = both_ways()
    expected, found = token_losses(model, padded), token_losses(model, packed)
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6)
    mixed = {**packed, "position_ids": torch.arange(packed["input_ids"].shape[1])[None]}
    assert (token_losses(model, mixed) - expected).abs().max() > 1e-4, "the comparison sees no mixing"
