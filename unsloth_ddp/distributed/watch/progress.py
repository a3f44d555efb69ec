"""Record the phase, the step and the progress of this process, for the watchdog."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

Phase = Literal["preparing", "training", "evaluating", "saving", "finishing"]


class Progress:
    """The progress of this process: written by the training thread, read by the watchdog thread.

    `count` grows with every event that proves progress: a micro-batch, a step, a batch of evaluation, a new phase.
    """

    def __init__(self) -> None:
        self.step = 0
        self.count = 0
        self.phase: Phase = "preparing"
        self._notify: Callable[[], None] | None = None

    def on_phase_change(self, notify: Callable[[], None] | None) -> None:
        """Have `notify` called whenever a phase begins, because what counts as a hang depends on it. None: nothing."""
        self._notify = notify

    def begin_step(self, step: int) -> None:
        """Record that step number `step` begins; the first one ends the preparation."""
        self.step = step
        if self.phase == "preparing":
            self.enter("training")

    def advance(self) -> None:
        """Record one event that proves progress."""
        self.count += 1

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        self.phase = phase
        self.advance()
        if self._notify is not None:
            self._notify()

    @contextlib.contextmanager
    def doing(self, phase: Literal["evaluating", "saving"]) -> Iterator[None]:
        """Enter a phase, and return to the one before at the end of the block."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)
