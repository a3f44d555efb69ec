"""Choose gradient checkpointing and the rows (packs) in a micro-batch by what fits: the search, without torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.order.packing import Units

# A micro-batch of this many tokens keeps a GPU busy; recomputing activations to fit more costs more time than it saves. A
# replayed CUDA graph does not wait for the host, so fewer are enough, and more than ENOUGH_TOKENS save no time.
ENOUGH_TOKENS, ENOUGH_WITH_GRAPHS = 8192, 2048


@dataclass(frozen=True)
class MicroBatchDecision:
    """The kind of gradient checkpointing, the rows (packs) in a micro-batch, and the reason."""

    kind: str
    per_device: int
    reason: str


def divisors(number: int) -> list[int]:
    """Return all divisors of `number`, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def search(
    kinds: Sequence[str],
    sizes: Sequence[int],
    tokens: Callable[[int], int],
    fits: Callable[[str, int], bool],
    enough: int = ENOUGH_TOKENS,
) -> tuple[str, int] | None:
    """Return the first kind with which enough tokens fit at once, and the most rows that do; None if nothing fits.

    Args:
        kinds: cheapest first.
        sizes: rows that a micro-batch may have, ascending.
        tokens: rows -> tokens of the largest micro-batch of so many rows.
        fits: (kind, rows) -> whether they fit; what fits with more rows is taken to fit with fewer.
        enough: tokens of a micro-batch that keep a GPU busy.
    """
    best: tuple[str, int] | None = None
    for kind in kinds:
        below, above = 0, len(sizes)
        # A small one mostly fits, and then one trial is enough.
        middle = above - 1 if tokens(sizes[-1]) <= 2 * ENOUGH_TOKENS else above // 2
        while below < above:
            if fits(kind, sizes[middle]):
                below = middle + 1
            else:
                above = middle
            middle = (below + above) // 2
        if not below:
            continue
        size = sizes[below - 1]
        if size == sizes[-1] or tokens(size) >= enough:
            return kind, size
        if best is None or tokens(size) > tokens(best[1]):
            best = kind, size
    return best


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
