"""Run train_ddp.py with bounded memory and without root's rights, as a rank of tests/ranks.py."""

from __future__ import annotations

import ctypes
import resource
import subprocess
from pathlib import Path

from tests.ranks import train


def train_bounded(argv: list[str], cwd: str, memory: int, change: str) -> None:
    """train_ddp.py with so many bytes more; `change` is a shell command that changes its files after they were read."""
    from unsloth_ddp.data.chat import render_limits
    from unsloth_ddp.run import stages

    render_limits.SECONDS = 1.0
    # File modes bind a process without capabilities, as they bind every user but root.
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capset(header, none)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + memory, taken + memory))
    read = stages.read_examples

    def read_changed(run: object) -> None:
        subprocess.run(["bash", "-c", change], check=True, cwd=cwd)
        read(run)

    stages.read_examples = read_changed
    train(argv, cwd)
