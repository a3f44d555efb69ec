"""Share fixtures among the tests of preflight."""

from __future__ import annotations

import threading

import pytest


@pytest.fixture
def stuck():
    """Something that hangs until the test is over."""
    over = threading.Event()
    yield lambda: over.wait(60)
    over.set()
