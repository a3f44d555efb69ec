"""Gradients averaged over ranks during the last backward pass of a step, which a rank can begin once more.

DistributedDataParallel does the same, but once a backward pass has broken off its reducer waits for ever for what is
missing. Here what was sent stays sent: the step that is repeated has the same gradients, and only the rest follows, so
that the other ranks wait a little and need not know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

# What DistributedDataParallel takes.
BUCKET_BYTES = 25 * 2**20


class GradientExchange:
    """Buckets of gradients, each sent as soon as it and those before it are complete, in the same order everywhere.

    Args:
        parameters: all that are trained, in the same order on every rank.
        world_size: number of ranks.
    """

    def __init__(self, parameters: Iterable[Parameter], world_size: int) -> None:
        self.world_size = world_size
        # The last layers are the first whose gradients are there.
        self.buckets = into_buckets(reversed(list(parameters)), BUCKET_BYTES)
        self.bucket_of = {p: index for index, bucket in enumerate(self.buckets) for p in bucket}
        self.sent: list[tuple[Any, Tensor]] = []
        self.missing: list[set[Parameter]] | None = None
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self._complete)

    @contextlib.contextmanager
    def last_pass(self, model: DistributedDataParallel) -> Iterator[None]:
        """Around the last forward and backward pass of a step, after which every gradient is the mean over ranks.

        After an error the step may be begun again; a parameter without a gradient has one of zeros.
        """
        self.missing = [set(bucket) for bucket in self.buckets]
        try:
            with model.no_sync():
                yield
        finally:
            self.missing = None
        self._finish()

    def average(self) -> None:
        """Replace every gradient by the mean over ranks, after a last pass that told nothing of its progress."""
        self._finish()

    def _complete(self, parameter: Tensor) -> None:
        if self.missing is None:
            return
        assert isinstance(parameter, Parameter)
        missing = self.missing[self.bucket_of[parameter]]
        if parameter not in missing:
            raise RuntimeError(
                "A weight that is trained got its gradient in two parts, as one does that several recomputed layers share; "
                "use --gradient_checkpointing none, or --backend transformers, which recomputes in another way."
            )
        missing.remove(parameter)
        while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self.buckets[len(self.sent)]
        mean = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        mean.div_(self.world_size)
        self.sent.append((dist.all_reduce(mean, async_op=True), mean))

    def _finish(self) -> None:
        while len(self.sent) < len(self.buckets):
            self._send_next()
        for bucket, (work, mean) in zip(self.buckets, self.sent, strict=True):
            work.wait()
            for parameter, part in zip(bucket, mean.split([p.numel() for p in bucket]), strict=True):
                parameter.grad = part.view_as(parameter)
        self.sent.clear()


def into_buckets(parameters: Iterable[Parameter], most_bytes: int) -> list[list[Parameter]]:
    """The parameters in their order, in buckets of one dtype and device and at most so many bytes (or one parameter)."""
    buckets: list[list[Parameter]] = []
    size = 0
    for parameter in parameters:
        own = parameter.numel() * parameter.element_size()
        last = buckets[-1][-1] if buckets else None
        alike = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not alike or size + own > most_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += own
    return buckets
