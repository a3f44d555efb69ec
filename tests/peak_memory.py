"""Measure how much memory of its own a process needs for a piece of work."""

from __future__ import annotations

import resource
import threading
from pathlib import Path


class PeakMemory:
    """Measure the bytes by which this process grew.

    Args:
        files: count pages of files too, which the system takes back when it needs them.
    """

    def __init__(self, *, files: bool = False) -> None:
        self.grown = 0
        self._kinds = ("RssAnon:", "RssFile:") if files else ("RssAnon:",)
        self._done = threading.Event()

    def __enter__(self) -> PeakMemory:
        self._before = self._held()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._look()

    def _look(self) -> None:
        self.grown = max(self.grown, self._held() - self._before)

    def _held(self) -> int:
        lines = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
        return sum(int(line[1]) * 1024 for line in lines if line and line[0] in self._kinds)


def most_memory() -> int:
    """Most memory that this process ever held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
