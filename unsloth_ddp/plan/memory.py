"""What one GPU has to hold, by method and by what the GPUs share out. Pure arithmetic.

The figures of DDP (sharding none) are within 4 % of runs on H200s, see tests/plan/test_plan.py; those of ZeRO and FSDP2 are
what DeepSpeed and PyTorch keep for sure, and runs took up to twice that (docs/plan.md). The driver, NCCL and
fragmentation come on top, which is what RESERVE is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from unsloth_ddp.distributed.sharding import Sharding
from unsloth_ddp.plan.shape import ModelShape
from unsloth_ddp.training.optimizer_memory import optimizer_bytes

Method = Literal["lora", "qlora", "full"]
Checkpointing = Literal["none", "torch", "unsloth"]
# Ordered by what they cost.
KINDS: tuple[Checkpointing, ...] = get_args(Checkpointing)

# Two numbers in a byte; a one-byte scale a 64, those scaled again in fp32 a 256 (nf4, double quantization).
BYTES_PACKED = 0.5 + 1 / 64 + 4 / (64 * 256)
# A run may fill this share of the GPU: the rest is for what is not counted.
RESERVE = 0.9
# Unsloth keeps a part of what Transformers' code does for the backward pass. Measured without checkpointing and with 16384
# tokens in a micro-batch: LoRA on 8B with padded rows takes 71 GiB, which is 0.5 of the counted blocks; with packs, whose
# attention copies what it is given, 83 to 85, and 31 on 1.7B; every parameter of 1.7B, which it compiles, 59.
UNSLOTH_KEEPS, OF_PACKS, OF_ALL = 0.5, 0.62, 0.68
# Unsloth's fused loss takes as many logits at once as fit into 4 GiB at 16 bytes each.
LOGITS_AT_ONCE = 2**28
# DeepSpeed's reduce_bucket_size and allgather_bucket_size, in numbers, as accelerate leaves them.
ZERO_BUCKET = 5e8


@dataclass(frozen=True)
class Workload:
    """What a run asks of one GPU.

    Args:
        tokens: of the largest micro-batch, padding included.
        precision: bytes a number in the forward pass, 4 or 2.
        master: bytes a trained weight is kept in (method full; adapters are kept in 4).
        optimizer: its Transformers name.
        packed: whether rows are joined to packs.
    """

    tokens: int
    precision: int
    master: int
    optimizer: str
    checkpointing: Checkpointing
    processes: int
    backend: Literal["unsloth", "transformers"] = "unsloth"
    packed: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU in the peak of a step, and while the model is loaded."""

    weights: float
    gradients: float
    optimizer: float
    copies: float
    activations: float
    loading: float

    @property
    def total(self) -> float:
        """The most there is at once."""
        step = self.weights + self.gradients + self.optimizer + self.copies + self.activations
        return max(step, self.loading)


def optimizer_states(shape: ModelShape, method: Method, name: str, weight_bytes: int) -> float:
    """Bytes an optimizer keeps for all that a method trains. An embedding is as large as the head."""
    embedding = shape.head if method == "full" else 0
    others = shape.trained(method) - embedding
    return others * optimizer_bytes(name, weight_bytes) + embedding * optimizer_bytes(
        name, weight_bytes, embedding=True
    )


def exists(method: Method, sharding: Sharding) -> bool:
    """Whether the pair does."""
    return not (method == "qlora" and sharding == "zero3")


def plan_memory(shape: ModelShape, method: Method, sharding: Sharding, work: Workload) -> Memory:
    """What one of `work.processes` GPUs holds."""
    parts = work.processes
    trained = shape.trained(method)
    frozen = 0.0 if method == "full" else shape.parameters * work.precision
    if method == "qlora":
        frozen = shape.linear * BYTES_PACKED + (shape.parameters - shape.linear) * work.precision
    master = work.master if method == "full" else 4
    states = optimizer_states(shape, method, work.optimizer, master)
    # Products in 16 bit are made with 16-bit copies of fp32 weights, kept while a forward pass lasts.
    multiplied = shape.linear if method == "full" else shape.adapter
    cast = float(multiplied * work.precision) if work.precision < master else 0
    loaded = shape.parameters * work.precision if method == "full" else frozen + trained * 4
    activations = plan_activations(shape, method, work)
    if sharding == "none":
        # Adapters have those of exchange.py beside DDP's.
        buckets = trained * master * (1 if method == "full" else 2) if parts > 1 else 0
        held = frozen + trained * master
        return Memory(held, trained * master, states, buckets + cast, activations, held)
    # A block is gathered while the next is on its way; embedding and head stay gathered.
    outside = (shape.parameters - shape.linear - shape.experts) * work.precision
    gathered = outside + 2 * (frozen + trained * work.precision - outside) / max(1, shape.layers)
    if sharding == "fsdp2":
        mine = (frozen + trained * master) / parts
        return Memory(mine, trained * master / parts, states / parts, gathered, activations, loaded)
    # DeepSpeed trains in 16 bit, with fp32 copies of the trained weights shared out.
    weights = float(frozen + trained * work.precision)
    # In its flat copies it does not know embeddings.
    shared = trained * (optimizer_bytes(work.optimizer, 4) + (4 if work.precision < 4 else 0)) / parts
    bucket = min(ZERO_BUCKET, trained) * work.precision * 2
    if sharding == "zero2":
        return Memory(weights, trained * work.precision / parts, shared, bucket, activations, weights)
    gradients = trained * work.precision / parts
    return Memory(weights / parts, gradients, shared, bucket + gathered, activations, weights / parts)


def plan_activations(shape: ModelShape, method: Method, work: Workload) -> float:
    """Bytes kept between forward and backward pass in the peak, which is at the loss or in a block's backward pass.

    With checkpointing every block keeps its input, and one at a time is recomputed (unsloth: the inputs but two are
    in host memory). The logits are there in slices, in 16 bit. QLoRA also unpacks one layer at a time.
    """
    scale = work.precision / 2
    block = shape.layer_kept * part_kept(method, work)
    kept, recomputed = {
        "none": (shape.layers * block, 0.0),
        "torch": (shape.layers * shape.layer_input, block),
        "unsloth": (2 * shape.layer_input, block),
    }[work.checkpointing]
    logits = min(work.tokens * shape.vocabulary, LOGITS_AT_ONCE) * work.precision
    unpacked = shape.largest_linear * work.precision if method == "qlora" else 0
    return work.tokens * scale * (kept + shape.outside_kept) + max(work.tokens * scale * recomputed, logits) + unpacked


def part_kept(method: Method, work: Workload) -> float:
    """Of what Transformers' code keeps in a block for the backward pass."""
    if work.backend != "unsloth":
        return 1.0
    if method == "full":
        return OF_ALL
    return OF_PACKS if work.packed else UNSLOTH_KEEPS


def fits(total: float, gpu_memory: float) -> Literal["fits", "tight", "does not fit"]:
    """Against the memory of a GPU, with RESERVE left for what is not counted."""
    if total <= RESERVE * gpu_memory:
        return "fits"
    return "tight" if total <= gpu_memory else "does not fit"
