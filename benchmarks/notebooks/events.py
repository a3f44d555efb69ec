"""The list of what a run did: one dictionary an event, in order, with the line of the program that caused it.

Standard library only, like every module that the child process imports.
"""

import sys
from collections.abc import Callable
from typing import Any

LIMIT = 5000  # a runaway loop must not fill the disk; the count goes on in `dropped`


class Recorder:
    """Collects events; `programs` are the file names that count as the program's own code."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.programs: set[str] = set()
        self.phase = ""  # "in_train" while a trainer's train() calls back into the program
        self.captured = 0  # depth of %%capture: what is printed there never reaches the reader
        self.dropped = 0
        self.waits = 0  # how many collectives this rank has been through
        self.on_wait: list[Callable[[int], None]] = []  # called after each with their number

    def where(self, frame: Any = None) -> str:
        """`file:line` of the innermost frame that belongs to the program, or ""."""
        frame = frame or sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename in self.programs:
                return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def add(self, kind: str, name: str, **detail: Any) -> None:
        """Record one event of a kind (save, print, collective, ...) under a name."""
        if kind == "collective":
            self.waits += 1
            for call in self.on_wait:
                call(self.waits)
        if len(self.events) >= LIMIT:
            self.dropped += 1
            return
        event = {"kind": kind, "name": name, "at": self.where(sys._getframe(1))}
        if self.phase:
            event["phase"] = self.phase
        event.update(detail)
        self.events.append(event)


RECORDER = Recorder()
