"""Estimate the memory of one GPU, by method and sharding: pure arithmetic.

The estimates of MEASURED pairs, and of models that FSDP2 loads in shards, are within 10 % of runs on H200s, those of
DDP (sharding none) within 8 %; see tests/plan/test_memory.py. The others count only what DeepSpeed and PyTorch are
known to keep, which is a lower bound: runs took up to twice as much (docs/plan.md). The driver, NCCL and fragmentation
come on top; FILLED is left for them.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal, get_args

from unsloth_ddp.distributed.sharding import Offload, Sharding
from unsloth_ddp.sizing.optimizer_states import optimizer_bytes
from unsloth_ddp.sizing.shape import ModelShape
from unsloth_ddp.sizing.sharded_bytes import (
    ZERO3_LIVE,
    fsdp2_gathered_bytes,
    zero2_offload_bytes,
    zero3_gathered_bytes,
    zero_bucket_bytes,
    zero_optimizer_bytes,
)
from unsloth_ddp.utils.memory_limits import BYTES_PACKED, FILLED

Method = Literal["lora", "qlora", "full"]
Checkpointing = Literal["none", "torch", "unsloth"]
FitVerdict = Literal["fits", "tight", "does not fit", "unknown"]
# From the fastest to the one that saves most memory.
CHECKPOINTING_KINDS: tuple[Checkpointing, ...] = get_args(Checkpointing)
# Pairs whose estimate was held against runs of 8 billion parameters (benchmarks/results).
MEASURED = {
    ("lora", "none"), ("qlora", "none"), ("full", "none"), ("lora", "zero2"), ("full", "zero2"), ("lora", "fsdp2"),
    ("lora", "zero3"),
}  # fmt: skip
# The same with CPU offload, on one GPU.
MEASURED_WITH_OFFLOAD = {("full", "zero2"), ("lora", "zero3")}

# Unsloth keeps only a part of the activations that Transformers' code keeps for the backward pass. Measured without
# checkpointing and with 16384 tokens in a micro-batch: LoRA on 8B with padded rows takes 71 GiB, which is 0.5 of the
# counted blocks; with packs, whose attention copies its inputs, 83 to 85, and 31 on 1.7B; full on 1.7B, compiled, 59.
UNSLOTH_KEEPS, OF_PACKS, OF_ALL = 0.5, 0.62, 0.68
# Unsloth's fused loss takes as many logits at once as fit into 4 GiB at 16 bytes each.
LOGITS_AT_ONCE = 2**28
# Bytes of a logit in the backward pass of a loss that is computed from the logits of a whole micro-batch: its
# log-probability, the gradient of that, and its own gradient, all in fp32.
WHOLE_LOGIT = 12


@dataclass(frozen=True)
class Workload:
    """The load of a run on one GPU.

    Args:
        tokens: tokens of the largest micro-batch, padding included.
        pixels: numbers of the images of the micro-batch with the most.
        precision: bytes of a number in the forward pass, 4 or 2.
        master: bytes of a stored trained weight (method full; adapters have 4).
        optimizer: its Transformers name.
        accumulation: micro-batches per optimizer step.
        packed: rows are joined to packs.
        offload: what lies in host memory between its uses (see distributed/sharding.py).
        copies: copies of the model that FSDP2 shards, each over processes / copies GPUs.
        ddp_buckets: DistributedDataParallel sends gradients from buckets beside them; the kit's exchange has none.
        logits: tokens whose logits Transformers' tasks hold at once (preferences, images); 0 if they exist in slices.
    """

    tokens: int
    precision: int
    master: int
    optimizer: str
    checkpointing: Checkpointing
    processes: int
    backend: Literal["unsloth", "transformers"] = "unsloth"
    packed: bool = False
    accumulation: int = 1
    offload: Offload = "none"
    copies: int = 1
    ddp_buckets: bool = False
    pixels: int = 0
    logits: int = 0


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one GPU during backward passes, in the optimizer step, and while the model is loaded.

    Args:
        stepping: all bytes at the peak of the optimizer step; 0 where that is never the peak.
        loading: all bytes at the peak of loading and sharding.
        lower_bound: a run may take more, as some of its memory is not counted.
        host: bytes in host memory for each GPU, where parts of the run are kept there.
    """

    weights: float
    gradients: float
    optimizer: float
    copies: float
    activations: float
    loading: float
    stepping: float = 0.0
    lower_bound: bool = False
    host: float = 0.0

    @property
    def passing(self) -> float:
        """All bytes at the peak of a backward pass."""
        return self.weights + self.gradients + self.optimizer + self.copies + self.activations

    @property
    def total(self) -> float:
        """The peak of the run."""
        return max(self.passing, self.stepping, self.loading)


def is_supported(method: Method, sharding: Sharding, offload: Offload = "none") -> bool:
    """Return whether the kit supports the pair, with parts of it in host memory."""
    return not (method == "qlora" and (sharding == "zero3" or offload == "parameters"))


def estimate_memory(shape: ModelShape, method: Method, sharding: Sharding, work: Workload) -> MemoryEstimate:
    """Estimate the memory of one of `work.processes` GPUs."""
    frozen = _frozen_bytes(shape, method, work)
    activations = estimate_activations(shape, method, work)
    if sharding == "none":
        estimate = _with_ddp(shape, method, work, frozen, activations)
    elif sharding == "fsdp2":
        estimate = _with_fsdp2(shape, method, work, frozen, activations)
    else:
        estimate = _with_zero(shape, method, sharding, work, frozen, activations)
    if work.offload != "none":
        estimate = _in_host_memory(estimate, shape, method, sharding, work)
    # No mixture of experts and no trained tower was held against a run.
    unknown = shape.has_experts or (work.pixels > 0 and shape.tower_trained)
    return dataclasses.replace(estimate, lower_bound=True) if unknown else estimate


def beside_reference(
    memory: MemoryEstimate, reference: ModelShape, method: Method, sharding: Sharding, work: Workload, *, stays: bool
) -> MemoryEstimate:
    """Return the estimate of a run that has another model beside its own before step 1, or in each step (`stays`)."""
    weights = reference.parameters * work.master if method == "full" else _frozen_bytes(reference, method, work)
    weights /= work.processes // work.copies if sharding == "fsdp2" else 1
    if stays:
        return dataclasses.replace(memory, weights=memory.weights + weights, loading=memory.loading + weights)
    return dataclasses.replace(memory, loading=max(memory.loading, memory.weights + weights))


def _in_host_memory(
    memory: MemoryEstimate, shape: ModelShape, method: Method, sharding: Sharding, work: Workload
) -> MemoryEstimate:
    """Move what lies in host memory off the GPU; copies of it that the GPU computes with are only known in part.

    DeepSpeed and FSDP2 keep gradients where the optimizer runs; with ZeRO-2 also on the GPU between micro-batches.
    """
    weights = memory.weights if work.offload == "parameters" else 0.0
    moved = memory.gradients + memory.optimizer + weights
    gradients = 0.0
    if sharding == "zero2":
        largest = max(shape.head, shape.largest_linear) if method == "full" else 0
        gradients = zero2_offload_bytes(shape.trained(method), largest, work.precision, work.processes)
    # FSDP2 moves its part to the host after it is loaded. Trained weights are loaded in fp32 before ZeRO-2 halves them.
    loading = {
        "fsdp2": memory.loading,
        "zero2": _frozen_bytes(shape, method, work) + shape.trained(method) * _master_bytes(method, work),
    }.get(sharding, 0.0)
    return dataclasses.replace(
        memory,
        weights=memory.weights - weights,
        gradients=gradients,
        optimizer=0.0,
        stepping=0.0,
        loading=loading,
        lower_bound=memory.lower_bound or (method, sharding) not in MEASURED_WITH_OFFLOAD or work.processes > 1,
        host=moved,
    )


def _frozen_bytes(shape: ModelShape, method: Method, work: Workload) -> float:
    if method == "full":
        return float(shape.towers * work.precision)
    if method == "qlora":
        # bitsandbytes packs linear layers of the text decoder; Unsloth has it pack stacked experts too.
        packed = shape.linear - shape.tower_linear + (shape.experts if work.backend == "unsloth" else 0)
        return packed * BYTES_PACKED + (shape.parameters - packed) * work.precision
    return shape.parameters * work.precision


def _master_bytes(method: Method, work: Workload) -> int:
    return work.master if method == "full" else 4


def _with_ddp(shape: ModelShape, method: Method, work: Workload, frozen: float, activations: float) -> MemoryEstimate:
    trained, master = shape.trained(method), _master_bytes(method, work)
    # Products in 16 bit use 16-bit copies of fp32 weights, kept during a forward pass.
    multiplied = shape.linear if method == "full" else shape.adapter
    cast = float(multiplied * work.precision) if work.precision < master else 0
    buckets = trained * master if work.ddp_buckets and work.processes > 1 else 0
    weights = frozen + trained * master
    states = optimizer_state_bytes(shape, method, work.optimizer, master)
    return MemoryEstimate(weights, trained * master, states, buckets + cast, activations, loading=weights)


def _outside_and_layers(shape: ModelShape, method: Method, work: Workload, frozen: float) -> tuple[float, float]:
    """Return the bytes of gathered weights: embedding and head, and two blocks, as one is gathered ahead."""
    outside = (shape.parameters - shape.linear - shape.experts) * work.precision
    blocks = frozen + shape.trained(method) * work.precision - outside
    return outside, 2 * blocks / max(1, shape.layers)


def _with_fsdp2(shape: ModelShape, method: Method, work: Workload, frozen: float, activations: float) -> MemoryEstimate:
    """Estimate for weights that every rank reads in parts (Transformers), or that are split after loading (Unsloth).

    The former was held against runs of 8B to 72B on two GPUs: what is gathered at the peak stands beside the logits, or
    beside a block that is recomputed.
    """
    in_shards, full = work.backend == "transformers", method == "full"
    trained, parts = shape.trained(method), work.processes // work.copies
    # Adapters beside 4-bit weights that are read in parts have 16 bit (model/loading/sharded_load.py, wrap).
    master = work.precision if in_shards and method == "qlora" else _master_bytes(method, work)
    weights = frozen + trained * master
    states = optimizer_state_bytes(shape, method, work.optimizer, master)
    outside, layers = _outside_and_layers(shape, method, work, frozen)
    head, block = shape.head * work.precision, layers / 2
    gathered = functools.partial(
        fsdp2_gathered_bytes,
        (head, shape.head * full),
        (block, block / work.precision * full),
        precision=work.precision,
    )
    if in_shards:
        activations, recomputed, logits, added = _activations(shape, method, work)
        at_once = gathered(outside=0, beside_head=logits, beside_block=recomputed + added)
        # Adapters are made whole, and then split.
        loading = weights / parts + (0 if full else trained * master)
    else:
        at_once = gathered(outside=outside)
        # accelerate's fsdp2_prepare_model holds the whole model's state dict until every part of it is sharded.
        # How 4-bit weights are sharded was not measured, so only the whole model counts for them.
        loading = weights + (0 if method == "qlora" else weights / parts)
    return MemoryEstimate(
        weights / parts,
        trained * master / parts,
        states / parts,
        at_once,
        activations,
        loading=loading,
        lower_bound=work.copies > 1 or not (in_shards or (method, "fsdp2") in MEASURED),
    )


def _with_zero(
    shape: ModelShape, method: Method, sharding: Sharding, work: Workload, frozen: float, activations: float
) -> MemoryEstimate:
    """Estimate for DeepSpeed, which trains in 16 bit with sharded fp32 copies of the trained weights."""
    trained, parts = shape.trained(method), work.processes
    weights = float(frozen + trained * work.precision)
    states = zero_optimizer_bytes(trained, work.optimizer, work.precision, parts)
    # The kit has DeepSpeed accumulate and average gradients in fp32 (training/step/deepspeed_precision.py).
    gradients = trained * 4 / parts
    bound = (method, sharding) not in MEASURED
    # With 4-bit weights the bucket may be in 16 bit though the run is in fp32.
    bucket = zero_bucket_bytes(trained, 2 if method == "qlora" else work.precision)
    if sharding == "zero2":
        # Before the optimizer runs, the gradients exist twice: as they are, and flat (step()). With gradients in 16
        # bit, as in the measured runs, a flat copy in fp32 came on top, which adds up to the same.
        stepping = weights + states + gradients * 2
        return MemoryEstimate(
            weights, gradients, states, bucket, activations, loading=weights, stepping=stepping, lower_bound=bound
        )
    shard = weights / parts
    # Frozen weights stay gathered until the backward pass ends where layers are not recomputed (zero3_release.py).
    whole = method != "full" and work.checkpointing != "torch"
    outside, layers = _outside_and_layers(shape, method, work, frozen)
    copies = bucket + zero3_gathered_bytes(weights, outside, layers, work.precision, whole_in_use=whole)
    # How much stays gathered of a small model, and of one without recomputing, was up to 15 % more.
    bound = bound or work.checkpointing != "torch" or outside < ZERO3_LIVE * work.precision
    return MemoryEstimate(shard, gradients, states, copies, activations, loading=shard, lower_bound=bound)


def optimizer_state_bytes(shape: ModelShape, method: Method, name: str, weight_bytes: int) -> float:
    """Return the bytes of optimizer states for all trained weights. The embedding has the size of the head."""
    embedding = shape.head if method == "full" else 0
    others = shape.trained(method) - embedding
    return others * optimizer_bytes(name, weight_bytes) + embedding * optimizer_bytes(
        name, weight_bytes, embedding=True
    )


def estimate_activations(shape: ModelShape, method: Method, work: Workload) -> float:
    """Estimate the bytes kept for the backward pass at the peak, at the loss or in a block's backward pass.

    With checkpointing every block keeps its input, and one block at a time is recomputed (with unsloth all inputs but
    two are in host memory). The logits exist in slices, in 16 bit, or all at once (Workload.logits). QLoRA also unpacks
    one layer at a time.
    """
    kept_bytes, recomputed, logits, added = _activations(shape, method, work)
    return kept_bytes + max(recomputed, logits) + added


def _activations(shape: ModelShape, method: Method, work: Workload) -> tuple[float, float, float, float]:
    """Return the bytes kept until the backward pass, of a recomputed block, of the logits, and of unpacked weights."""
    scale = work.precision / 2
    block = shape.layer_kept * _share_kept(method, work)
    kept_a_token, recomputed = {
        "none": (shape.layers * block, 0.0),
        "torch": (shape.layers * shape.layer_input, block),
        "unsloth": (2 * shape.layer_input, block),
    }[work.checkpointing]
    logits = min(work.tokens * shape.vocabulary, LOGITS_AT_ONCE) * work.precision
    if work.logits and work.backend == "transformers":
        logits = work.logits * shape.vocabulary * WHOLE_LOGIT
    unpacked = shape.largest_linear * work.precision if method == "qlora" else 0
    # PEFT adds an adapter on experts to a copy of their weights, which the backward pass needs.
    added = 0.0
    if method != "full" and work.backend == "transformers":
        held_at_once = 1 if work.checkpointing == "none" else max(1, shape.layers)
        added = shape.adapted_experts * work.precision / held_at_once
    tokens = work.tokens * scale
    tower_kept, tower_recomputed = _tower_activations(shape, work)
    kept_bytes = tokens * (kept_a_token + shape.outside_kept) + tower_kept
    return kept_bytes, max(tokens * recomputed, tower_recomputed), logits, unpacked + added


def _tower_activations(shape: ModelShape, work: Workload) -> tuple[float, float]:
    """Return the bytes that the image tower keeps until its backward pass, with images in fp32, and those of one layer.

    Of a frozen tower nothing is kept, but one layer at a time computes.
    """
    if not work.pixels or not shape.numbers_a_patch:
        return 0.0, 0.0
    patches = work.pixels / shape.numbers_a_patch * work.precision / 2
    layers = shape.tower_layers if shape.tower_trained else 0
    each = shape.tower_kept if work.checkpointing == "none" else shape.tower_input
    return 4 * work.pixels + patches * layers * each, patches * shape.tower_kept


def _share_kept(method: Method, work: Workload) -> float:
    """Return the share kept of what Transformers' code keeps in a block for the backward pass."""
    if work.backend != "unsloth":
        return 1.0
    if method == "full":
        return OF_ALL
    return OF_PACKS if work.packed else UNSLOTH_KEEPS


def judge_fit(memory: MemoryEstimate, gpu_memory: float) -> FitVerdict:
    """Compare an estimate with the memory of a GPU, with FILLED left; a lower bound can only show too much."""
    if memory.total > gpu_memory:
        return "does not fit"
    if memory.lower_bound:
        return "unknown"
    return "fits" if memory.total <= FILLED * gpu_memory else "tight"
