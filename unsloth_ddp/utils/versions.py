"""Read the versions of Python and of the packages that affect the result of a run."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Sequence
from importlib import metadata

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "unsloth", "unsloth_zoo")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed, without importing them."""
    found = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
