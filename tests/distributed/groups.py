"""Ranks as threads of one process, for code that only needs a gather."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Group:
    """Ranks as threads, each of which sees what all gave."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.given: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def gather_of(self, rank: int) -> Callable[[Any], list[Any]]:
        """Return the gather of one rank."""

        def gather(value: Any) -> list[Any]:
            self.given[rank] = value
            self.barrier.wait()
            found = list(self.given)
            self.barrier.wait()
            return found

        return gather
