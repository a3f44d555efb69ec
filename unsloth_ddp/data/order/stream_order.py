"""Order the rows of a stream by a seeded shuffle buffer, epoch by epoch.

The order is a function of (sources, shuffle buffer, seed, epoch) alone. A checkpoint stores the position at which its
step ended (`StreamPosition`); a resumed run reads the rows of that epoch again up to it, without tokenizing them.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import xxhash

from unsloth_ddp.data.sources.rows import SourceRow
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.units import counted

T = TypeVar("T")


@dataclass(frozen=True)
class StreamPosition:
    """The end of a step: `used` units into the window that begins at row `row` of epoch `epoch`.

    `seen` is a checksum of the rows of that epoch before the window, in training order.
    """

    epoch: int = 0
    row: int = 0
    seen: int | None = None
    used: int = 0


FIRST = StreamPosition()


class StreamRow(NamedTuple):
    """A row with its epoch, its number in the epoch, and the checksum of the rows of the epoch before it."""

    epoch: int
    number: int
    checksum: int
    row: SourceRow


def shuffled(rows: Iterable[T], size: int, seed: int, epoch: int) -> Iterator[T]:
    """Yield the rows in a random order, through a buffer of `size` rows.

    Each new row replaces a row drawn at random from the buffer, which is yielded. At the end of the rows, the rest of
    the buffer follows in random order. A `size` of 0 keeps the order.
    """
    if size == 0:
        yield from rows
        return
    random = np.random.default_rng([seed, epoch])
    buffer: list[T] = []
    for row in rows:
        if len(buffer) < size:
            buffer.append(row)
        else:
            drawn = random.integers(size)
            yield buffer[drawn]
            buffer[drawn] = row
    for drawn in random.permutation(len(buffer)).tolist():
        yield buffer[drawn]


def stream_rows(
    read: Callable[[], Iterable[SourceRow]], size: int, seed: int, start: StreamPosition = FIRST
) -> Iterator[StreamRow]:
    """Yield the rows of one epoch after the other, from the first row of the window at `start` on.

    Raises:
        UserError: the sources have no rows, or the checksum of the rows before `start` differs from the one in `start`.
    """
    for epoch in itertools.count(start.epoch):
        skipped = start.row if epoch == start.epoch else 0
        number, checksum = -1, xxhash.xxh3_64()
        for number, row in enumerate(shuffled(read(), size, seed, epoch)):
            checksum_before = checksum.intdigest()
            checksum.update(repr(row.columns).encode(errors="surrogatepass"))
            if number == skipped:
                _check_skipped(start, skipped, checksum_before)
            if number >= skipped:
                yield StreamRow(epoch, number, checksum_before, row)
        if number < skipped:
            _check_skipped(start, skipped, None)
        if number < 0:
            raise UserError("the stream has ended: a pass over the sources found no rows; check the sources.")


def _check_skipped(start: StreamPosition, skipped: int, skipped_checksum: int | None) -> None:
    if skipped and start.seen is not None and skipped_checksum != start.seen:
        raise UserError(
            f"the stream no longer begins with the {counted(skipped, 'row')} trained before the checkpoint; restore "
            "the old sources, start a new run with another --run_name, or give --resume_anyway."
        )
