"""Choose whether micro-batches are replayed as CUDA graphs or computed by the backend: pure arithmetic."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BalancedOrder, BatchPlan
from unsloth_ddp.data.order.fixed_shape import FixedShape, smaller_sizes
from unsloth_ddp.data.order.packing import Units
from unsloth_ddp.distributed.wire import sendable
from unsloth_ddp.sizing.micro_batch import ENOUGH_TOKENS, largest_tokens, sizes_of, sizes_to_replay, with_micro_batch
from unsloth_ddp.utils.errors import UserError

# Compiling and capturing took 15 s with empty caches, for a model of 1.7B on an H200 (benchmarks/results/speed/whole_jobs_2.json).
COMPILE_SECONDS = 15
# A host launches the kernels of a layer, forward and backward, in about this time: the model of 1.7B computes ENOUGH_TOKENS in
# 0.16 s, and has 28 layers.
LAUNCH_SECONDS = 0.16 / 28
# Micro-batches that pay for compiling the layers of the backend.
FEWEST_MICRO_BATCHES = 100
# Micro-batches that pay for compiling a kind of layer that is not captured: two kinds of Qwen3-VL-2B took 60 s and five of Gemma 4
# E2B about 160 s, and halved the time of a micro-batch (benchmarks/results/speed/images_packed.json, images_gemma4_2.json).
FEWEST_TO_COMPILE_A_KIND = 100
# The rows of a stream are not known in advance, so the captured shape has room for one row per this many tokens.
# Micro-batches with more rows are not replayed.
TOKENS_A_ROW = 16
# A replayed micro-batch may compute as much padding as replaying saves. Of a micro-batch that keeps the GPU busy that is 11 % for
# the model of 1.7B and 5 % for one of 8B (benchmarks/results/speed/whole_jobs_2.json, speed.json): of what is computed beside the
# products of a layer, which grows with its width, and not with its square.
SAVED, MOST_SAVED = 0.11, 0.3
# With --fp8 the backend's passes took twice the time of those in bf16, and replayed ones three quarters (whole_jobs_2.json).
FP8_COMPUTED, FP8_REPLAYED = 2.0, 0.75
# The same for the choice between two ways of padding.
LEAST_FULL = 0.9
# A backward pass that recomputes the layers computes their forward pass, a third of a micro-batch's work, again.
RECOMPUTED = 4 / 3
# Of a layer's matrices in the model of 1.7B for which ENOUGH_TOKENS were measured.
WEIGHTS_A_LAYER = 50_331_648
# Products of 16-bit numbers that add in fp32, as floating-point operations of a multiprocessor a clock, by compute capability:
# NVIDIA's white papers of these architectures.
OPERATIONS_A_CLOCK = {
    (8, 0): 2048,
    (8, 6): 512,
    (8, 9): 512,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (12, 0): 512,
    (12, 1): 512,
}
# Multiprocessors of the H100 and H200 that the constants above were measured on.
MULTIPROCESSORS = 132
# Packs that the sizes of micro-batches are estimated from.
SAMPLED_PACKS = 4096


@dataclass(frozen=True)
class Launching:
    """Describe what happens while the host launches the kernels of a micro-batch without CUDA graphs, roughly: see `launching`.

    Args:
        tokens: that the GPU computes meanwhile.
        seconds: that this takes.
        saved: share of the time of a token that replaying saves when the GPU is busy.
    """

    tokens: float = ENOUGH_TOKENS
    seconds: float = 28 * LAUNCH_SECONDS
    saved: float = SAVED


IMAGES_DIFFER = "images differ in number and size, and so micro-batches in shape"


@sendable
@dataclass(frozen=True)
class StepChoice:
    """Say whether a run replays micro-batches as CUDA graphs, and the reason in a few words."""

    uses_graphs: bool
    reason: str


def obstacle_on_gpus(
    settings: Settings, *, packed: bool, precision: str, sharding: str, processes: int, images: bool = False
) -> str | None:
    """Return what `obstacle` would on GPUs and with a torch that has the attention kernel."""
    if images:
        return IMAGES_DIFFER
    if not packed:
        return "rows are padded, so micro-batches differ in shape"
    if settings.trains_preferences:
        return f"a captured step sums the losses of tokens, and {settings.task} compares whole answers"
    if precision != "bf16":
        return f"precision {precision} is not bf16"
    if sharding == "zero2":
        return "sharding zero2 reduces gradients during the backward pass"
    if sharding != "none":
        return f"sharding {sharding} gathers weights in every layer"
    if settings.ddp_find_unused_parameters and processes > 1:
        return "DistributedDataParallel looks for unused weights in every forward pass"
    return kind_obstacle(settings.gradient_checkpointing, random=has_lora_dropout(settings))


def has_lora_dropout(settings: Settings) -> bool:
    """Return whether the adapter draws dropout masks."""
    return settings.method != "full" and settings.lora_dropout > 0


def kind_obstacle(kind: str, *, random: bool) -> str | None:
    """Return why passes with a kind of gradient checkpointing cannot be captured, in a few words; None if they can.

    Args:
        random: whether the forward pass draws random numbers.
    """
    if kind == "unsloth":
        return "gradient checkpointing unsloth moves the inputs of layers to host memory"
    if kind == "torch" and random:
        return "gradient checkpointing torch would draw another dropout mask when it recomputes a layer"
    return None


def reason_before(
    settings: Settings,
    against: str | None,
    train: Units,
    plan: BatchPlan,
    launched: Launching,
    *,
    recomputes: bool = False,
) -> str | None:
    """Return why the micro-batch is not chosen for CUDA graphs, in a few words; None if it is.

    Args:
        against: of `obstacle`.
        plan: with any micro-batch.
        recomputes: whether micro-batches fit without CUDA graphs only if layers are recomputed.
    """
    if settings.cuda_graphs == "off":
        return "as set"
    if against is not None or settings.cuda_graphs == "on" or settings.method == "full":
        return against
    plan = with_micro_batch(plan, sizes_to_replay(settings, train, plan)[-1])
    shape = shape_of_run(settings, train, plan)
    saved = saved_tokens(settings, train, plan, shape, launched, recomputes=recomputes)
    return busy_without(settings, train, plan, shape, saved) or too_short(settings, train, plan, saved, launched)


def reason_after(
    settings: Settings,
    train: Units,
    plan: BatchPlan,
    shape: FixedShape,
    kind: str,
    launched: Launching,
    *,
    after_all: bool = False,
) -> str | None:
    """Return why a micro-batch that is chosen for CUDA graphs is not replayed, in a few words; None if a trial decides.

    Args:
        plan: with the chosen micro-batch.
        shape: of its micro-batches (see `shape_of_run`).
        kind: the chosen kind of gradient checkpointing.
        after_all: whether CUDA graphs were chosen because micro-batches did not fit without them.
    """
    reason = kind_obstacle(kind, random=has_lora_dropout(settings))
    if reason is not None or settings.cuda_graphs == "on" or after_all:
        return reason
    saved = saved_tokens(settings, train, plan, shape, launched)
    # Otherwise it was judged before, and what is compiled since then pays.
    short = too_short(settings, train, plan, saved, launched) if settings.method == "full" else None
    return short or busy_without(settings, train, plan, shape, saved)


def micro_batches_of_run(settings: Settings, train: Units, plan: BatchPlan) -> float:
    """Return how many micro-batches a process computes; infinity if streamed rows decide."""
    if settings.max_steps > 0:
        return settings.max_steps * plan.accumulation
    if train.streamed:
        return math.inf
    return math.ceil(plan.steps_per_epoch(train.units) * settings.num_train_epochs) * plan.accumulation


def too_short(settings: Settings, train: Units, plan: BatchPlan, saved: float, launched: Launching) -> str | None:
    """Return why a run is too short for compiling to save time, in a few words; None if it is not.

    Args:
        saved: by compiling, for each micro-batch (see `saved_tokens`).
    """
    seconds = micro_batches_of_run(settings, train, plan) * max(0, saved) / launched.tokens * launched.seconds
    if seconds >= COMPILE_SECONDS:
        return None
    return f"replaying would save about {int(seconds)} s of this run, and compiling takes about {COMPILE_SECONDS} s"


def too_short_to_compile(settings: Settings, train: Units, plan: BatchPlan) -> bool:
    """Return whether a run is too short for the backend to compile whole layers."""
    return micro_batches_of_run(settings, train, plan) < FEWEST_MICRO_BATCHES


def may_compile_layers(
    settings: Settings, train: Units, plan: BatchPlan, against: str, *, precision: str, sharding: str, kinds: int
) -> bool:
    """Return whether a run compiles its layers, if a trial agrees, since only its images are against CUDA graphs.

    Args:
        kinds: number of kinds of layers; each is compiled once.
    """
    if settings.cuda_graphs != "auto" or against != IMAGES_DIFFER or train.packing is None:
        return False
    enough = micro_batches_of_run(settings, train, plan) >= kinds * FEWEST_TO_COMPILE_A_KIND
    return enough and precision == "bf16" and sharding == "none"


def busy_without(settings: Settings, train: Units, plan: BatchPlan, shape: FixedShape, saved: float) -> str | None:
    """Return why CUDA graphs would save no time: micro-batches already keep the GPU busy; None if they may save time.

    Unsloth compiles whole layers for --method full; measured on an H200 (benchmarks/speed.md).

    Args:
        plan: with the micro-batch that would be replayed.
        saved: see `saved_tokens`.
    """
    if train.streamed:
        return None
    if settings.method == "full":
        tokens = largest_tokens(train, plan.per_device, settings.longest_example)
        busy = tokens >= ENOUGH_TOKENS
        return f"micro-batches of {tokens:,} tokens keep the GPU busy without CUDA graphs" if busy else None
    if saved >= 0:
        return None
    mean, padded = _mean_and_padded(train, plan, shape)
    return f"micro-batches of {mean:,.0f} tokens on average would be padded to {padded:,.0f}"


def saved_tokens(
    settings: Settings,
    train: Units,
    plan: BatchPlan,
    shape: FixedShape,
    launched: Launching,
    *,
    recomputes: bool = False,
) -> float:
    """Return how many tokens the GPU computes in the time that replaying saves for a micro-batch; negative if it takes longer.

    A replayed micro-batch also computes its padding. The backend computes a step's rows, or waits for the host.

    Args:
        recomputes: see `reason_before`.
    """
    mean, padded = _mean_and_padded(train, plan, shape)
    # Without CUDA graphs as many packs as fit are one micro-batch, usually all of a step.
    together = plan.accumulation if len(sizes_of(settings, plan)) > 1 else 1
    computed = mean * together * (RECOMPUTED if recomputes else 1) * (FP8_COMPUTED if settings.fp8 else 1)
    replayed = (1 - launched.saved) * padded * (FP8_REPLAYED if settings.fp8 else 1)
    return float(max(computed, launched.tokens) / together - replayed)


def _mean_and_padded(train: Units, plan: BatchPlan, shape: FixedShape) -> tuple[float, float]:
    """Return the mean tokens of micro-batches, and those that they are padded to; full ones if rows are streamed."""
    if train.streamed:
        return shape.tokens, shape.tokens
    packs = dealt(train, plan)
    return float(packs.sum(axis=1).mean()), float(shape.padded(packs).mean())


def launching(weights: int, layers: int, speed: float = 1) -> Launching:
    """Return what happens while the host launches the kernels of a micro-batch.

    ENOUGH_TOKENS were measured for a model of 1.7B; layers take as many kernels whatever their size. Larger products take less
    time for each weight: a layer of 8B has 3.8 times the weights and took 2.5 times as long (benchmarks/results/speed/speed.json).

    Args:
        weights: of the matrices of a layer; 0 if they are not known.
        speed: of the GPU (see `speed_of_gpu`).
    """
    if not weights or not layers:
        return Launching(speed * ENOUGH_TOKENS)
    size = weights / WEIGHTS_A_LAYER
    return Launching(speed * ENOUGH_TOKENS / size**0.7, layers * LAUNCH_SECONDS, min(MOST_SAVED, SAVED / size**0.5))


def speed_of_gpu(capability: tuple[int, int], multiprocessors: int) -> float:
    """Return the speed of a GPU's 16-bit matrix products as a multiple of an H100's, roughly; 1 if it is not known."""
    operations = OPERATIONS_A_CLOCK.get(capability)
    return operations / OPERATIONS_A_CLOCK[9, 0] * multiprocessors / MULTIPROCESSORS if operations else 1


def dealt(train: Units, plan: BatchPlan) -> np.ndarray:
    """Return the tokens of the packs of micro-batches as an epoch deals them, int (micro-batches, packs); at most of a sample."""
    lengths = train.lengths()
    if len(lengths) > SAMPLED_PACKS:
        sample = np.random.default_rng(0).choice(lengths[:-1], SAMPLED_PACKS, replace=False)
        lengths = np.append(sample, lengths[-1])
    order = list(BalancedOrder(plan, lengths, 0, padded=False))
    return lengths[order].reshape(-1, plan.per_device)


def shape_of_run(settings: Settings, train: Units, plan: BatchPlan) -> FixedShape:
    """Return the shape of a run's micro-batches, with further numbers of tokens where most are smaller than the largest."""
    shape = shape_for(train, plan.per_device, settings.max_length)
    if train.streamed:
        return shape
    passes = micro_batches_of_run(settings, train, plan)
    smaller = smaller_sizes(shape.needed(dealt(train, plan)), shape.tokens, int(passes))
    return dataclasses.replace(shape, smaller=smaller)


def shape_for(train: Units, size: int, max_length: int) -> FixedShape:
    """Return a shape that any micro-batch of `size` packs can be padded to, with few exceptions for streamed rows.

    Packs of one row each become sequences, unless that takes many more tokens because one row is far longer than the others.
    """
    assert train.packing is not None
    tokens = largest_tokens(train, size, max_length)
    if train.streamed:
        return FixedShape.that_holds(tokens, tokens // TOKENS_A_ROW, max_length)
    rows = np.sort(np.diff(train.packing.starts))[::-1][:size].sum()
    joined = FixedShape.that_holds(tokens, int(rows), max(train.packing.longest, max_length))
    if np.diff(train.packing.starts).max() > 1:
        return joined
    # More tokens than the largest micro-batch has may not fit.
    apart = FixedShape.of_single_rows(size, train.packing.longest)
    return apart if LEAST_FULL * apart.tokens <= joined.tokens else joined


def refuse(settings: Settings, reason: str | None) -> None:
    """Refuse --cuda_graphs on if there is a reason against it.

    Raises:
        UserError: naming the reason.
    """
    if settings.cuda_graphs == "on" and reason is not None:
        raise UserError(f"cuda_graphs on is not possible, because {reason}; use --cuda_graphs auto or off.")
