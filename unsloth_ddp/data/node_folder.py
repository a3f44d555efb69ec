"""Share a folder between the ranks of a node during a run."""

import contextlib
import errno
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import datasets

from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import UserError, os_reason

DAY = 86400
ANOTHER_CACHE = "set HF_HOME (or HF_DATASETS_CACHE) to a folder on another disk"


@contextlib.contextmanager
def node_folder(runtime: Runtime) -> Iterator[Path]:
    """Create a folder that the ranks of each node share, and remove it at the end.

    If a run of several ranks fails, the folder is kept, because a rank may still be reading; a later run removes it.
    After a UserError it is removed, because every rank raises it and none is reading.

    Raises:
        UserError: the folder cannot be created.
    """

    def make() -> str:
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        host = socket.gethostname()
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _remove_stale(cache.glob(f"unsloth_ddp-{host}-*-*"))
            return tempfile.mkdtemp(prefix=f"unsloth_ddp-{host}-{os.getpid()}-", dir=cache)
        except OSError as error:
            raise UserError(f"{cache} cannot be written: {os_reason(error)}; {ANOTHER_CACHE}.") from None

    folder = runtime.broadcast_from_node_main(make)
    failed = True
    try:
        yield Path(folder)
        runtime.barrier()
        failed = False
    except UserError:
        failed = False
        raise
    finally:
        if runtime.ranks.is_local_main and (runtime.ranks.world_size == 1 or not failed):
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def room_for_rows(folder: Path) -> Iterator[None]:
    """Turn the error of a full disk into a UserError while rows are written to `folder`.

    Raises:
        UserError: the disk is full; names the folder and how to choose another.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"The rows do not fit on the disk of {folder.parent}; free space, or {ANOTHER_CACHE}."
        ) from None


def _remove_stale(folders: Iterable[Path]) -> None:
    """Remove the folders of killed or failed runs: those older than a day whose process no longer exists."""
    for folder in folders:
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name.split("-")[-2])
            if time.time() - folder.stat().st_mtime > DAY and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(folder, ignore_errors=True)
