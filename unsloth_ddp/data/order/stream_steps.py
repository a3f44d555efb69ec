"""Fill optimizer steps with streamed rows and send every rank its micro-batches.

Only the main process reads (see stream_windows.py). It joins the windows into steps, and before each step sends every
rank the rows of its micro-batches. So a source is read only once, and every rank gets the error of a bad row at the
same step. The content of a step depends only on the order of the rows (stream_order.py) and the global batch.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.arrow_rows import join_rows
from unsloth_ddp.data.images.processing import ImageProcessing
from unsloth_ddp.data.order.batch_plan import BatchPlan, arrange
from unsloth_ddp.data.order.packing import Packing, best_fit
from unsloth_ddp.data.order.stream_order import FIRST, StreamPosition
from unsloth_ddp.data.order.stream_windows import StreamedWindows, TokenizedWindow, Unit, read_ahead
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.units import counted

# The micro-batches of each process in one step.
Shares = list[list[list[Unit]]]


@dataclass
class StepFiller:
    """Turn windows into the units of each step, distributed over the processes.

    Args:
        capacity: maximum tokens of a pack; None if rows are not packed.
        keep_order: keep packs in the order of the rows instead of shuffling them.
        processing: knows the work of images, if rows have some.
    """

    plan: BatchPlan
    capacity: int | None
    keep_order: bool
    seed: int
    processing: ImageProcessing | None = None

    def units(self, window: TokenizedWindow) -> list[Unit]:
        """Return the rows of a window, or the packs made of them, in training order."""
        if self.capacity is None:
            return window.rows
        if not window.rows or window.problem is not None:
            # Skip the window: after the bad row is fixed, its packs would be different.
            return []
        lengths = np.array([len(row["input_ids"]) for row in window.rows])
        packing = best_fit(lengths, self.capacity)
        # Reorder, because best fit puts the longest rows into the first packs.
        if self.keep_order:
            order = np.argsort(packing.rows[packing.starts[:-1]])
        else:
            order = np.random.default_rng([self.seed, window.start.epoch, window.start.row]).permutation(len(packing))
        return [join_rows([window.rows[i] for i in packing.members(pack)]) for pack in order]

    def fill(self, windows: Iterable[TokenizedWindow], used: int = 0) -> Iterator[tuple[Shares, StreamPosition]]:
        """Yield the micro-batches of each process for each step, and the position at which the step ends.

        The first `used` units of the first window are skipped: they were trained before.

        Raises:
            UserError: a row that the next step needs is bad; the steps before it have been yielded.
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

    def _dealt(self, step: list[Unit]) -> Shares:
        plan, lengths = self.plan, np.array([len(unit["input_ids"]) for unit in step])
        beside = self.processing.work(np.array([np.sum(unit["pixels"]) for unit in step])) if self.processing else None
        order = arrange(np.arange(len(step)), lengths, plan, padded=self.capacity is None, beside=beside)
        slots = order.reshape(plan.accumulation, plan.processes, plan.per_device)
        return [[[step[i] for i in batch] for batch in slots[:, process]] for process in range(plan.processes)]


@dataclass(eq=False)
class StreamedSteps(IterableDataset[list[Unit] | None]):
    """Iterate over this rank's micro-batches of a whole run; every rank has to iterate at the same pace.

    Transformers skips the micro-batches of steps before a checkpoint, so None is yielded in their place.

    Args:
        windows: returns the windows from a position on; called in the main process only.
    """

    runtime: Runtime
    steps: StepFiller
    max_steps: int
    windows: Callable[[StreamPosition], Iterator[TokenizedWindow]]
    steps_done: int = field(default=0, init=False)
    position: StreamPosition = field(default=FIRST, init=False)
    _waited: float = field(default=0.0, init=False)

    def __len__(self) -> int:
        return self.max_steps * self.steps.plan.accumulation

    def go_on(self, step: int, position: dict[str, Any] | None) -> None:
        """Continue after `step` steps, the last of which ended at `position` (as returned by `saved`)."""
        self.steps_done, self.position = step, StreamPosition(**(position or {}))

    def saved(self) -> dict[str, Any]:
        """Return the position for a checkpoint; it is correct only in the main process."""
        return dataclasses.asdict(self.position)

    def waited(self) -> float:
        """Return the seconds that the main process waited for rows since the last call; 0 on other ranks."""
        seconds, self._waited = self._waited, 0.0
        return seconds

    def __iter__(self) -> Iterator[list[Unit] | None]:
        yield from itertools.repeat(None, self.steps_done * self.steps.plan.accumulation)
        windows = self._announced_windows()
        filled = self.steps.fill(windows, self.position.used) if self.runtime.ranks.is_main else iter(())
        for _ in range(self.steps_done, self.max_steps):
            yield from self.runtime.scatter_from_main(lambda: self._next(filled))

    def _announced_windows(self) -> Iterator[TokenizedWindow]:
        start = self.position
        if start.row:
            print(
                f"Epoch {start.epoch + 1} of the stream goes on after {counted(start.row, 'row')}, which are read "
                "again and skipped.",
                flush=True,
            )
        for window in self.windows(start):
            if window.ended is not None:
                print(f"The stream holds {counted(window.ended, 'row')}, and begins again after them.", flush=True)
            yield window

    def _next(self, filled: Iterator[tuple[Shares, StreamPosition]]) -> Shares:
        began = time.perf_counter()
        shares, self.position = next(filled)
        self._waited += time.perf_counter() - began
        return shares


def streamed_steps(
    settings: Settings,
    runtime: Runtime,
    plan: BatchPlan,
    packing: Packing | None,
    windows: StreamedWindows,
    processing: ImageProcessing | None = None,
) -> StreamedSteps:
    """Return the steps of a run with --streaming, filled from `windows`; `packing` is that of the first rows."""
    capacity = packing.capacity if packing else None
    return StreamedSteps(
        runtime,
        StepFiller(plan, capacity, settings.shuffle_buffer == 0, windows.seed, processing),
        settings.max_steps,
        lambda start: read_ahead(
            windows,
            dataclasses.replace(start, seen=None) if settings.resume_anyway else start,
            settings.dataset_num_proc or 1,
        ),
    )
