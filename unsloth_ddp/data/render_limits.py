"""Stop a chat template that never ends, or that makes more text than a machine can hold.

A template comes with a model, and Jinja's sandbox keeps it from files and Python, but not from nested loops.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unsloth_ddp.utils.units import GIB

# For one row, which takes milliseconds and megabytes otherwise.
SECONDS = 30.0
MEMORY_BYTES = 4 * GIB
CHARACTERS = 100_000_000


class TemplateOverrun(BaseException):
    """A template went beyond a limit; no Exception, so that nobody takes it for a row that can be rendered otherwise."""


def overrun_sentence(error: TemplateOverrun) -> str:
    """Return what to tell the user."""
    return (
        f"the chat template cannot render a row ({error}); look at the template, or give another with --chat_template."
    )


@contextlib.contextmanager
def limited_rendering() -> Iterator[None]:
    """Limit the time and the additional memory of what runs inside.

    The time is limited in main threads only, where Python runs handlers of signals; the memory on Linux only.

    Raises:
        TemplateOverrun: a limit was reached; the message is a part of a sentence.
    """
    try:
        with _limited_memory(), _limited_time():
            yield
    except MemoryError:
        raise TemplateOverrun(f"it needs more than {MEMORY_BYTES // GIB} GiB of memory") from None


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise TemplateOverrun(f"it does not end within {SECONDS:.0f} s")

    began, handler = time.monotonic(), signal.signal(signal.SIGALRM, stop)
    # Somebody else's timer goes on afterwards with what is left of it.
    before, interval = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if before:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, before - (time.monotonic() - began)), interval)


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = _address_space() + MEMORY_BYTES
    if soft != resource.RLIM_INFINITY and soft <= wanted:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def check_length(text: str) -> str:
    """Return a rendered text.

    Raises:
        TemplateOverrun: it is too long to be tokenized.
    """
    if len(text) > CHARACTERS:
        raise TemplateOverrun(f"it makes {len(text):,} characters of it")
    return text


def _address_space() -> int:
    """Return the bytes of address space that this process has; what a GPU's driver reserves is counted too."""
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
