"""Versions of Python and of the packages that decide what a run computes."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Sequence
from importlib import metadata

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "unsloth", "unsloth_zoo")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Of Python, and of those packages that are installed; nothing is imported."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
