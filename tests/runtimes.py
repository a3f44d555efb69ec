"""The runtime of a plain process on the CPU, for tests that start no ranks."""

from __future__ import annotations

from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime


def cpu_runtime() -> Runtime:
    """A runtime of one process in fp32, with transformers."""
    return Runtime(Ranks(), "transformers", "cpu", "fp32", "CPU")
