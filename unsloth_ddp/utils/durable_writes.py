"""Writes that may fail: which exceptions say so and why, and bringing what was written to the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path


def is_write_error(error: Exception) -> bool:
    """Whether an exception may come from a disk; torch and safetensors raise kinds of their own."""
    import torch
    from safetensors import SafetensorError

    if isinstance(error, (torch.distributed.DistError, torch.OutOfMemoryError)):
        return False
    return isinstance(error, (OSError, RuntimeError, SafetensorError))


def reason(error: Exception, folder: Path) -> str:
    """Why a write failed, in a few words; torch.save hides a full disk behind its own."""
    code = getattr(error, "errno", None)
    try:
        full = shutil.disk_usage(folder).free < 1 << 16
    except OSError:
        full = False
    if full or code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return f"no space is left on the disk of {folder}"
    if code is not None:
        return f"{os.strerror(code)} ({getattr(error, 'filename', None) or folder})"
    text = " ".join(str(error).split())[:300]
    if "inline_container" in text:
        return f"a file in {folder} could not be written to its end: a quota, a limit on file sizes, or a failing disk"
    return text


def flush(folder: Path) -> None:
    """Bring every file and folder below `folder` to the disk, weights as readable as other files are."""
    for path in [*folder.rglob("*"), folder]:
        if path.suffix == ".safetensors":
            _share(path)
        flush_one(path)


def _share(path: Path) -> None:
    """safetensors (0.8) leaves files that nobody but their owner can read, whatever the umask is."""
    umask = os.umask(0)
    os.umask(umask)
    # Some file systems have no modes.
    with contextlib.suppress(OSError):
        path.chmod(path.stat().st_mode | (0o666 & ~umask))


def flush_one(path: Path) -> None:
    """fsync one file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
