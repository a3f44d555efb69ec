"""Raise the panics of libraries in Rust as exceptions that callers catch."""

import contextlib
from collections.abc import Iterator

from unsloth_ddp.utils.errors import one_line


class Panic(ValueError):
    """A library in Rust panicked, mostly at a damaged file."""


@contextlib.contextmanager
def panics_raised() -> Iterator[None]:
    """Raise Panic for a panic within the block; PyO3 derives its exception from BaseException, which few callers catch."""
    try:
        yield
    except BaseException as error:
        # The class is of no module that can be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise Panic(f"a library in Rust panicked ({one_line(error)})") from None
