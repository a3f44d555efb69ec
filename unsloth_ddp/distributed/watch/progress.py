"""Record the phase, the step and the progress of this process, for the watchdog."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal

import psutil

Phase = Literal["preparing", "training", "evaluating", "saving", "finishing"]


class Progress:
    """The progress of this process: written by the training thread, read by the watchdog thread.

    `count` grows with every event that proves progress: a micro-batch, a step, a batch of evaluation, a new phase.
    `seconds` holds how long each part of the preparation took, in order, and `first_step`, which ends it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.step = 0
        self.count = 0
        self.phase: Phase = "preparing"
        # Called whenever a phase begins, because what counts as a hang depends on it.
        self.notify: Callable[[], None] | None = None
        self._training_began = time.perf_counter()

    def begin_step(self, step: int) -> None:
        """Record that step number `step` begins; the first one ends the preparation."""
        self.step = step
        if self.phase == "preparing":
            self._training_began = time.perf_counter()
            self.enter("training")

    def advance(self) -> None:
        self.count += 1

    def end_step(self) -> None:
        """Record that a step ends; the first one of this process ends the time to the first step."""
        self.advance()
        if "to_first_step" not in self.seconds:
            self.seconds["to_first_step"] = seconds_since_start()
            self.seconds["first_step"] = time.perf_counter() - self._training_began

    @contextlib.contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Measure the seconds of a part of the preparation."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - began

    def enter(self, phase: Phase) -> None:
        self.phase = phase
        self.advance()
        if self.notify is not None:
            self.notify()

    @contextlib.contextmanager
    def doing(self, phase: Literal["evaluating", "saving"]) -> Iterator[None]:
        """Enter a phase, and return to the one before at the end of the block."""
        outer = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(outer)


def seconds_since_start() -> float:
    """Return the seconds since this process was started, the import of torch among them."""
    return time.time() - psutil.Process().create_time()
