"""Stop a chat template that never ends, or that renders more text than fits in memory.

A template comes with a model. Jinja's sandbox denies it files and Python, but does not limit nested loops.
"""

import contextlib
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2.exceptions import SecurityError

from unsloth_ddp.utils.units import GIB

# Limits for one row, which normally takes milliseconds and megabytes.
SECONDS = 30.0
MEMORY_BYTES = 4 * GIB
CHARACTERS = 100_000_000


class TemplateOverrun(BaseException):
    """A template exceeded a limit; not an Exception, so that no handler tries to render the row in another way."""


def overrun_sentence(error: TemplateOverrun) -> str:
    """Return the message for the user."""
    return f"the chat template cannot render a row ({error}); fix the template, or give another with --chat_template."


def failure_sentence(error: Exception) -> str:
    """Return the message for a template that fails with a row."""
    cause = " ".join(str(error).split())
    if isinstance(error, SecurityError):
        return (
            f"the chat template does what Jinja's sandbox refuses, in which Transformers renders it ({cause}), so no "
            "tool of Transformers renders the row; give a template that only reads the messages with --chat_template, "
            "or change the row."
        )
    fix = "change the row, or give another template with --chat_template"
    return f"the chat template cannot render the row ({cause}); {fix}."


@contextlib.contextmanager
def limited_rendering() -> Iterator[None]:
    """Limit the time and the additional memory of the block.

    Time is limited only in main threads, where Python runs signal handlers; memory only on Linux.

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
    # A timer that was set before continues afterwards with its remaining time.
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, remaining - (time.monotonic() - began)), interval)


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space() + MEMORY_BYTES
    if soft != resource.RLIM_INFINITY and soft <= limit:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
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
        raise TemplateOverrun(f"it renders {len(text):,} characters")
    return text


def _address_space() -> int:
    """Return the bytes of this process's address space, including what a GPU's driver reserves."""
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
