"""Gradients averaged over ranks by the trainer itself: the same as DistributedDataParallel's, also after a break."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch.nn import Linear, ModuleList, Parameter
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_ranks
from unsloth_ddp.training.step.gradient_exchange import GradientBuffers, GradientExchange, into_buckets

LAYERS, WIDTH = 6, 8


class Broken(torch.autograd.Function):
    """Pass the input on, and fail in the backward pass."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory.")


class Layers(torch.nn.Module):
    """Linear layers, of which two share a weight, the same on every rank; a backward pass can break off before one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = ModuleList(Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.layers[-1].weight = self.layers[0].weight
        # Weights need not be contiguous.
        self.layers[1].weight = Parameter(self.layers[1].weight.detach().t().contiguous().t())
        self.scale, self.unused = Parameter(torch.ones(WIDTH)), Parameter(torch.ones(3))

    def forward(self, value: torch.Tensor, breaks_at: int | None = None) -> torch.Tensor:
        value = value * self.scale
        for index, layer in enumerate(self.layers):
            value = layer(value)
            if index == breaks_at:
                value = Broken.apply(value)
        return value


def rows(rank: int) -> list[torch.Tensor]:
    """Return two micro-batches of this rank."""
    generator = torch.Generator().manual_seed(7 + rank)
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(2)]


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the memory that these tensors lie in: address -> bytes."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def compare(folder: str, breaks_at: int | None, replays: tuple[int, ...] = ()) -> None:
    """Take a step with the exchange, broken off once on rank 1 if asked, and one with DDP alone.

    Ranks in `replays` compute without DDP's forward pass and average afterwards, as steps with CUDA graphs do.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from unsloth_ddp.training.step import gradient_exchange as module

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    first, last = rows(rank)

    def step(model, last_pass, breaks_at=None, begin_pass=lambda: None):
        begin_pass()
        with model.no_sync():
            model(first).square().sum().backward()
        begin_pass()
        if model is mine:
            # What was sent is not kept a second time.
            assert all(p.grad is None for bucket in exchange.buckets[: len(exchange.sent)] for p in bucket)
        with last_pass(model):
            model(last, breaks_at).square().sum().backward()

    mine = exchange = None
    wrapped = DistributedDataParallel(Layers(), find_unused_parameters=True)
    step(wrapped, contextlib.nullcontext)
    expected = gradients(wrapped)

    # About a layer in a bucket.
    module.BUCKET_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
    layers = Layers()
    module.leave_gradients_to_the_kit(layers)
    exchange = GradientExchange(layers.parameters(), dist.get_world_size())
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.add_(rank)
    mine = DistributedDataParallel(layers)
    # Of all weights DDP has buckets for the smallest alone.
    assert mine._get_ddp_logging_data()["bucket_sizes"] == str(3 * 4)
    exchange.broadcast()
    if breaks_at is not None and rank == 1:
        with pytest.raises(torch.OutOfMemoryError):
            step(mine, exchange.last_pass, breaks_at, exchange.begin_pass)
        assert 0 < len(exchange.sent) < len(exchange.buckets)
        mine.zero_grad()
    if rank in replays:
        for batch in (first, last):
            exchange.buffers.hold()
            mine.module(batch).square().sum().backward()
        exchange.average()
    else:
        step(mine, exchange.last_pass, begin_pass=exchange.begin_pass)
    averaged = gradients(mine)
    assert storages(averaged.values()) == storages(exchange.buffers.flat)
    assert torch.equal(averaged.pop("unused"), torch.zeros(3))
    assert averaged.keys() == expected.keys() and all(torch.equal(averaged[name], expected[name]) for name in averaged)
    assert not exchange.sent
    Path(folder, f"compared_{rank}").write_text(" ".join(averaged))
    dist.destroy_process_group()


@pytest.mark.parametrize("breaks_at", [None, 3])
def test_gradients_are_those_of_ddp_to_the_bit(tmp_path: Path, breaks_at: int | None) -> None:
    run_ranks(2, compare, str(tmp_path), breaks_at, folder=tmp_path / "ranks").check()
    for rank in range(2):
        assert len((tmp_path / f"compared_{rank}").read_text().split()) == 2 * LAYERS


@pytest.mark.parametrize("replays", [(0,), (0, 1)])
def test_ranks_that_replay_average_alike_also_beside_one_that_does_not(
    tmp_path: Path, replays: tuple[int, ...]
) -> None:
    run_ranks(2, compare, str(tmp_path), None, replays, folder=tmp_path / "ranks").check()
    for rank in range(2):
        assert len((tmp_path / f"compared_{rank}").read_text().split()) == 2 * LAYERS


def test_buckets_keep_the_order_and_one_dtype() -> None:
    sizes = [
        (3, torch.float32),
        (4, torch.float32),
        (2, torch.float32),
        (5, torch.bfloat16),
        (99, torch.bfloat16),
        (1, torch.bfloat16),
    ]
    parameters = [Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes]
    buckets = into_buckets(parameters, 4 * 7)
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[3, 4], [2], [5], [99], [1]]


def test_the_size_of_buckets_can_be_given() -> None:
    # 3 MiB, in buckets of 25 MiB by default.
    parameters = [Parameter(torch.zeros(2**18)) for _ in range(3)]
    assert len(GradientExchange(parameters, 2).buckets) == 1
    assert [len(bucket) for bucket in GradientExchange(parameters, 2, bucket_mb=2).buckets] == [2, 1]


def test_gradients_keep_their_values_and_move_to_their_buffers() -> None:
    model = Linear(3, 2)
    model.weight = Parameter(torch.ones(3, 2).t())
    buffers = GradientBuffers(model.parameters())
    # Trials of memory come before the first use.
    assert not buffers._flat
    model.weight.grad = torch.ones(2, 3)
    buffers.hold()
    (flat,) = buffers.flat
    assert flat.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    held_gradients = model.weight.grad, model.bias.grad
    assert model.weight.grad.stride() == model.weight.stride()
    model(torch.ones(1, 3)).sum().backward()
    assert (
        model.weight.grad is held_gradients[0]
        and model.bias.grad is held_gradients[1]
        and flat.tolist() == [1, 1, 2, 2, 2, 2, 2, 2]
    )
    model.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    buffers.hold()
    assert flat.tolist() == [1] * 8 and model.weight.grad is held_gradients[0]
    model.zero_grad()
    buffers.hold()
    assert flat.tolist() == [0] * 8
    model.zero_grad()
    flat.fill_(3)
    buffers.attach()
    assert model.bias.grad is not None and model.bias.grad.tolist() == [3, 3]


def test_a_weight_whose_gradient_comes_in_parts_is_refused() -> None:
    shared = Linear(WIDTH, WIDTH)
    exchange = GradientExchange(shared.parameters(), 2)
    exchange.missing = [set(bucket) for bucket in exchange.buckets]
    # Nothing is sent here: one process has no group.
    exchange._send_next = lambda: exchange.sent.append(None)  # type: ignore[method-assign]
    recomputed = checkpoint(shared, torch.ones(1, WIDTH, requires_grad=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"in two parts.*use --gradient_checkpointing none"):
        checkpoint(shared, recomputed, use_reentrant=True).sum().backward()
