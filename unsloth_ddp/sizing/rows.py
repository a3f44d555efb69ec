"""The lengths of rows or packs that a step is chosen for, and the largest micro-batch of a run."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.chat.labels import selected_positions
from unsloth_ddp.data.order.batch_plan import BatchPlan, RowOrder
from unsloth_ddp.data.order.packing import Packing


@dataclass(frozen=True)
class RowLengths:
    """Tokens of each training row, or of each pack, and its supervised tokens; the Units of a plan.

    For `streamed` data these are its first rows, which stand for all. `pixels` are the numbers of the images of
    each (images/processing.py), if rows have some. `held` and `trained`: tokens without padding, all and the trained ones, where a
    training row is two rows.
    """

    each: np.ndarray
    supervised: np.ndarray
    packing: Packing | None = None
    streamed: bool = False
    pixels: np.ndarray | None = None
    held: np.ndarray | None = None
    trained: np.ndarray | None = None

    @property
    def images(self) -> bool:
        """Return whether rows have images."""
        return self.pixels is not None

    @property
    def unpadded(self) -> np.ndarray:
        """Return the tokens that each row takes in a pack."""
        return self.each if self.held is None else self.held

    def most_pixels(self, size: int) -> int:
        """Return the most numbers of images in a micro-batch of `size` rows (packs)."""
        return int(np.sort(self.pixels)[-size:].sum()) if self.pixels is not None else 0

    def most_logits(self, size: int, tokens: int) -> int:
        """Return at how many of the tokens of the largest micro-batch of `size` rows (packs) logits are computed."""
        most = int(np.sort(self.supervised)[-size:].sum())
        if self.streamed:
            # Rows that were not read may be as long as any, and are taken to be supervised as those that were.
            most = math.ceil(tokens * self.supervised.sum() / self.unpadded.sum())
        return selected_positions(min(most, tokens), tokens)

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

    The longest units of a step share one (batch_plan.arrange). A unit of a stream that was not read may be as long as any.
    """
    if rows.streamed:
        return plan.per_device * settings.longest_example
    steps = plan.steps(rows.units, settings.num_train_epochs, settings.max_steps)
    most, left = 0, steps * plan.global_batch
    for epoch in range(math.ceil(steps / plan.steps_per_epoch(rows.units))):
        seen = in_order(rows.each, settings.seed, epoch)[:left]
        left -= plan.steps_per_epoch(rows.units) * plan.global_batch
        if rows.packing is None:
            # A second epoch has no other rows.
            return plan.per_device * int(seen.max())
        filled = np.append(seen, np.zeros(-len(seen) % plan.global_batch, dtype=np.int64))
        by_step = np.sort(filled.reshape(-1, plan.global_batch))
        most = max(most, int(by_step[:, -plan.per_device :].sum(axis=1).max()))
    return most
