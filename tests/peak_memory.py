"""Measure how much memory of its own a process needs for a piece of work."""

from __future__ import annotations

import threading
from pathlib import Path


class PeakMemory:
    """Measure the bytes by which this process grew, without pages of files, which the system takes back when it needs them."""

    grown = 0

    def __enter__(self) -> PeakMemory:
        self._done = threading.Event()
        self._before = own_memory()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.grown = max(self.grown, own_memory() - self._before)


def own_memory() -> int:
    """Bytes of this process's memory that are not pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
