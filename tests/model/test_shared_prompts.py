"""Prompts of pairs that are computed once for both answers, against whole rows; the kernel is a slow stand-in."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.data.test_packing import KV, make, token_losses
from tests.model.test_varlen import LATENT, MISTRAL, QWEN3, slow_varlen
from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.data.order.collate import Collate, Flatten, PadRight, repeated_prompts
from unsloth_ddp.model.packing import row_check, varlen
from unsloth_ddp.training.shown.meter import real_tokens
from unsloth_ddp.training.tasks.log_probabilities import AnswerLogProbabilities

TOKEN_IDS = np.arange(3, 60)
APART = Flatten("flash")
ONCE = dataclasses.replace(APART, prompts_once=True)


@pytest.fixture(autouse=True)
def _slow_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.attention.varlen

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", slow_varlen)
    monkeypatch.setattr(varlen, "SIXTEEN_BIT", (*varlen.SIXTEEN_BIT, torch.float32))


def pair(prompt: list[int], *answers: list[int]) -> list[tuple[list[int], list[int]]]:
    """The tokens and labels of the rows of a pair."""
    return [(prompt + answer, [IGNORED] * len(prompt) + answer) for answer in answers]


def pack(*pairs: list[tuple[list[int], list[int]]]) -> dict[str, np.ndarray]:
    rows = [row for two in pairs for row in two]
    ids, labels = (np.concatenate([row[part] for row in rows]) for part in (0, 1))
    lengths = np.array([len(row[0]) for row in rows])
    labels[np.cumsum(lengths) - lengths] = IGNORED
    return {"input_ids": ids, "labels": labels, "lengths": lengths}


PACKS = [
    pack(pair([5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [20, 21, 22], [23, 24, 25, 26]), pair([5, 6, 7], [30], [31, 32])),
    pack(pair([40, 41, 42, 43], [50, 51], [50, 52, 53]), pair([], [33, 34, 35], [33, 36])),
]


def repeated(*rows: tuple[list[int], list[int]]) -> list[int]:
    ids, labels = (np.concatenate([row[part] for row in rows]) for part in (0, 1))
    return repeated_prompts(ids, labels, np.array([len(row[0]) for row in rows])).tolist()


def test_the_prompt_is_what_neither_row_is_trained_on_but_for_its_last_token() -> None:
    assert repeated(*pair([5, 6, 7, 8], [20, 21], [20, 22])) == [0, 3]
    assert repeated(*pair([5], [20], [21])) == [0, 0]
    assert repeated(*pair([], [20], [21])) == [0, 0]
    # Answers that were cut: one token stays.
    assert repeated(*pair([5, 6, 7, 8], [], [])) == [0, 3]
    # The chosen answer is trained on where the other row still has its prompt.
    assert repeated(([5, 6, 7, 8], [IGNORED, IGNORED, 7, 8]), ([5, 6, 7, 8, 9], [IGNORED] * 4 + [9])) == [0, 1]
    assert repeated(*pair([5, 6, 7], [9], [8]), *pair([5, 6, 9], [9], [8])) == [0, 2, 0, 2]


@pytest.mark.parametrize(
    ("name", "config"), [("Llama", KV), ("Qwen3", QWEN3), ("Mistral", MISTRAL), ("DeepseekV3", LATENT)]
)
def test_losses_and_gradients_are_those_of_whole_rows(name: str, config: dict[str, Any]) -> None:
    model = make(name, **config).train()
    varlen.use(model)
    found = []
    for flatten in (APART, ONCE):
        batch = flatten(PACKS)
        losses = token_losses(model, batch)
        model.zero_grad()
        model(**batch, use_cache=False).loss.backward()
        found.append((losses, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    assert batch["input_ids"].shape[1] == sum(len(one["input_ids"]) for one in PACKS) - (9 + 2) - 3
    for apart, once in zip(*found, strict=True):
        torch.testing.assert_close(once, apart, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(("name", "config"), [("Qwen3", QWEN3), ("Mistral", MISTRAL)])
def test_the_trial_finds_no_difference_where_there_is_none(name: str, config: dict[str, Any]) -> None:
    model = make(name, **config)
    varlen.use(model)
    assert row_check.prompts_differ(model, APART, TOKEN_IDS, "fp32") is None


def test_the_trial_finds_answers_that_do_not_see_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("Qwen3", **QWEN3)
    attend = varlen.attend

    def drops(*given: Any, shared_keys: Tensor | None = None, **others: Any) -> Any:
        return attend(*given, **others)

    monkeypatch.setattr(varlen, "attend", drops)
    varlen.use(model)
    said = row_check.prompts_differ(model, APART, TOKEN_IDS, "fp32")
    assert said is not None and said.startswith("the loss would differ by")


def test_heads_that_are_too_wide_for_flash_attention_are_left_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "LARGEST_FLASH_HEAD", 8)
    monkeypatch.setattr(
        varlen, "wide_attention", lambda q, k, v, *_: (v.repeat_interleave(q.shape[1] // v.shape[1], 1),)
    )
    model = make("Qwen3", **QWEN3)
    varlen.use(model)
    assert "no kernel for prompts that pairs share with heads of 16" in str(
        row_check.prompts_differ(model, APART, TOKEN_IDS, "fp32")
    )


def test_rows_and_tokens_are_counted_as_without_it() -> None:
    collate = Collate(PadRight(0), ONCE, head_chooses=True, by_row=True)
    filler = {"input_ids": np.array([1, 1]), "labels": np.full(2, IGNORED), "lengths": np.array([1, 1])}
    batch = collate([*PACKS, filler])
    assert batch["row_lengths"].tolist() == [13, 14 - 9, 4, 5 - 2, 6, 7 - 3, 3, 2, 1, 1]
    assert int(real_tokens(batch)) == sum(len(one["input_ids"]) for one in PACKS)


def test_log_probabilities_of_answers_are_those_of_whole_rows() -> None:
    model = make("Qwen3", **QWEN3)
    varlen.use(model)
    compute = AnswerLogProbabilities(model)
    apart, once = (compute(model, Collate(PadRight(0), flatten, by_row=True)(PACKS)) for flatten in (APART, ONCE))
    assert apart.shape == (8,) and (apart < 0).all()
    torch.testing.assert_close(once, apart, rtol=1e-5, atol=1e-5)
