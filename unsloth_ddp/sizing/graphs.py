"""Say what keeps micro-batches from being captured as CUDA graphs, and to which shape they are padded: arithmetic."""

import dataclasses
import math

import numpy as np

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BalancedOrder, BatchPlan
from unsloth_ddp.data.order.fixed_shape import FixedShape, smaller_sizes
from unsloth_ddp.data.order.packing import Units
from unsloth_ddp.sizing.micro_batch import ENOUGH_TOKENS, largest_tokens, sizes_of, sizes_to_replay, with_micro_batch
from unsloth_ddp.utils.errors import UserError

# A shorter run ends sooner uncompiled: 100 and 300 steps on an H200 (benchmarks/results/speed/whole_jobs_4.json).
SHORTEST_SECONDS = 120
# A replayed pass that takes this much longer than the backend's is slower: two timings differ by a few percent.
SLOWER = 1.02
# Micro-batches that pay for compiling the layers of the backend.
FEWEST_MICRO_BATCHES = 100
# Micro-batches that pay for compiling a kind of layer that is not captured: two kinds of Qwen3-VL-2B took 60 s and five
# of Gemma 4 E2B about 160 s, and halved the time of a micro-batch (benchmarks/results/speed/images_packed.json,
# images_gemma4_2.json).
FEWEST_TO_COMPILE_A_KIND = 100
# The rows of a stream are not known in advance, so the captured shape has room for one row per this many tokens.
# Micro-batches with more rows are not replayed.
TOKENS_A_ROW = 16
# A captured shape of single rows may have so much more padding than joined rows.
LEAST_FULL = 0.9
# Packs that the sizes of micro-batches are estimated from.
SAMPLED_PACKS = 4096


IMAGES_DIFFER = "images differ in number and size, and so micro-batches in shape"


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


def why_not_captured(settings: Settings, obstacle: str | None, train: Units, plan: BatchPlan) -> str | None:
    """Return why a run tries no captured pass, in a few words; None if a trial decides.

    Args:
        obstacle: of `obstacle_on_gpus`.
        plan: with any micro-batch.
    """
    if settings.cuda_graphs == "off":
        return "as set"
    if obstacle is not None or settings.cuda_graphs == "on":
        return obstacle
    if settings.method == "full" and not train.streamed:
        # Unsloth compiles whole layers for --method full (benchmarks/speed.md).
        tokens = largest_tokens(train, sizes_of(settings, plan)[-1], settings.longest_example)
        if tokens >= ENOUGH_TOKENS:
            return f"micro-batches of {tokens:,} tokens keep the GPU busy without CUDA graphs"
    smallest = with_micro_batch(plan, sizes_to_replay(settings, train, plan)[-1])
    passes = micro_batches_of_run(settings, train, smallest)
    if passes < FEWEST_MICRO_BATCHES:
        return f"a run of {passes:,.0f} micro-batches is too short for compiling to pay"
    return None


def why_too_short(seconds: float, passes: float) -> str | None:
    """Return why a run is too short for compiling to pay, in a few words; None if it is not.

    Args:
        seconds: that the backend takes for a micro-batch.
        passes: micro-batches of the run (see `micro_batches_of_run`).
    """
    if seconds * passes >= SHORTEST_SECONDS:
        return None
    return f"the run takes about {seconds * passes:.0f} s without them, too short for compiling to pay"


def micro_batches_of_run(settings: Settings, train: Units, plan: BatchPlan) -> float:
    """Return how many micro-batches a process computes; infinity if streamed rows decide."""
    if settings.max_steps > 0:
        return settings.max_steps * plan.accumulation
    if train.streamed:
        return math.inf
    return math.ceil(plan.steps_per_epoch(train.units) * settings.num_train_epochs) * plan.accumulation


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


def dealt(train: Units, plan: BatchPlan) -> np.ndarray:
    """Return the tokens of an epoch's packs by micro-batch, int (micro-batches, packs); at most of a sample."""
    lengths = train.lengths()
    if len(lengths) > SAMPLED_PACKS:
        sample = np.random.default_rng(0).choice(lengths[:-1], SAMPLED_PACKS, replace=False)
        lengths = np.append(sample, lengths[-1])
    order = list(BalancedOrder(plan, lengths, 0, padded=False))
    return lengths[order].reshape(-1, plan.per_device)


def shape_of_run(settings: Settings, train: Units, plan: BatchPlan) -> FixedShape:
    """Return the shape of a run's micro-batches, with further numbers of tokens where most are below the largest."""
    shape = shape_for(train, plan.per_device, settings.max_length)
    if train.streamed:
        return shape
    passes = micro_batches_of_run(settings, train, plan)
    smaller = smaller_sizes(shape.needed(dealt(train, plan)), shape.tokens, int(passes))
    return dataclasses.replace(shape, smaller=smaller)


def shape_for(train: Units, size: int, max_length: int) -> FixedShape:
    """Return a shape that any micro-batch of `size` packs can be padded to, with few exceptions for streamed rows.

    Packs of one row each become sequences, unless that takes many more tokens because one row is far longer.
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


def refuse(settings: Settings, obstacle: str | None) -> None:
    """Refuse --cuda_graphs on if there is an obstacle to it.

    Raises:
        UserError: naming the obstacle.
    """
    if settings.cuda_graphs == "on" and obstacle is not None:
        raise UserError(f"cuda_graphs on is not possible, because {obstacle}; use --cuda_graphs auto or off.")
