"""Record the forward and backward pass of a micro-batch once, and replay it: a step as fast as the GPU, not as its host.

A small micro-batch is thousands of short kernels, and launching them takes the host longer than the GPU needs to run
them. Micro-batches of one shape can share a CUDA graph, which starts them all at once, and layers compiled for it. The
optimizer, the exchange of gradients and everything that is logged stay outside.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unsloth_ddp.data.fixed_shape import FixedShape, LaidOut, StepTensors
from unsloth_ddp.model.packed_forward import PackedForward
from unsloth_ddp.training.adapter_copies import AdapterCopies
from unsloth_ddp.training.gradient_exchange import GradientBuffers
from unsloth_ddp.utils.errors import one_line

logger = logging.getLogger("unsloth_ddp")

# Passes before the first recording: the first compiles, the second has the memory that the first one's kernels were
# chosen with.
WARM_UP = 2
# Passes before a recording of other sizes, for which little is compiled.
WARM_UP_AGAIN = 1


class RecordingFailed(RuntimeError):
    """A pass could not be recorded; gradients are as they were before."""


@dataclass
class Recording:
    """A recorded pass over micro-batches of the same sizes; replaying reads `laid_out` and writes `loss`."""

    laid_out: LaidOut
    step: StepTensors
    loss: Tensor
    replay: Callable[[], None]


class CapturedStep:
    """Compute micro-batches of fixed shape by replaying a recorded pass.

    Gradients are added to buffers that stay where they are, as the recording writes there.

    Args:
        model: whose parameters are trained; in training mode, without DistributedDataParallel around it.
        forward: computes the loss.
        autocast: the trainer's.
        dtype: of matrix products.
        gradients: the buffers of all parameters that are trained, where the trainer has some; else the step has its own.
    """

    def __init__(
        self,
        model: Any,
        forward: PackedForward,
        autocast: Callable[[], AbstractContextManager[Any]],
        dtype: torch.dtype,
        device: torch.device,
        gradients: GradientBuffers | None = None,
    ) -> None:
        self.forward = forward
        self.autocast = autocast
        self.dtype = dtype
        self.device = device
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.gradients = GradientBuffers(self.trained) if gradients is None else gradients
        self.adapters = AdapterCopies(model, dtype)
        self.divisor = torch.ones((), device=device)
        self.recordings: dict[tuple[int, int], Recording] = {}
        # Peak memory of a pass, which a replay takes without asking the allocator for it.
        self.peak_bytes = 0
        # Until training begins, other passes are trials, which are no part of its peak.
        self.in_trial = True
        self._pool: Any = None

    @property
    def shape(self) -> FixedShape:
        """The shape of the micro-batches."""
        return self.forward.shape

    def takes(self, batch: dict[str, Any]) -> bool:
        """Return whether a micro-batch is laid out, and not larger than the shape."""
        return "laid_out" in batch

    def run(self, batch: dict[str, Any], divisor: Tensor) -> tuple[Tensor, StepTensors]:
        """Add the gradients of a micro-batch to those of its step.

        Args:
            batch: with `laid_out` (see FixedShape.lay_out), on the device or in pinned memory.
            divisor: of the summed token losses, 0-dim.

        Returns:
            the loss, 0-dim, and the parts of the micro-batch on the device; both are overwritten by the next call.

        Raises:
            RecordingFailed: this is the first micro-batch of its sizes, and memory is short, say.
        """
        given: LaidOut = batch["laid_out"]
        self.gradients.hold()
        self.divisor.copy_(divisor)
        recording = self.recordings.get(given.sizes)
        if recording is None:
            recording = self.recordings[given.sizes] = self._record(given)
        recording.laid_out.vector.copy_(given.vector, non_blocking=True)
        recording.replay()
        return recording.loss, recording.step

    def forget(self) -> None:
        """Drop all recordings; each is made anew at its next use."""
        self.recordings.clear()
        self._pool = None

    def recompute_layers(self, recompute: bool) -> None:
        """Record anew, with layers computed again in the backward pass or not; the memory of recordings is freed."""
        self.forward.recompute = recompute
        self.forget()

    def _record(self, example: LaidOut) -> Recording:
        """Record the pass over micro-batches like `example`; gradients and random numbers are left as they were."""
        began = time.perf_counter()
        laid_out = example.to(self.device, copy=True)
        step = self.shape.parts(laid_out)
        loss = torch.zeros((), device=self.device)

        def compute() -> None:
            with self.forward.passes(), self.adapters.in_place():
                with self.autocast():
                    computed = self.forward.loss_sum(step, self.dtype) / self.divisor
                computed.backward()
            loss.copy_(computed.detach())

        if self.device.type != "cuda":
            # A CPU has no graphs; it computes what a recording does.
            return Recording(laid_out, step, loss, compute)
        self._count_anew()
        replay = self._record_beside_gradients(compute)
        self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self.device))
        logger.info(
            "recorded the step of %d tokens in %d rows, %d of them for the head, in %.1f s",
            self.shape.tokens,
            *laid_out.sizes,
            time.perf_counter() - began,
        )
        return Recording(laid_out, step, loss, replay)

    def _record_beside_gradients(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return what replays `compute`; gradients are left as they were.

        Raises:
            RecordingFailed: it failed, or there is no memory for a copy of the gradients.
        """
        kept: list[tuple[Tensor, Tensor | None]] = []
        try:
            for flat in self.gradients.flat:
                # A second copy of all gradients is much memory; at the beginning of a step there is nothing to keep.
                kept.append((flat, flat.clone() if flat.any() else None))
            return self._record_on_gpu(compute)
        except Exception as error:
            raise RecordingFailed(one_line(error, 200)) from error
        finally:
            for flat, before in kept:
                flat.zero_() if before is None else flat.copy_(before)

    def _count_anew(self) -> None:
        """Start a new count of peak memory; keep that of passes and evaluations since training began."""
        if not self.in_trial:
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)

    def _record_on_gpu(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return what replays `compute`, which runs a few times before."""
        with torch.random.fork_rng(devices=[self.device]), self.forward.compiled_layers():
            for _ in range(WARM_UP if self._pool is None else WARM_UP_AGAIN):
                compute()
            torch.cuda.synchronize(self.device)
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
            # Other threads pin memory and watch collectives meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                compute()
        self._pool = graph.pool()
        return graph.replay


def record_on_a_stream(device: torch.device) -> None:
    """Make a stream of its own the current one; everything that follows has to be computed there.

    Gradients are added on the stream that was current when a parameter was first used, and recording a graph fails where
    that is the default stream, which cannot be recorded.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    torch.cuda.set_stream(stream)
