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

# Compiling and capturing take about as long as this many replayed micro-batches save.
FEWEST_MICRO_BATCHES = 100
# The same for each kind of layer that is compiled and not captured: two kinds of Qwen3-VL-2B took 60 s and five of Gemma 4 E2B
# about 160 s, and halved the time of a micro-batch (benchmarks/results/speed/images_packed.json, images_gemma4_2.json).
FEWEST_TO_COMPILE_A_KIND = 100
# The rows of a stream are not known in advance, so the captured shape has room for one row per this many tokens.
# Micro-batches with more rows are not replayed.
TOKENS_A_ROW = 16
# Replaying saves about a tenth of the time of a micro-batch that keeps the GPU busy, so it may compute as much padding.
LEAST_FULL = 0.9
# Of a layer's matrices in the model of 1.7B for which ENOUGH_TOKENS were measured.
WEIGHTS_A_LAYER = 50_331_648
# Packs that the sizes of micro-batches are estimated from.
SAMPLED_PACKS = 4096


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
    settings: Settings, against: str | None, train: Units, plan: BatchPlan, while_launching: float
) -> str | None:
    """Return why the micro-batch is not chosen for CUDA graphs, in a few words; None if it is.

    Args:
        against: of `obstacle`.
        plan: with any micro-batch.
        while_launching: see `busy_without`.
    """
    if settings.cuda_graphs == "off":
        return "as set"
    if against is not None or settings.cuda_graphs == "on" or settings.method == "full" or train.streamed:
        return against
    plan = with_micro_batch(plan, sizes_to_replay(settings, train, plan)[-1])
    return busy_without(settings, train, plan, shape_of_run(settings, train, plan), while_launching)


def reason_after(
    settings: Settings, train: Units, plan: BatchPlan, shape: FixedShape, kind: str, while_launching: float
) -> str | None:
    """Return why a micro-batch that is chosen for CUDA graphs is not replayed, in a few words; None if a trial decides.

    Args:
        plan: with the chosen micro-batch.
        shape: of its micro-batches (see `shape_of_run`).
        kind: the chosen kind of gradient checkpointing.
        while_launching: see `busy_without`.
    """
    reason = kind_obstacle(kind, random=has_lora_dropout(settings))
    if reason is not None or settings.cuda_graphs == "on":
        return reason
    return too_short(settings, train, plan) or busy_without(settings, train, plan, shape, while_launching)


def micro_batches_of_run(settings: Settings, train: Units, plan: BatchPlan) -> float:
    """Return how many micro-batches a process computes; infinity if streamed rows decide."""
    if settings.max_steps > 0:
        return settings.max_steps * plan.accumulation
    if train.streamed:
        return math.inf
    return math.ceil(plan.steps_per_epoch(train.units) * settings.num_train_epochs) * plan.accumulation


def too_short(settings: Settings, train: Units, plan: BatchPlan) -> str | None:
    """Return why a run is too short for compiling to save time; None if it is not."""
    passes = micro_batches_of_run(settings, train, plan)
    return f"{passes} micro-batches are too few to compile for" if passes < FEWEST_MICRO_BATCHES else None


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


def busy_without(
    settings: Settings, train: Units, plan: BatchPlan, shape: FixedShape, while_launching: float = ENOUGH_TOKENS
) -> str | None:
    """Return why CUDA graphs would save no time: micro-batches already keep the GPU busy; None if they may save time.

    Unsloth compiles whole layers for --method full; measured on an H200 (benchmarks/speed.md). A replayed micro-batch also computes
    its padding. The backend computes a step's rows, or waits for the host.

    Args:
        plan: with the micro-batch that would be replayed.
        while_launching: tokens that the GPU computes while the host launches the kernels of a micro-batch.
    """
    if train.streamed:
        return None
    if settings.method == "full":
        tokens = largest_tokens(train, plan.per_device, settings.longest_example)
        busy = tokens >= ENOUGH_TOKENS
        return f"micro-batches of {tokens:,} tokens keep the GPU busy without CUDA graphs" if busy else None
    packs = dealt(train, plan)
    mean, padded = packs.sum(axis=1).mean(), shape.padded(packs).mean()
    # Without CUDA graphs as many packs as fit are one micro-batch, usually all of a step.
    together = plan.accumulation if len(sizes_of(settings, plan)) > 1 else 1
    if max(mean * together, while_launching) >= LEAST_FULL * padded * together:
        return None
    return f"micro-batches of {mean:,.0f} tokens on average would be padded to {padded:,.0f}"


def tokens_while_launching(weights: int) -> float:
    """Return how many tokens a GPU computes while the host launches the kernels of a micro-batch, roughly.

    ENOUGH_TOKENS were measured for a model of 1.7B; layers take as many kernels whatever their size.

    Args:
        weights: of a layer's matrices; 0 if they are not known.
    """
    return ENOUGH_TOKENS * WEIGHTS_A_LAYER / weights if weights else ENOUGH_TOKENS


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
