"""Run work that may hang (a dead file system, a stuck driver, a collective) with a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def run_with_limit(work: Callable[[], T], seconds: float) -> T:
    """Return the result of `work`, run in a thread of its own.

    Raises:
        TimeoutError: `work` did not end in time. Its thread is abandoned and does not keep the process alive.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return results[0]


def run_or_none(work: Callable[[], T], seconds: float) -> T | None:
    """Return the result of `work`, or None after the limit, as on a network file system whose server is gone."""
    try:
        return run_with_limit(work, seconds)
    except TimeoutError:
        return None
