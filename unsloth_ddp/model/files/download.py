"""Download a Hub model once per node before it is loaded, with the Hub's own progress bar."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.units import counted, shown_bytes

# Files in the root of a repository that Transformers reads: weights of the first format that exists, and other files.
WEIGHTS = (("model*.safetensors",), ("pytorch_model*.bin",))
OTHERS = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")


def download_model(settings: Settings, runtime: Runtime) -> None:
    """Download the missing files of a Hub model in the first process of each node; every rank calls this.

    Errors of the Hub are ignored here: loading reads the cache afterwards, or raises the error.
    """
    if is_file(str(settings.model)):
        return
    if runtime.backend == "unsloth" and settings.method == "qlora" and settings.model_revision is None:
        # Unsloth may load a pre-quantized model from another repository.
        return
    runtime.on_main(lambda: _download(settings, shown=runtime.ranks.is_main), per_node=True)


def _download(settings: Settings, *, shown: bool) -> None:
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    name, revision = str(settings.model), settings.model_revision
    try:
        files = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=20).siblings or []
        sizes = {file.rfilename: file.size or 0 for file in files}
        missing = [
            file
            for file in needed_files(list(sizes), safetensors_only=settings.use_safetensors)
            if not isinstance(try_to_load_from_cache(name, file, revision=revision), str)
        ]
        if not missing:
            return
        before = are_progress_bars_disabled()
        if shown:
            total = shown_bytes(sum(sizes[file] for file in missing))
            print(f"Downloading {counted(len(missing), 'file')} of {name} ({total}) ...", flush=True)
            enable_progress_bars()
        try:
            snapshot_download(name, revision=revision, allow_patterns=missing)
        finally:
            if before:
                disable_progress_bars()
    except Exception:  # errors of the Hub and of its HTTP client have no common class; loading raises them again
        return


def needed_files(files: list[str], *, safetensors_only: bool) -> list[str]:
    """Return the files of a repository that loading reads: no other formats, and nothing in subfolders."""

    def matching(patterns: tuple[str, ...]) -> list[str]:
        return [file for file in files if "/" not in file and any(fnmatch(file, pattern) for pattern in patterns)]

    formats: list[Any] = [matching(patterns) for patterns in (WEIGHTS[:1] if safetensors_only else WEIGHTS)]
    return next((found for found in formats if found), []) + matching(OTHERS)
