"""Wait for what other processes do, with an end to it, instead of sleeping for as long as it may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], bool], timeout: float, what: str) -> None:
    """Wait until `condition()` holds; a test that waits longer than `timeout` seconds fails, naming `what`."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"after {timeout} s still waiting for {what}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False
