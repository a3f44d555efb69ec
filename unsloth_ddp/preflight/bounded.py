"""Work that may hang (a dead file system, a stuck driver, a collective), with an end to the wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def unless_stuck(work: Callable[[], T], seconds: float) -> T | None:
    """The result of `work`; None where it does not end in time, as on a network file system whose server is gone."""
    try:
        return bounded(work, seconds)
    except TimeoutError:
        return None


def bounded(work: Callable[[], T], seconds: float) -> T:
    """The result of `work`, done in a thread of its own.

    Raises:
        TimeoutError: it did not end in time; the thread is left behind and does not keep the process alive.
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
