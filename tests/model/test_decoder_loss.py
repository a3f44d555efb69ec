"""The loss by decoder and head is the model's, in its value and its gradients, without logits of all tokens."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.data.order.collate import Collate, Flatten, PadRight
from unsloth_ddp.model.forward import decoder_loss
from unsloth_ddp.model.forward.decoder_loss import decoder_loss_if_equal, decoder_loss_of
from unsloth_ddp.model.forward.micro_batch import MicroBatchRunner
from unsloth_ddp.training.tasks.text import TextTask

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


def frozen(model: Any) -> Any:
    model.requires_grad_(False)
    for layer in model.get_decoder().layers:
        layer.mlp.requires_grad_(True)
    return model.train()


def models() -> list[Any]:
    torch.manual_seed(0)
    capped = Gemma3TextConfig(**SIZES, final_logit_softcapping=5.0)
    return [frozen(LlamaForCausalLM(LlamaConfig(**SIZES))), frozen(Gemma3ForCausalLM(capped))]


def rows() -> list[dict[str, np.ndarray]]:
    drawn = np.random.default_rng(0)
    made = [{"input_ids": drawn.integers(3, 96, size)} for size in (9, 21, 14)]
    return [row | {"labels": np.where(np.arange(len(row["input_ids"])) < 4, IGNORED, row["input_ids"])} for row in made]


def runner_of(model: Any, task: TextTask) -> MicroBatchRunner:
    collate = Collate(PadRight(0), Flatten("positions"), head_chooses=task.head_chooses)
    return MicroBatchRunner(model, torch.device("cpu"), task.loss, collate, contextlib.nullcontext)


@pytest.mark.parametrize("model", models(), ids=lambda model: type(model).__name__)
def test_loss_and_gradients_are_the_models(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # A few tokens at a time.
    monkeypatch.setattr(decoder_loss, "LOGITS_AT_ONCE", 5 * 96)
    whole = TextTask(None, divides=False, fused_head=True)
    apart = whole.tuned(runner_of(model, whole), rows(), 1)
    assert apart.apart is not None
    results = []
    for task in (whole, apart):
        runner = runner_of(model, task)
        model.zero_grad()
        loss = runner.loss_sum(runner.batch_of(rows()))
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.requires_grad)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_a_loss_that_differs_or_a_trained_head_is_not_used() -> None:
    model = models()[1]
    task = TextTask(None, divides=False, fused_head=False)
    # Something between the head and the loss that its config does not name.
    model.get_output_embeddings().register_forward_hook(lambda *called: 50 * called[-1])
    assert decoder_loss_if_equal(runner_of(model, task), rows()) is None
    model.get_output_embeddings().weight.requires_grad_(True)
    assert decoder_loss_of(model) is None
