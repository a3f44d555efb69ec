"""Decide which run starts next, and where: one-GPU runs side by side, runs on several GPUs alone. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.speed.cells import Cell


@dataclass(frozen=True)
class Running:
    """Hold a run in progress and its expected end."""

    cell: Cell
    lanes: tuple[int, ...]
    ends: float


@dataclass(frozen=True)
class Start:
    """Name a run to start now, and its lanes."""

    cell: Cell
    lanes: tuple[int, ...]


def next_start(
    waiting: Sequence[Cell],
    running: Sequence[Running],
    lanes: int,
    now: float,
    deadline: float,
    expected: Callable[[Cell], float],
) -> Start | None:
    """Return the run to start now, or None to wait (or, with nothing running, to end).

    The first run in the queue has priority. While it waits for all lanes, a free lane takes a later one-GPU run that
    ends before the lane is needed. Nothing starts that cannot end by the deadline.
    """
    busy = {lane for run in running for lane in run.lanes}
    free = [lane for lane in range(lanes) if lane not in busy]
    can = [cell for cell in waiting if cell.processes <= lanes and now + expected(cell) <= deadline]
    if not can or not free:
        return None
    first = can[0]
    if first.processes <= len(free) and (first.processes == 1 or not busy):
        return Start(first, tuple(free[: first.processes]))
    needed = max(run.ends for run in running)
    for cell in can:
        if cell.processes == 1 and now + expected(cell) <= needed:
            return Start(cell, (free[0],))
    return None


def left_out(waiting: Sequence[Cell], lanes: int, expected: Callable[[Cell], float]) -> Mapping[str, str]:
    """Return why runs were not started, by name."""
    return {
        cell.name: f"needs {cell.processes} GPUs" if cell.processes > lanes else f"no time for {expected(cell):.0f} s"
        for cell in waiting
    }
