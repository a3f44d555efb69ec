"""Record how far this process is, for the watchdog."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass
class Progress:
    """How far this process is, written by the training thread for whoever watches it.

    `moves` grows with everything that shows life: a micro-batch, a step, a batch of evaluation.
    """

    step: int = 0
    moves: int = 0
    phase: Literal["preparing", "training", "evaluating", "saving", "finishing"] = "preparing"
    changed: Callable[[], None] = lambda: None

    def enter(self, phase: Literal["preparing", "training", "evaluating", "saving", "finishing"]) -> None:
        """Begin a phase; whoever watches is told at once, since what is a hang depends on it."""
        self.phase = phase
        self.moves += 1
        self.changed()

    @contextlib.contextmanager
    def doing(self, phase: Literal["evaluating", "saving"]) -> Iterator[None]:
        """A phase within another."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)
