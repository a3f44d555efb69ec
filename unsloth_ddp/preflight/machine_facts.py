"""Read this machine's clock, GPUs and driver; works with torch 2.11 to 2.14."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

from unsloth_ddp.preflight.time_limit import run_with_limit
from unsloth_ddp.utils.errors import one_line

GPU_SECONDS = 60
SMI_SECONDS = 20


def read_clock_error() -> float | None:
    """Return the kernel's bound on its clock's error in seconds (adjtimex(2), no rights needed); None if not available."""
    buffer = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "adjtimex") or libc.adjtimex(buffer) < 0 or sys.maxsize < 2**32:
        return None
    # struct timex on 64 bit: int modes, padding, then longs: offset, freq, maxerror (microseconds).
    return ctypes.c_long.from_buffer(buffer, 24).value / 1e6


def read_gpus(cpu: bool) -> tuple[list[dict[str, Any]], str]:
    """Return what query_gpus returns, with a time limit for a stuck driver; nothing for a run on the CPU."""
    if cpu:
        return [], ""
    try:
        return run_with_limit(query_gpus, GPU_SECONDS)
    except Exception as error:
        return [], f"{type(error).__name__}: {one_line(error)}"


def query_gpus() -> tuple[list[dict[str, Any]], str]:
    """Return name, memory, capability and uuid of the GPUs that torch sees, and its reason for seeing none."""
    import torch

    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except Exception as error:
            return [], one_line(error)
        return [], ""
    devices = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": found.name,
                "memory": found.total_memory,
                "capability": f"{found.major}.{found.minor}",
                "uuid": str(getattr(found, "uuid", "")),
            }
        )
    return devices, ""


def read_driver_version() -> str | None:
    """Return the driver's version from nvidia-smi; None where that fails."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split()[0] if done.stdout.split() else None


def read_driver_cuda() -> int | None:
    """Return the newest CUDA version that the driver supports, 12080 for 12.8; None without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else version.value
