"""Read the versions of Python and of the packages that affect the result of a run."""

import contextlib
import hashlib
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "unsloth", "unsloth_zoo")

KIT = Path(__file__).resolve().parents[1]


def kit_checksum() -> str:
    """Return the SHA-256 of the kit's Python files and configs."""
    files = [path for path in KIT.rglob("*.py") if "__pycache__" not in path.parts]
    files += [KIT.parent / "train_ddp.py", *(KIT.parent / "accelerate_configs").glob("*.yaml")]
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.is_file()):
        digest.update(str(path.relative_to(KIT.parent)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed, without importing them."""
    installed = {"python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed
