"""Average gradients over ranks during the last backward pass of a step, and let a rank repeat that step.

DistributedDataParallel averages them too, but after a failed backward pass its reducer waits forever for the missing
gradients. Here, a bucket that was sent is not sent again. The repeated step computes the same gradients and sends only
the remaining buckets, for which the other ranks wait.

Gradients are views of the buckets that are sent (GradientBuffers), so they are averaged in place and exist once. A
replayed CUDA graph (captured_step.py) writes them there too. No hook runs during a replay, so all buckets are sent
after it, and the exchange does not overlap with the backward pass.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parallel import DistributedDataParallel

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.parts import sometimes_unused

# The default of DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20


class GradientBuffers:
    """Hold gradients in flat buffers, one for each bucket, whose addresses stay the same from step to step.

    The buffers are allocated at the first use, after the memory search.

    Args:
        parameters: all trained parameters, in the same order on every rank.
        bucket_mb: maximum size of a bucket in MiB; BUCKET_BYTES if None.
    """

    def __init__(self, parameters: Iterable[Parameter], bucket_mb: int | None = None) -> None:
        most_bytes = BUCKET_BYTES if bucket_mb is None else bucket_mb * 2**20
        # The backward pass computes the gradients of the last layers first.
        self.buckets = into_buckets(reversed(list(parameters)), most_bytes)
        self._flat: list[Tensor] = []
        self._views: dict[Parameter, Tensor] = {}

    @property
    def flat(self) -> list[Tensor]:
        """The buffers, 1-dim, in the order of the buckets."""
        self._allocate()
        return self._flat

    def free(self) -> None:
        """Release the buffers, whose memory is free once no gradient is a view of it; the next use allocates others."""
        self._flat, self._views = [], {}

    def hold(self, first: int = 0, end: int | None = None) -> None:
        """Move the gradients of these buckets into their buffers; a parameter without a gradient gets one of zeros.

        The optimizer's zero_grad sets gradients to None, and the next backward pass would allocate new ones elsewhere.
        """
        self._allocate()
        elsewhere = [p for b in self.buckets[first:end] for p in b if p.grad is not self._views[p]]
        empty = [self._views[p] for p in elsewhere if p.grad is None]
        if empty:
            torch._foreach_zero_(empty)
        for parameter in elsewhere:
            view = self._views[parameter]
            if parameter.grad is not None:
                view.copy_(parameter.grad)
            parameter.grad = view

    def _allocate(self) -> None:
        if self._flat:
            return
        # One assignment: if memory runs out, no buffer is kept.
        self._flat = [
            torch.zeros(sum(p.numel() for p in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
            for bucket in self.buckets
        ]
        for bucket, flat in zip(self.buckets, self._flat, strict=True):
            for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                # Use the strides that a backward pass gives to gradients.
                strides = torch.empty_like(parameter, device="meta").stride()
                self._views[parameter] = part.as_strided(parameter.shape, strides)

    def attach(self) -> None:
        """Set the gradient of every parameter to the values in its buffer."""
        for parameter, view in self._views.items():
            parameter.grad = view


class GradientExchange:
    """Send each bucket of gradients when it and all earlier ones are complete, in the same order on every rank.

    Args:
        parameters: all trained parameters, in the same order on every rank.
        world_size: number of ranks.
        bucket_mb: maximum size of a bucket in MiB (ddp_bucket_cap_mb).
        sometimes_unused: parameters that a step may leave without a gradient on all ranks, such as those of towers.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        world_size: int,
        bucket_mb: int | None = None,
        sometimes_unused: Iterable[Parameter] = (),
    ) -> None:
        self.world_size = world_size
        self.sometimes_unused = list(sometimes_unused)
        self.used: set[Parameter] = set()
        self.buffers = GradientBuffers(parameters, bucket_mb)
        self.buckets = self.buffers.buckets
        self.bucket_of = {p: index for index, bucket in enumerate(self.buckets) for p in bucket}
        self.sent: list[Any] = []
        self.missing: list[set[Parameter]] | None = None
        for parameter in self.bucket_of:
            parameter.register_post_accumulate_grad_hook(self._complete)

    def broadcast(self) -> None:
        """Broadcast the trained weights of rank 0, which DDP ignores (see leave_gradients_to_the_kit)."""
        # NCCL broadcasts only contiguous tensors.
        weights = [(p.detach(), p.detach().contiguous()) for p in self.bucket_of]
        works: list[Any] = [dist.broadcast(contiguous, src=0, async_op=True) for _, contiguous in weights]
        for work, (weight, contiguous) in zip(works, weights, strict=True):
            work.wait()
            if contiguous is not weight:
                weight.copy_(contiguous)

    def begin_pass(self) -> None:
        """Prepare for a forward and backward pass, which accumulates into the buckets that have not been sent."""
        self.buffers.hold(len(self.sent))

    @contextlib.contextmanager
    def last_pass(self, model: DistributedDataParallel) -> Iterator[None]:
        """Average gradients around the last forward and backward pass of a step.

        Afterwards every gradient is the mean over ranks. A gradient that a rank lacks counts as zeros; one that all
        ranks lack is None, as on one process, so that the optimizer leaves the weight as it is. To repeat the step
        after an error, set the gradients to None first.
        """
        self.missing = [set(bucket) for bucket in self.buckets]
        try:
            with model.no_sync():
                yield
        finally:
            self.missing = None
        self.average()

    def _complete(self, parameter: Tensor) -> None:
        assert isinstance(parameter, Parameter)
        self.used.add(parameter)
        index = self.bucket_of[parameter]
        if self.missing is not None:
            if parameter not in self.missing[index]:
                raise RuntimeError(
                    "A trained weight received its gradient in two parts, because several checkpointed layers share "
                    "it; use --gradient_checkpointing none, or --backend transformers, which checkpoints layers "
                    "differently."
                )
            self.missing[index].remove(parameter)
        if index < len(self.sent):
            # The step is repeated: this bucket was sent before, and its buffer holds the mean.
            parameter.grad = None
        if self.missing is not None:
            while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
                self._send_next()

    def _send_next(self) -> None:
        index = len(self.sent)
        self.buffers.hold(index, index + 1)
        mean = self.buffers.flat[index].div_(self.world_size)
        self.sent.append(dist.all_reduce(mean, async_op=True))

    def average(self) -> None:
        """Replace every gradient by the mean over ranks, after the last pass of a step or its replay."""
        while len(self.sent) < len(self.buckets):
            self._send_next()
        for work in self.sent:
            work.wait()
        self.buffers.attach()
        self.sent.clear()
        self._drop_unused()
        self.used.clear()

    def _drop_unused(self) -> None:
        """Set the gradients that no rank has computed in this step to None."""
        if not self.sometimes_unused:
            return
        device = self.sometimes_unused[0].device
        used = torch.tensor([p in self.used for p in self.sometimes_unused], dtype=torch.uint8, device=device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        for parameter, anywhere in zip(self.sometimes_unused, used.tolist(), strict=True):
            if not anywhere:
                parameter.grad = None


def make_exchange(
    model: Module, settings: Settings, runtime: Runtime, config: Any, ddp_handler: Any
) -> GradientExchange | None:
    """Return the exchange that replaces DDP's; None with one process, sharding or --ddp_find_unused_parameters.

    Args:
        config: TRL's SFTConfig.
        ddp_handler: accelerate's arguments for DistributedDataParallel, before it wraps the model; None without DDP.
    """
    several = runtime.ranks.world_size > 1
    if runtime.sharding != "none" or (several and settings.ddp_find_unused_parameters):
        return None
    # Under a launcher, accelerate wraps the model of a single process too.
    leave_gradients_to_the_kit(model)
    if not several:
        return None
    if ddp_handler is not None:
        # All ranks loaded the same buffers. DDP would broadcast them in every forward pass, but the ranks may run
        # different numbers of forward passes: one may repeat a step, or replay a CUDA graph.
        ddp_handler.broadcast_buffers = False
    trained = [p for p in model.parameters() if p.requires_grad]
    unused = [p for p in sometimes_unused(model) if p.requires_grad]
    return GradientExchange(trained, runtime.ranks.world_size, config.ddp_bucket_cap_mb, unused)


def leave_gradients_to_the_kit(model: Module) -> None:
    """Keep DistributedDataParallel from allocating buckets for gradients that GradientExchange averages.

    DDP needs at least one trained parameter, and gets the smallest. It broadcasts only this one and the frozen weights
    (see GradientExchange.broadcast).
    """
    named = [(name, p) for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
    smallest = min((p for _, p in named), key=Parameter.numel)
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for name, parameter in named:
        if parameter is not smallest:
            # DDP uses both names for a parameter that belongs to the model itself and not to a submodule.
            ignored |= {name} if "." in name else {name, f".{name}"}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))


def into_buckets(parameters: Iterable[Parameter], most_bytes: int) -> list[list[Parameter]]:
    """Group parameters, in order, into buckets of one dtype and device and at most `most_bytes` (or one parameter)."""
    buckets: list[list[Parameter]] = []
    size = 0
    for parameter in parameters:
        parameter_bytes = parameter.numel() * parameter.element_size()
        last = buckets[-1][-1] if buckets else None
        alike = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not alike or size + parameter_bytes > most_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += parameter_bytes
    return buckets
