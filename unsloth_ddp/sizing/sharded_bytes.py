"""Compute the bytes, without activations, that one rank of a run with ZeRO or FSDP2 holds during a micro-batch.

Most of them follow from the weights and the rules of DeepSpeed and FSDP2. docs/plan.md compares the same rules, applied
to the shape of a model, with measured runs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from unsloth_ddp.distributed.sharding import Offload, Sharding
from unsloth_ddp.sizing.optimizer_states import optimizer_bytes

# DeepSpeed's default reduce_bucket_size in elements, which accelerate keeps. One buffer of this size is allocated,
# however few weights are trained (DeepSpeed 0.19.8, stage_1_and_2.py, setup_buckets).
ZERO_BUCKET = 5e8
# ZeRO-3 keeps this many gathered elements if they are used again soon (DeepSpeed's default stage3_max_live_parameters
# and stage3_max_reuse_distance, which accelerate keeps).
ZERO3_LIVE = 1e9
# Bytes of a gradient element in FSDP2's reduction, which is in fp32 (mixed_precision_policy of sharded_load.py).
REDUCED = 4


@dataclass(frozen=True)
class Weight:
    """Describe the size of one weight of a model.

    Args:
        stored: bytes of the weight on this rank's device now.
        whole: bytes of the whole weight in the dtype of the passes.
        number: bytes of a stored element.
        count: trained elements of the whole weight; 0 if it is frozen.
    """

    stored: int
    whole: int
    number: int
    count: int
    embedding: bool = False


@dataclass(frozen=True)
class ShardedModel:
    """Describe the weights of a model, and of its parts that are gathered at once.

    Args:
        weights: every weight once.
        block: weights of the largest layer.
        head: weights of the output head, tied to the embedding or not.
        outside: weights outside the layers.
        split: whether weights are already sharded over ranks.
    """

    weights: Sequence[Weight]
    block: Sequence[Weight]
    head: Sequence[Weight]
    outside: Sequence[Weight]
    split: bool


@dataclass(frozen=True)
class ShardedLayout:
    """Describe how a run shards.

    Args:
        parts: number of ranks that a weight is sharded over.
        precision: bytes of an element in passes.
        master: bytes of a trained element as FSDP2 stores it.
        optimizer: its Transformers name.
        whole_in_use: whether ZeRO-3 keeps every weight gathered until the backward pass ends. It does so with frozen
            weights where nothing is recomputed (zero3_release.py releases those of recomputed layers).
    """

    sharding: Sharding
    offload: Offload
    parts: int
    precision: int
    master: int
    optimizer: str
    whole_in_use: bool = False


def _whole(weights: Iterable[Weight]) -> int:
    return sum(weight.whole for weight in weights)


def _trained(weights: Iterable[Weight]) -> int:
    return sum(weight.count for weight in weights)


def zero_bucket_bytes(trained: float, number: int) -> float:
    """Return the bytes of DeepSpeed's bucket, and of its fp32 copy while it is averaged."""
    return ZERO_BUCKET * number + min(ZERO_BUCKET, trained) * 4


def zero_optimizer_bytes(trained: float, optimizer: str, precision: int, parts: int) -> float:
    """Return the bytes of a rank's optimizer states, with the fp32 copies of 16-bit weights.

    DeepSpeed's copies are flat, so an optimizer cannot treat embeddings differently.
    """
    return trained * (optimizer_bytes(optimizer, 4) + (4 if precision < 4 else 0)) / parts


def zero3_gathered_bytes(
    everything: float, outside: float, layers: float, precision: int, *, whole_in_use: bool
) -> float:
    """Return the bytes of weights that ZeRO-3 has gathered at the peak.

    Args:
        everything: bytes of all weights in the dtype of passes.
        outside: bytes of the weights outside the layers.
        layers: bytes of two layers.
        precision: bytes of an element in passes.
        whole_in_use: see ShardedLayout.
    """
    if whole_in_use:
        return everything
    # Weights that are used again soon stay gathered, up to a number of elements. On H200s they came on top with 1.7B
    # (benchmarks/results/memory/sharded_fit_zero3.json), not with 8B, whose embedding and head exceed it
    # (zero3_peak.json).
    live = ZERO3_LIVE * precision
    return min(everything, outside + layers + (live if outside < live else 0))


def zero2_offload_bytes(trained: float, largest: float, precision: int, parts: int) -> float:
    """Return the bytes of gradients on the GPU where ZeRO-2 has the optimizer in host memory.

    After each micro-batch but the last of a step, DeepSpeed adds the gradients to those on the host, and frees the fp32
    gradients of this rank's part only at the next forward pass. It copies through a buffer of the largest trained
    weight (DeepSpeed 0.19.8, stage_1_and_2.py, clear_backward_seen_flag and temp_grad_buffer_for_gpu_offload).

    Args:
        trained: number of trained elements.
        largest: elements of the largest trained weight.
    """
    return trained * 4 / parts + largest * precision


def held_bytes(model: ShardedModel, layout: ShardedLayout, allocated: int) -> int:
    """Return the bytes on this rank's device during a micro-batch, without activations.

    Args:
        allocated: bytes on the device now, when only the weights are loaded.
    """
    beside = allocated - sum(weight.stored for weight in model.weights)
    rule = _with_fsdp2 if layout.sharding == "fsdp2" else _with_zero
    return int(beside + rule(model, layout))


def _with_fsdp2(model: ShardedModel, layout: ShardedLayout) -> float:
    total_bytes = 0.0
    for weight in model.weights:
        if model.split:
            # A shard in host memory counts as 0 bytes, like its gradient and its optimizer states.
            number, part = weight.number, float(weight.stored)
        else:
            number = layout.master if weight.count else weight.number
            part = weight.stored / weight.number * number / layout.parts
        trained = part / number if weight.count else 0
        total_bytes += part + trained * (number + optimizer_bytes(layout.optimizer, number, weight.embedding))
    head, block = (_whole(model.head), _trained(model.head)), (_whole(model.block), _trained(model.block))
    outside = 0 if model.split else _whole(model.outside)
    return total_bytes + fsdp2_gathered_bytes(head, block, outside, layout.precision)


def fsdp2_gathered_bytes(
    head: tuple[float, float],
    block: tuple[float, float],
    outside: float,
    precision: int,
    *,
    beside_head: float = 0,
    beside_block: float = 0,
) -> float:
    """Return the peak bytes of gathered weights and of gradients that are not reduced yet.

    The peak is the largest of these: the output head while it is gathered, when torch holds it twice; the head with its
    gradient in the precision of the pass and in fp32; a layer in its backward pass, with the next one gathered and a
    third being copied; and where accelerate wraps a whole model, the weights outside the layers with two layers.

    Args:
        head: (bytes in the dtype of passes, trained elements) of the output head.
        block: the same of the largest layer.
        outside: bytes of the weights outside the layers if they form one group; 0 if they do not.
        beside_head, beside_block: bytes of activations that exist only beside the gathered head, or a layer's backward.
    """
    gradient = precision + REDUCED
    grouped = outside + 2 * block[0] if outside else 0
    of_head = head[0] + head[1] * gradient + beside_head
    of_block = 3 * block[0] + block[1] * gradient + beside_block
    return max(2 * head[0], of_head, of_block, grouped)


def _with_zero(model: ShardedModel, layout: ShardedLayout) -> float:
    trained, parts = _trained(model.weights), layout.parts
    quantized = any(weight.whole != 0 and weight.number == 1 for weight in model.weights)
    total_bytes = zero_bucket_bytes(trained, 2 if quantized else layout.precision)
    if layout.offload == "none":
        # The kit has DeepSpeed accumulate and average gradients in fp32 (training/step/deepspeed_precision.py).
        total_bytes += trained * 4 / parts + zero_optimizer_bytes(trained, layout.optimizer, layout.precision, parts)
    if layout.sharding == "zero2":
        if layout.offload == "optimizer":
            largest = max((weight.count for weight in model.weights), default=0)
            total_bytes += zero2_offload_bytes(trained, largest, layout.precision, parts)
        return total_bytes + _whole(model.weights)
    total_bytes += sum(weight.stored for weight in model.weights)
    outside, layers = _whole(model.outside), 2 * _whole(model.block)
    everything, precision = _whole(model.weights), layout.precision
    return total_bytes + zero3_gathered_bytes(everything, outside, layers, precision, whole_in_use=layout.whole_in_use)
