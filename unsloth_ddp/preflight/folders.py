"""Find and probe the folders and files that a run reads and writes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources import is_file
from unsloth_ddp.model.files import model_folder, weight_bytes
from unsloth_ddp.preflight.machine import Folder


class NodeFolders:
    """Probes the folders of a run: creates missing ones and removes them at the end if they are still empty."""

    def __init__(self) -> None:
        self.made: list[Path] = []

    def probe(self, path: Path) -> Folder:
        """Write and remove a file in a folder; retry, since another node may remove an empty shared folder meanwhile."""
        error: OSError | None = None
        for _ in range(3):
            try:
                self._make(path)
                with tempfile.NamedTemporaryFile(dir=path, prefix=".preflight-") as file:
                    file.write(b"x" * 4096)
                    file.flush()
                    os.fsync(file.fileno())
                return Folder(str(path), free=shutil.disk_usage(path).free)
            except OSError as problem:
                error = problem
                if not isinstance(problem, FileNotFoundError):
                    break
        assert error is not None
        return Folder(str(path), error=error.strerror or str(error))

    def _make(self, path: Path) -> None:
        missing = [p for p in (path, *path.parents) if not p.exists()]
        path.mkdir(parents=True, exist_ok=True)
        self.made += missing

    def remove(self) -> None:
        """Remove the folders that `probe` created, except those that are no longer empty."""
        for path in self.made:
            with contextlib.suppress(OSError):
                path.rmdir()
        self.made.clear()


def output_folder(settings: Settings) -> Path:
    """Return the folder of all runs."""
    return Path(settings.output_dir).expanduser().resolve()


def find_datasets_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of the datasets cache, by the library's own rule but without importing it, which takes seconds."""
    if environ.get("HF_DATASETS_CACHE"):
        return Path(environ["HF_DATASETS_CACHE"]).expanduser()
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "datasets"


def read_data_sizes(settings: Settings) -> list[int]:
    """Return the bytes of every local data file whose tokens are cached; those of streamed rows are not."""
    sources = [*([] if settings.streaming else settings.dataset), *settings.eval_dataset]
    paths = [Path(source).expanduser() for source in sources if is_file(source)]
    return [path.stat().st_size for path in paths if path.is_file()]


def read_model_size(settings: Settings) -> tuple[dict[str, Any] | None, int]:
    """Return the model's config and the bytes of its weight files; (None, 0) where it is not on this machine."""
    folder = model_folder(settings)
    if folder is None or not (folder / "config.json").is_file():
        return None, 0
    return json.loads((folder / "config.json").read_text()), weight_bytes(folder)
