"""Sizes that a micro-batch may have, the lengths of a plan's rows or packs, and the largest micro-batch: arithmetic."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.chat.labels import selected_positions
from unsloth_ddp.data.order.batch_plan import BatchPlan, RowOrder
from unsloth_ddp.data.order.packing import Packing, Units

# A micro-batch of this many tokens keeps a GPU busy; recomputing activations to fit more costs more time than it saves.
# A replayed CUDA graph does not wait for the host, so a pack of the usual 2,048 tokens is enough, which is rarely quite
# full, and more than ENOUGH_TOKENS save no time.
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


@dataclass(frozen=True)
class RowLengths:
    """Tokens of each training row, or of each pack, and its supervised tokens; the Units of a plan.

    For `streamed` data these are its first rows, which stand for all. `pixels` are the numbers of the images of
    each (images/processing.py), if rows have some. `all_tokens` and `trained`: tokens without padding, all and
    the trained ones, where a training row is two rows.
    """

    each: np.ndarray
    supervised: np.ndarray
    packing: Packing | None = None
    streamed: bool = False
    pixels: np.ndarray | None = None
    all_tokens: np.ndarray | None = None
    trained: np.ndarray | None = None

    @property
    def images(self) -> bool:
        """Return whether rows have images."""
        return self.pixels is not None

    @property
    def unpadded(self) -> np.ndarray:
        """Return the tokens that each row takes in a pack."""
        return self.each if self.all_tokens is None else self.all_tokens

    def most_pixels(self, size: int) -> int:
        """Return the most numbers of images in a micro-batch of `size` rows (packs)."""
        return int(np.sort(self.pixels)[-size:].sum()) if self.pixels is not None else 0

    def most_logits(self, size: int, tokens: int) -> int:
        """Return at how many of the tokens of the largest micro-batch of `size` rows (packs) logits are computed."""
        positions = int(np.sort(self.supervised)[-size:].sum())
        if self.streamed:
            # Rows that were not read may be as long as any, and are taken to be supervised as those that were.
            positions = math.ceil(tokens * self.supervised.sum() / self.unpadded.sum())
        return selected_positions(min(positions, tokens), tokens)

    def packed(self, packing: Packing | None) -> Self:
        """Return the same rows in packs; the rows themselves without packing."""
        if packing is None:
            return self
        each = packing.sums(self.each if self.trained is None else self.trained)
        pixels = None if self.pixels is None else packing.sums(self.pixels)
        supervised = packing.sums(self.supervised)
        return dataclasses.replace(self, each=each, supervised=supervised, pixels=pixels, packing=packing)

    def lengths(self) -> np.ndarray:
        """Return the tokens of each unit and of the filler, which has one, int (units + 1,)."""
        return np.append(self.each, 1)

    @property
    def units(self) -> int:
        """Number of units that the batch plan counts: packs, or rows."""
        return len(self.each)

    @property
    def unit(self) -> str:
        """The name of what the batch plan counts."""
        return "rows" if self.packing is None else "packs"

    @property
    def tokens(self) -> int:
        """Tokens of one epoch, without padding."""
        return int(self.each.sum())

    @property
    def mean(self) -> float:
        """Mean tokens of a row."""
        return self.tokens / self.units

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return int(self.each.max())


def in_order(lengths: np.ndarray, seed: int, epoch: int = 0) -> np.ndarray:
    """Return the lengths in the order of an epoch."""
    order = RowOrder(len(lengths), 1, seed)
    order.set_epoch(epoch)
    return lengths[list(order)]


def largest_micro_batch(rows: RowLengths, plan: BatchPlan, settings: Settings) -> int:
    """Return the most tokens of a micro-batch of the run, with padding.

    The longest units of a step share one (batch_plan.arrange). A unit of a stream that was not read may be as long as
    any.
    """
    if rows.streamed:
        return plan.per_device * settings.longest_example
    steps = plan.steps(rows.units, settings.num_train_epochs, settings.max_steps)
    largest, units_left = 0, steps * plan.global_batch
    for epoch in range(math.ceil(steps / plan.steps_per_epoch(rows.units))):
        lengths = in_order(rows.each, settings.seed, epoch)[:units_left]
        units_left -= plan.steps_per_epoch(rows.units) * plan.global_batch
        if rows.packing is None:
            # A second epoch has no other rows.
            return plan.per_device * int(lengths.max())
        filled = np.append(lengths, np.zeros(-len(lengths) % plan.global_batch, dtype=np.int64))
        by_step = np.sort(filled.reshape(-1, plan.global_batch))
        largest = max(largest, int(by_step[:, -plan.per_device :].sum(axis=1).max()))
    return largest
