"""Sizes that a micro-batch may have, and the tokens of the largest one: pure arithmetic."""

import math

import numpy as np

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.packing import Units

# A micro-batch of this many tokens keeps a GPU busy; recomputing activations to fit more costs more time than it saves. A
# replayed CUDA graph does not wait for the host, so a pack of the usual 2,048 tokens is enough, which is rarely quite full, and
# more than ENOUGH_TOKENS save no time.
ENOUGH_TOKENS, ENOUGH_WITH_GRAPHS = 8192, 1920


def divisors(number: int) -> list[int]:
    """Return all divisors of `number`, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def sizes_of(settings: Settings, plan: BatchPlan) -> list[int]:
    """Return the sizes of a micro-batch to choose from: all that keep the global batch, or the one that was given."""
    if settings.per_device_train_batch_size == "auto" and settings.gradient_accumulation_steps is None:
        return divisors(plan.per_device * plan.accumulation)
    return [plan.per_device]


def sizes_to_replay(settings: Settings, rows: Units, plan: BatchPlan) -> list[int]:
    """Return the sizes of a micro-batch to choose from if it is replayed as a CUDA graph; see `sizes_of`."""
    sizes = sizes_of(settings, plan)
    if settings.method == "full":
        # Each micro-batch casts all weights and adds to all gradients, so larger sizes save time.
        return sizes
    # Up to the first with enough tokens: larger ones are not faster.
    below = [size for size in sizes if largest_tokens(rows, size, settings.longest_example) < ENOUGH_TOKENS]
    return sizes[: len(below) + 1]


def with_micro_batch(plan: BatchPlan, per_device: int) -> BatchPlan:
    """Return the plan of the same global batch with another micro-batch."""
    return BatchPlan(per_device, plan.per_device * plan.accumulation // per_device, plan.processes)


def largest_tokens(rows: Units, size: int, max_length: int) -> int:
    """Return the tokens of the largest micro-batch of `size` rows (packs) in any order of the rows, with padding."""
    if rows.streamed:
        return size * max_length
    lengths = np.sort(rows.lengths()[:-1])[::-1][:size]
    return int(lengths.sum() if rows.packing is not None else len(lengths) * lengths[0])
