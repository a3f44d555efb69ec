"""Download a Hub model once per node before it is loaded, with the Hub's own progress bar."""

from __future__ import annotations

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.units import counted, shown_bytes

# Files in the root of a repository that Transformers reads: weights, of the first format that exists, and others.
SAFETENSORS, PICKLES = "model*.safetensors", "pytorch_model*.bin"
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
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    name, revision = str(settings.model), settings.model_revision
    formats = (SAFETENSORS,) if settings.use_safetensors else (SAFETENSORS, PICKLES)
    try:
        files = snapshot_download(
            name, revision=revision, allow_patterns=[*formats, *OTHERS], ignore_patterns="*/*", dry_run=True
        )
        safe = any(file.filename.endswith(".safetensors") for file in files)
        missing = [file for file in files if file.will_download and not (safe and file.filename.endswith(".bin"))]
        if not missing:
            return
        before = are_progress_bars_disabled()
        if shown:
            total = shown_bytes(sum(file.file_size or 0 for file in missing))
            print(f"Downloading {counted(len(missing), 'file')} of {name} ({total}) ...", flush=True)
            enable_progress_bars()
        try:
            snapshot_download(name, revision=revision, allow_patterns=[file.filename for file in missing])
        finally:
            if before:
                disable_progress_bars()
    except Exception:  # errors of the Hub and of its HTTP client have no common class; loading raises them again
        return
