"""Capture the forward and backward pass of a micro-batch as a CUDA graph, and replay it without waiting for the host.

A small micro-batch is thousands of short kernels, and launching them takes the host longer than the GPU needs to run
them. Micro-batches of one shape can share a CUDA graph, which starts them all at once, and layers compiled for it. The
optimizer, the exchange of gradients and everything that is logged stay outside.
"""

import contextlib
import ctypes
import dataclasses
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unsloth_ddp.data.order.fixed_shape import FixedShape, PaddedBatch, StepTensors
from unsloth_ddp.model.forward.packed_forward import PackedForward
from unsloth_ddp.model.modules import kept_random_numbers
from unsloth_ddp.training.step.adapter_copies import AdapterCopies
from unsloth_ddp.training.step.gradient_exchange import GradientBuffers
from unsloth_ddp.utils.errors import one_line

logger = logging.getLogger("unsloth_ddp")

# Passes before the first capture of a number of tokens: the first compiles, the second has the memory that the first
# one's kernels were chosen with.
WARM_UP = 2
# Passes before further captures, for which little is compiled.
WARM_UP_AGAIN = 1


class CaptureFailed(RuntimeError):
    """A pass could not be captured; gradients are as they were before."""


@dataclass
class CapturedGraph:
    """A captured pass over micro-batches of the same sizes; replaying reads `padded_batch` and writes `loss`."""

    padded_batch: PaddedBatch
    step: StepTensors
    loss: Tensor
    replay: Callable[[], None]


class CapturedStep:
    """Compute micro-batches of fixed shape by replaying a captured pass.

    Gradients are added to buffers that stay where they are, as the graph writes there.

    Args:
        model: whose parameters are trained; in training mode, without DistributedDataParallel around it.
        forward: computes the loss.
        autocast: the trainer's.
        dtype: of matrix products.
        gradients: the buffers of all parameters that are trained, where the trainer has some; else its own.
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
        self.model = model
        self.forward = forward
        self.autocast = autocast
        self.dtype = dtype
        self.device = device
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.gradients = GradientBuffers(self.trained) if gradients is None else gradients
        self.adapters = AdapterCopies(model, dtype)
        self.divisor = torch.ones((), device=device)
        self.graphs: dict[tuple[int, int, int], CapturedGraph] = {}
        # Peak memory of a pass, which a replay takes without asking the allocator for it.
        self.peak_bytes = 0
        # Until training begins, other passes are trials, which are no part of its peak.
        self.in_trial = True
        self._pool: Any = None

    @property
    def shape(self) -> FixedShape:
        """The shape of the micro-batches."""
        return self.forward.shape

    def run(self, batch: dict[str, Any], divisor: Tensor) -> tuple[Tensor, StepTensors]:
        """Add the gradients of a micro-batch to those of its step.

        Args:
            batch: with `padded_batch` (see FixedShape.pad), on the device or in pinned memory.
            divisor: of the summed token losses, 0-dim.

        Returns:
            the loss, 0-dim, and the parts of the micro-batch on the device; both are overwritten by the next call.

        Raises:
            CaptureFailed: this is the first micro-batch of its sizes, and memory is short, say.
        """
        padded_batch: PaddedBatch = batch["padded_batch"]
        self.gradients.hold()
        self.divisor.copy_(divisor)
        graph = self.graphs.get(padded_batch.sizes)
        if graph is None:
            graph = self.graphs[padded_batch.sizes] = self._capture(padded_batch)
        graph.padded_batch.vector.copy_(padded_batch.vector, non_blocking=True)
        graph.replay()
        return graph.loss, graph.step

    def try_pass(self, batch: dict[str, Any]) -> None:
        """Compute a pass over a micro-batch as it would be captured; this compiles the layers for its size.

        The gradients are those of the parameters until these have others.
        """
        try:
            self.gradients.hold()
            with self.forward.compiled_layers():
                self._pass_over(batch["padded_batch"]).replay()
        finally:
            self.gradients.free()

    def has_size(self, tokens: int) -> bool:
        """Return whether a micro-batch padded to so many tokens was captured, whatever its other sizes."""
        return any(sizes[0] == tokens for sizes in self.graphs)

    def forget(self) -> None:
        """Drop all graphs; each is captured anew at its next use."""
        self.graphs.clear()
        self._pool = None

    def recompute_layers(self, recompute: bool) -> None:
        """Capture anew, with layers computed again in the backward pass or not; the memory of graphs is freed."""
        self.forward.recompute = recompute
        self.forget()

    def _capture(self, example: PaddedBatch) -> CapturedGraph:
        """Capture the pass over micro-batches like `example`; gradients and random numbers are left as they were."""
        began = time.perf_counter()
        single = self._pass_over(example)
        if self.device.type != "cuda":
            # A CPU has no graphs; it computes what a graph does.
            return single
        self._count_anew()
        replay = self._capture_beside_gradients(single.replay, self._warm_up(example.tokens))
        self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self.device))
        logger.info(
            "captured the step of %d tokens in %d rows, %d of them for the head, in %.1f s",
            *example.sizes,
            time.perf_counter() - began,
        )
        return dataclasses.replace(single, replay=replay)

    def _pass_over(self, example: PaddedBatch) -> CapturedGraph:
        """Return the pass over micro-batches like `example`, which is computed anew at each call of `replay`."""
        padded_batch = example.to(self.device, copy=True)
        step = self.shape.parts(padded_batch)
        loss = torch.zeros((), device=self.device)

        def compute() -> None:
            with self.forward.passes(), self.adapters.in_place():
                with self.autocast():
                    computed = self.forward.loss_sum(step, self.dtype) / self.divisor
                computed.backward()
            loss.copy_(computed.detach())

        return CapturedGraph(padded_batch, step, loss, compute)

    def _warm_up(self, tokens: int) -> int:
        """Return how often a pass over so many tokens runs before it is captured."""
        return WARM_UP_AGAIN if self.has_size(tokens) else WARM_UP

    def _capture_beside_gradients(self, compute: Callable[[], None], warm_up: int) -> Callable[[], None]:
        """Return what replays `compute`, which runs `warm_up` times before; gradients are left as they were.

        Raises:
            CaptureFailed: it failed, or there is no memory for a copy of the gradients.
        """
        saved_gradients: list[tuple[Tensor, Tensor | None]] = []
        try:
            for flat in self.gradients.flat:
                # A second copy of all gradients is much memory; at the beginning of a step there is nothing to keep.
                saved_gradients.append((flat, flat.clone() if flat.any() else None))
            return self._capture_on_gpu(compute, warm_up)
        except Exception as error:
            raise CaptureFailed(one_line(error, 200)) from error
        finally:
            for flat, saved in saved_gradients:
                flat.zero_() if saved is None else flat.copy_(saved)

    def _count_anew(self) -> None:
        """Start a new count of peak memory; keep that of passes and evaluations since training began."""
        if not self.in_trial:
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)

    def _capture_on_gpu(self, compute: Callable[[], None], warm_up: int) -> Callable[[], None]:
        """Return what replays `compute`, which runs `warm_up` times before."""
        with kept_random_numbers(self.device), self.forward.compiled_layers():
            for _ in range(warm_up):
                compute()
            torch.cuda.synchronize(self.device)
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
            pool = self._pool or torch.cuda.graph_pool_handle()
            try:
                # Other threads pin memory and watch collectives meanwhile.
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    compute()
            except Exception:
                end_broken_capture(pool)
                raise
        self._pool = pool
        return graph.replay


def end_broken_capture(pool: Any) -> None:
    """Undo what torch leaves behind when a capture on the current device fails.

    The generator would refuse to draw random numbers outside of a graph, which compiling does too, and the allocator
    would keep the memory of the pool, and that of other streams until the capture ends.

    Args:
        pool: id of the memory pool of the capture.
    """
    device = torch.cuda.current_device()
    generator = torch.cuda.default_generators[device]
    # The copy has the same seed and offset, and is not in a capture.
    generator.graphsafe_set_state(generator.clone_state())
    with contextlib.suppress(RuntimeError):
        # Raises if the capture has ended for the allocator.
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def use_capture_stream(device: torch.device) -> None:
    """Make a stream of its own the current one; what is captured later, and all before it, has to be computed there.

    Gradients are added on the stream that was current when a parameter was first used, and capturing a graph fails
    where that is the default stream, which cannot be captured.

    The streams of torch.cuda.Stream are not ordered with the default stream. The optimizers of bitsandbytes and what
    Unsloth moves to host memory run on the default stream whatever the current one is, and would read states and
    activations that are not written yet. A stream of CUDA with default flags is ordered with it.
    """
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.check_error(torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle)))
    torch.cuda.set_stream(torch.cuda.ExternalStream(handle.value, device))


def use_default_stream(device: torch.device) -> None:
    """Leave the stream of captures, where nothing is captured (any more): libraries are made for the default stream."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.default_stream(device))
