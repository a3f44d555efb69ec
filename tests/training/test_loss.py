"""The step's gradient is that of the plain token mean, in every layout, whatever the ranks hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.training.step.divisor import step_divisor
from unsloth_ddp.training.tasks.text import logits_to_step_loss, supervised_tokens

VOCABULARY = 11


def labels_of(*rows: str) -> Tensor:
    """Labels of one micro-batch, a letter a token: s is supervised, . is not."""
    width = max(len(row) for row in rows)
    return torch.tensor([[5 if c == "s" else IGNORED for c in row.ljust(width, ".")] for row in rows])


def divisors(ranks: list[list[Tensor]]) -> list[Tensor]:
    """What step_divisor gives on each rank, with the all-reduce done by hand."""
    total = torch.stack([supervised_tokens(labels) for batches in ranks for labels in batches]).sum()
    return [
        step_divisor([supervised_tokens(b) for b in batches], len(ranks), lambda _: total.clone()) for batches in ranks
    ]


@pytest.mark.parametrize(
    ("labels", "count"),
    [
        (labels_of("s"), 0),  # nothing predicts the first token
        (labels_of("ss"), 1),
        (labels_of(".s.s", "ssss"), 5),
        (labels_of("...."), 0),
        (torch.empty(0, 4, dtype=torch.int64), 0),
    ],
)
def test_only_predicted_tokens_count(labels: Tensor, count: int) -> None:
    assert supervised_tokens(labels).item() == count


def test_counts_of_unequal_ranks_and_steps_are_summed_once() -> None:
    calls: list[int] = []

    def sum_over_ranks(count: Tensor) -> Tensor:
        calls.append(int(count))
        return count + 7

    batches = [labels_of(".ss", ".s."), labels_of("....s")]
    divisor = step_divisor([supervised_tokens(labels) for labels in batches], 2, sum_over_ranks)
    assert calls == [4]
    assert divisor == 5.5
    assert (divisor.dtype, divisor.shape) == (torch.float32, ())


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([[labels_of(".s")], [labels_of(".s")], [labels_of("..")], [labels_of("..")]], 0.5),
        ([[labels_of(".s")], [labels_of("..")], [labels_of("..")]], 1 / 3),
        ([[labels_of("..")], [labels_of("..")]], 0.5),  # nothing supervised anywhere: 0 / 0.5, not 0 / 0
        ([[labels_of(".ss"), labels_of(".")], [labels_of("....")]], 1.0),
    ],
)
def test_the_divisor_may_be_a_fraction_and_is_never_zero(ranks: list[list[Tensor]], expected: float) -> None:
    assert [d.item() for d in divisors(ranks)] == pytest.approx([expected] * len(ranks), rel=1e-7)


class Model(torch.nn.Module):
    """Enough of a language model: next-token logits that depend on every parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 6)
        self.head = torch.nn.Linear(6, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).cumsum(1))


def rows() -> list[tuple[Tensor, Tensor]]:
    """Ids and labels of 8 rows of very unequal lengths and masks, two of them with nothing supervised."""
    generator = torch.Generator().manual_seed(1)
    examples = []
    for length, share in [(3, 1.0), (17, 0.1), (2, 0.0), (9, 0.5), (1, 1.0), (12, 0.9), (5, 0.2), (30, 0.05)]:
        ids = torch.randint(0, VOCABULARY, (1, length), generator=generator)
        keep = torch.rand((1, length), generator=generator) < share
        examples.append((ids, ids.masked_fill(~keep, IGNORED)))
    return examples


def padded(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    width = max(ids.shape[1] for ids, _ in batch)
    ids = torch.cat([F.pad(ids, (0, width - ids.shape[1])) for ids, _ in batch])
    return ids, torch.cat([F.pad(labels, (0, width - labels.shape[1]), value=IGNORED) for _, labels in batch])


def gradient(model: Model) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def reference() -> tuple[float, Tensor]:
    """The plain token mean over all rows, one row at a time."""
    model = Model()
    losses = [
        F.cross_entropy(model(ids)[0, :-1], labels[0, 1:], reduction="none")[labels[0, 1:] != IGNORED]
        for ids, labels in rows()
    ]
    mean = torch.cat(losses).mean()
    mean.backward()
    return mean.item(), gradient(model)


@pytest.mark.parametrize(("processes", "per_device"), [(1, 8), (1, 1), (2, 4), (2, 2), (2, 1), (4, 2), (4, 1), (8, 1)])
def test_every_layout_gives_the_gradient_of_the_plain_token_mean(processes: int, per_device: int) -> None:
    batches = [padded(rows()[i : i + per_device]) for i in range(0, 8, per_device)]
    ranks = [batches[rank::processes] for rank in range(processes)]
    gradients, loss = [], 0.0
    for mine, divisor in zip(ranks, divisors([[b[1] for b in mine] for mine in ranks]), strict=True):
        model = Model()
        for ids, labels in mine:
            share = logits_to_step_loss(model(ids), labels, divisor)
            share.backward()
            loss += share.item() / processes
        gradients.append(gradient(model))
    expected_loss, expected = reference()
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    # DistributedDataParallel's mean over ranks.
    torch.testing.assert_close(torch.stack(gradients).mean(0), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("length", [1, 4])
def test_a_micro_batch_without_supervised_tokens_adds_nothing(length: int) -> None:
    model = Model()
    ids = torch.zeros((2, length), dtype=torch.int64)
    loss = logits_to_step_loss(model(ids), torch.full_like(ids, IGNORED), torch.tensor(0.5))
    loss.backward()
    assert loss.item() == 0
    assert gradient(model).eq(0).all()
    assert len(gradient(model)) == sum(p.numel() for p in model.parameters())


def test_half_precision_logits_are_summed_in_full_precision() -> None:
    torch.manual_seed(0)
    logits: Any = torch.randn(1, 2000, VOCABULARY).bfloat16()
    labels = torch.randint(0, VOCABULARY, (1, 2000))
    expected = F.cross_entropy(logits[0, :-1].double(), labels[0, 1:], reduction="sum").item()
    assert logits_to_step_loss(logits, labels, torch.tensor(1.0)).item() == pytest.approx(expected, rel=1e-5)
