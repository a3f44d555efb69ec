"""Run work that may hang, or that training must not wait for, in a thread that does not keep the process alive."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Begin `work` in a daemon thread, which an executor's are not, and return its result to come."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
