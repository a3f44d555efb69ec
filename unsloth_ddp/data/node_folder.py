"""Share a folder between the ranks of a node for the time of a run."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import datasets

from unsloth_ddp.distributed.runtime import Runtime

DAY = 86400


@contextlib.contextmanager
def node_folder(runtime: Runtime) -> Iterator[Path]:
    """Create a folder that the ranks of each node share, and remove it at the end.

    If a run of several ranks fails, the folder is kept, since a rank may still be reading; a later run removes it.
    """

    def make() -> str:
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        cache.mkdir(parents=True, exist_ok=True)
        host = socket.gethostname()
        _remove_stale(cache.glob(f"unsloth_ddp-{host}-*-*"))
        return tempfile.mkdtemp(prefix=f"unsloth_ddp-{host}-{os.getpid()}-", dir=cache)

    folder = runtime.broadcast_from_node_main(make)
    failed = True
    try:
        yield Path(folder)
        runtime.barrier()
        failed = False
    finally:
        if runtime.ranks.is_local_main and (runtime.ranks.world_size == 1 or not failed):
            shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(folders: Iterable[Path]) -> None:
    """Remove the folders of killed or failed runs: those older than a day whose process no longer exists."""
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name.split("-")[-2])
            if time.time() - folder.stat().st_mtime > DAY and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(folder, ignore_errors=True)
