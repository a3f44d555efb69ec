"""Recognise errors of a write to disk, give their reason, and flush written files to the disk."""

import contextlib
import errno
import os
import re
import shutil
from pathlib import Path

from unsloth_ddp.utils.errors import one_line

# Bytes; a disk with less free space is called full.
FULL_BELOW = 1 << 16
# How Rust's libraries (tokenizers, safetensors) end the message of a failed system call.
RUST_ERROR = re.compile(r"\(os error (\d+)\)")


def is_write_error(error: Exception) -> bool:
    """Return whether an exception may come from a write for which disk, memory or threads ran out."""
    import torch
    from safetensors import SafetensorError

    if isinstance(error, (torch.distributed.DistError, torch.OutOfMemoryError)):
        return False
    # tokenizers raises Exception itself.
    in_rust = type(error) is Exception and RUST_ERROR.search(str(error)) is not None
    return in_rust or isinstance(error, (OSError, RuntimeError, MemoryError, SafetensorError))


def write_problem(error: Exception, folder: Path) -> str:
    """Return why a write to `folder` failed, in a few words; torch.save raises its own error when a disk is full."""
    code = getattr(error, "errno", None)
    if code is None and (match := RUST_ERROR.search(str(error))):
        code = int(match[1])
    try:
        full = shutil.disk_usage(folder).free < FULL_BELOW
    except OSError:
        full = False
    if full or code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return f"no space is left on the disk of {folder}"
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "no host memory is left for it"
    if "can't start new thread" in str(error):
        return "the system starts no more threads (a limit on processes: ulimit -u, or pids of the container)"
    if code is not None:
        return f"{os.strerror(code)} ({getattr(error, 'filename', None) or folder})"
    if "inline_container" in str(error):
        return f"a file in {folder} could not be written to its end: a quota, a limit on file sizes, or a failing disk"
    return one_line(error)


def flush(folder: Path) -> None:
    """Flush every file and folder below `folder` to the disk, and make weight files as readable as other files."""
    for path in [*folder.rglob("*"), folder]:
        if path.suffix == ".safetensors":
            _apply_umask(path)
        flush_one(path)


def _apply_umask(path: Path) -> None:
    """Give a file the permissions of the umask: safetensors 0.8 writes files that only their owner can read."""
    umask = os.umask(0)
    os.umask(umask)
    # Some file systems have no modes.
    with contextlib.suppress(OSError):
        path.chmod(path.stat().st_mode | (0o666 & ~umask))


def flush_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
