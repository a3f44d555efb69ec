"""Training rows that are read, shuffled, tokenized and handed out while training goes on (--streaming).

Only the main process reads. Worker processes of its own read ahead and tokenize a window of rows at a time; it joins
them to steps, and before each step sends every rank the rows of its own micro-batches. So a file is read once,
whatever the number of ranks, all ranks train what one process read, and a bad row is told to all of them at once.

The order of the rows is a function of (sources, shuffle buffer, seed, epoch) alone, and what a step holds follows from
that order and the global batch. A checkpoint keeps where its step ended (`Position`); a run that goes on from it reads
the rows of that epoch once more up to there, and tokenizes none of them.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import util
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from unsloth_ddp.config.parse import Settings
from unsloth_ddp.data.batch_plan import BatchPlan, arrange
from unsloth_ddp.data.dataset import ROWS_AT_A_TIME, encode_row, join_rows
from unsloth_ddp.data.formats import to_example
from unsloth_ddp.data.packing import Packing, best_fit
from unsloth_ddp.data.sources import Row, read_rows, streamed_sources
from unsloth_ddp.data.tokenize import Encoder
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.signals import PR_SET_PDEATHSIG, SIGNALS
from unsloth_ddp.utils.errors import UserError

T = TypeVar("T")
# What a step counts and a micro-batch holds: a row or a pack, as the collator takes them.
Unit = dict[str, np.ndarray]

# Rows that are packed together: enough that the last, half empty pack of a window does not matter.
PACKED_WINDOW = 1000
WINDOWS_AHEAD = 2


@dataclass(frozen=True)
class Position:
    """Where a step ends: `used` units into the window that begins at row `row` of epoch `epoch`.

    `seen` is a checksum of the rows of that epoch before the window, in the order that they are trained in.
    """

    epoch: int = 0
    row: int = 0
    seen: int | None = None
    used: int = 0


class Placed(NamedTuple):
    """A row with its epoch, its number in it, and the checksum of the rows of that epoch before it."""

    epoch: int
    number: int
    seen: int
    row: Row


@dataclass(frozen=True)
class Window:
    """Rows that follow each other, tokenized, from `start` on; dropped rows are left out.

    `problem` is what is wrong with the row after them, if anything. `ended` is the number of rows of the first epoch,
    if it ends within this window.
    """

    start: Position
    rows: list[Unit]
    problem: str | None = None
    ended: int | None = None


FIRST = Position()


# ---- the order of the rows ----


def shuffled(rows: Iterable[T], size: int, seed: int, epoch: int) -> Iterator[T]:
    """The rows in a random order: each that comes takes the place of one drawn from `size` rows, which goes on.

    Once no more come, those that are left follow in random order. A `size` of 0 keeps the order.
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


def endless(read: Callable[[], Iterable[Row]], size: int, seed: int, start: Position = FIRST) -> Iterator[Placed]:
    """The rows of one epoch after the other, from the first row of the window at `start` on.

    Raises:
        UserError: there is nothing to read, or the rows before `start` are not those that its checksum is of.
    """
    for epoch in itertools.count(start.epoch):
        skipped = start.row if epoch == start.epoch else 0
        number, checksum = -1, xxhash.xxh3_64()
        for number, row in enumerate(shuffled(read(), size, seed, epoch)):
            seen = checksum.intdigest()
            checksum.update(repr(row.columns).encode(errors="surrogatepass"))
            if number == skipped:
                _check_skipped(start, skipped, seen)
            if number >= skipped:
                yield Placed(epoch, number, seen, row)
        if number < skipped:
            _check_skipped(start, skipped, None)
        if number < 0:
            raise UserError("the streamed rows have come to an end: a pass over the sources found none; check them.")


def _check_skipped(start: Position, skipped: int, seen: int | None) -> None:
    if skipped and start.seen is not None and seen != start.seen:
        raise UserError(
            f"the first {skipped:,} streamed rows are not those that were trained before the checkpoint; bring the old "
            "sources back, begin anew with another --run_name, or give --resume_anyway."
        )


# ---- reading and tokenizing, in worker processes of the main process ----


class Windows(IterableDataset[Window]):
    """Windows of `size` rows, without end; each of several workers reads all rows and tokenizes its share of windows."""

    def __init__(
        self,
        read: Callable[[], Iterable[Row]],
        encode: Callable[[Row], dict[str, Any]],
        *,
        size: int,
        buffer: int,
        seed: int,
        drop: bool,
        start: Position = FIRST,
    ) -> None:
        """`encode` gives `input_ids`, `labels` and whether a row is `overlong`; `drop` leaves out those that are."""
        self.read = read
        self.encode = encode
        self.size = size
        self.buffer = buffer
        self.seed = seed
        self.drop = drop
        self.start = start

    def __iter__(self) -> Iterator[Window]:
        worker = get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        rows = endless(self.read, self.buffer, self.seed, self.start)
        before = (self.start.epoch, self.start.row)
        for number in itertools.count():
            taken, problem = _take(rows, self.size)
            start = Position(*taken[0][:3]) if taken else self.start
            places = [before, *((placed.epoch, placed.number) for placed in taken)]
            before = places[-1]
            if number % workers == turn:
                window = Window(start, [], problem, _end_of_first_epoch(places))
                yield self._tokenized(window, [placed.row for placed in taken])
            if problem is not None:
                return

    def _tokenized(self, window: Window, rows: list[Row]) -> Window:
        for row in rows:
            try:
                encoded = self.encode(row)
            except UserError as error:
                return dataclasses.replace(window, problem=f"{row.place}: {error}")
            if not (self.drop and encoded["overlong"]):
                window.rows.append({name: np.array(encoded[name], dtype=np.int32) for name in ("input_ids", "labels")})
        return window


def _take(rows: Iterator[T], count: int) -> tuple[list[T], str | None]:
    """The next rows, and what is wrong with the one after them, if something is."""
    taken: list[T] = []
    try:
        for row in itertools.islice(rows, count):
            taken.append(row)
    except UserError as error:
        return taken, str(error)
    return taken, None


def _end_of_first_epoch(places: Sequence[tuple[int, int]]) -> int | None:
    for (epoch, number), (next_epoch, _) in itertools.pairwise(places):
        if epoch == 0 and next_epoch == 1:
            return number + 1
    return None


def _stay_with_parent(closing: Any, worker: int) -> None:
    """Let a worker live as long as the main process wants it, and no longer.

    Launchers and schedulers signal all processes of a job, and what the main process then saves at the end of its step
    may take more rows. When it dies in whatever way the worker is killed, since it holds copies of its connections.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in SIGNALS:
        signal.signal(number, lambda *_: os._exit(0) if closing.value else None)


def _as_it_is(item: T) -> T:
    return item


# ---- steps ----


@dataclass
class Steps:
    """Windows -> the units of each step, dealt to the processes.

    Args:
        capacity: most tokens of a pack; None where rows are not packed.
    """

    plan: BatchPlan
    capacity: int | None
    keep_order: bool
    seed: int

    def units(self, window: Window) -> list[Unit]:
        """The rows of a window, or the packs that they make, in the order that they are trained in."""
        if self.capacity is None:
            return window.rows
        if not window.rows or window.problem is not None:
            # Once the bad row is mended, others would share the packs.
            return []
        lengths = np.array([len(row["input_ids"]) for row in window.rows])
        packing = best_fit(lengths, self.capacity)
        # Best fit puts the longest rows into the first packs.
        if self.keep_order:
            order = np.argsort(packing.rows[packing.starts[:-1]])
        else:
            order = np.random.default_rng([self.seed, window.start.epoch, window.start.row]).permutation(len(packing))
        packs = [[window.rows[i] for i in packing.members(pack)] for pack in order]
        return [join_rows([row["input_ids"] for row in pack], [row["labels"] for row in pack]) for pack in packs]

    def fill(self, windows: Iterable[Window], used: int = 0) -> Iterator[tuple[list[list[list[Unit]]], Position]]:
        """What each process trains in each step, a list of micro-batches, and where the step ends.

        The first `used` units of the first window were trained before.

        Raises:
            UserError: a row that the next step needs is bad; the steps before it have been given.
        """
        step: list[Unit] = []
        for window in windows:
            for number, unit in enumerate(self.units(window), 1):
                if number <= used:
                    continue
                step.append(unit)
                if len(step) == self.plan.global_batch:
                    yield self._dealt(step), dataclasses.replace(window.start, used=number)
                    step = []
            used = 0
            if window.problem is not None:
                raise UserError(window.problem)

    def _dealt(self, step: list[Unit]) -> list[list[list[Unit]]]:
        plan, lengths = self.plan, np.array([len(unit["input_ids"]) for unit in step])
        order = arrange(np.arange(len(step)), lengths, plan, padded=self.capacity is None)
        slots = order.reshape(plan.accumulation, plan.processes, plan.per_device)
        return [[[step[i] for i in batch] for batch in slots[:, process]] for process in range(plan.processes)]


class StreamedSteps(IterableDataset[list[Unit] | None]):
    """This rank's micro-batches of a whole run, step by step; every rank iterates over it alike.

    Transformers skips the micro-batches of steps that were trained before a checkpoint; in their place stands None.
    """

    def __init__(
        self,
        runtime: Runtime,
        steps: Steps,
        max_steps: int,
        windows: Callable[[Position], Iterator[Window]],
    ) -> None:
        """`windows` gives the windows from a position on; it is called in the main process only."""
        self.runtime = runtime
        self.steps = steps
        self.max_steps = max_steps
        self.windows = windows
        self.done = 0
        self.position = Position()
        self._waited = 0.0

    def __len__(self) -> int:
        return self.max_steps * self.steps.plan.accumulation

    def go_on(self, step: int, position: dict[str, Any] | None) -> None:
        """Begin after `step` steps, the last of which ended at `position` (as `saved` it)."""
        self.done, self.position = step, Position(**(position or {}))

    def saved(self) -> dict[str, Any]:
        """The position, in the main process, as a checkpoint keeps it."""
        return dataclasses.asdict(self.position)

    def waited(self) -> float:
        """Seconds that the main process waited for rows since the last call; 0 elsewhere."""
        seconds, self._waited = self._waited, 0.0
        return seconds

    def __iter__(self) -> Iterator[list[Unit] | None]:
        yield from itertools.repeat(None, self.done * self.steps.plan.accumulation)
        filled = self._filled() if self.runtime.ranks.is_main else iter(())
        for _ in range(self.done, self.max_steps):
            yield from self.runtime.scatter_from_main(lambda: self._next(filled))

    def _filled(self) -> Iterator[tuple[list[list[list[Unit]]], Position]]:
        return self.steps.fill(self._announced_windows(), self.position.used)

    def _announced_windows(self) -> Iterator[Window]:
        start = self.position
        if start.row:
            print(
                f"The first {start.row:,} rows of epoch {start.epoch + 1} of the stream were trained before the checkpoint: "
                "they are read again and skipped.",
                flush=True,
            )
        for window in self.windows(start):
            if window.ended is not None:
                print(f"The stream holds {window.ended:,} rows; its second epoch begins.", flush=True)
            yield window

    def _next(self, filled: Iterator[tuple[list[list[list[Unit]]], Position]]) -> list[list[list[Unit]]]:
        began = time.perf_counter()
        shares, self.position = next(filled)
        self._waited += time.perf_counter() - began
        return shares


def streamed_steps(
    settings: Settings, runtime: Runtime, plan: BatchPlan, packing: Packing | None, windows: Windows
) -> StreamedSteps:
    """The steps of a run with --streaming, filled from its `windows`; `packing` is that of the stream's first rows."""
    capacity = packing.capacity if packing else None
    return StreamedSteps(
        runtime,
        Steps(plan, capacity, settings.shuffle_buffer == 0, windows.seed),
        settings.max_steps,
        lambda start: read_ahead(
            windows,
            dataclasses.replace(start, seen=None) if settings.resume_anyway else start,
            settings.dataset_num_proc,
        ),
    )


def windows_of(settings: Settings, packing: Packing | None, tokenizer: Any, seed: int) -> Windows:
    """The windows of a run, from its first row on; to be made while the tokenizer is as it was for the first rows."""
    encoder = Encoder(tokenizer, supervise_all=settings.loss_on == "all")

    def read() -> Iterator[Row]:
        for source in streamed_sources(settings.dataset):
            yield from read_rows(source, settings.dataset_split, settings.dataset_config, streaming=True)

    def encode(row: Row) -> dict[str, Any]:
        return encode_row(encoder, to_example(row.columns), settings.max_length)

    return Windows(
        read,
        encode,
        size=ROWS_AT_A_TIME if packing is None else PACKED_WINDOW,
        buffer=settings.shuffle_buffer,
        seed=seed,
        drop=settings.overlong == "drop",
    )


def read_ahead(windows: Windows, start: Position, workers: int) -> Iterator[Window]:
    """The windows from `start` on, made by processes that are some windows ahead."""
    windows.start = start
    # Not spawned: what is loaded already would be loaded again.
    context = multiprocessing.get_context("fork")
    closing = context.RawValue(ctypes.c_bool, False)
    loader = DataLoader(
        windows,
        batch_size=None,
        num_workers=workers,
        prefetch_factor=WINDOWS_AHEAD,
        collate_fn=_as_it_is,
        worker_init_fn=functools.partial(_stay_with_parent, closing),
        multiprocessing_context=context,
        # The workers' seeds would be drawn from the generator that dropout draws from.
        generator=torch.Generator(),
    )
    found = iter(loader)

    def close() -> None:
        closing.value = True

    # Both before the clean-up that waits for workers: torch's, registered earlier, and that of multiprocessing.
    atexit.register(close)
    util.Finalize(None, close, exitpriority=100)
    try:
        yield from found
    finally:
        close()
        atexit.unregister(close)
