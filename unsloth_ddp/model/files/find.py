"""Find a model's files in its folder or its snapshot in the Hub's cache, and download those that are missing."""

import contextlib
import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.units import counted, shown_bytes

SAFETENSORS = "model.safetensors"
TOKENIZER = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model",
    "chat_template*", "additional_chat_templates/*",
)  # fmt: skip
PROCESSOR = ("*processor_config.json",)
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
# Files in the root of a repository that Transformers reads: weights, of the first format that exists, and others.
LOADED, PICKLES = "model*.safetensors", "pytorch_model*.bin"
OTHERS = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")


def is_folder(settings: Settings) -> bool:
    """Return whether the model is a folder of this machine, and not a Hub id."""
    return Path(str(settings.model)).expanduser().is_dir()


def in_folder(settings: Settings, folder: Path) -> Settings:
    """Return the settings with the model of a folder in place of theirs."""
    return dataclasses.replace(settings, model=str(folder), model_revision=None)


def model_folder(settings: Settings) -> Path | None:
    """Return the model's folder or its snapshot in the Hub's cache; None if there is neither. Downloads nothing."""
    path = Path(str(settings.model)).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(HFValidationError, OSError):
        cached = try_to_load_from_cache(str(settings.model), "config.json", revision=settings.model_revision)
        if isinstance(cached, str):
            return Path(cached).parent
    return None


def safetensors_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model, sorted by name; empty if a file is missing or the format is another."""
    names, index = [SAFETENSORS], folder / f"{SAFETENSORS}.index.json"
    # Transformers reads the index only if there is no single file.
    if index.is_file() and not (folder / SAFETENSORS).is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    files = [folder / name for name in names]
    return files if all(path.is_file() for path in files) else []


@dataclass(frozen=True)
class StoredTensor:
    """Describe a stored tensor: its file, and what the header says of it; `dtype` is safetensors' name, as BF16."""

    path: Path
    dtype: str
    shape: list[int]


def stored_tensors(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of safetensors files by their names, read from the headers."""
    from huggingface_hub import parse_local_safetensors_file_metadata

    return {
        name: StoredTensor(path, str(tensor.dtype), list(tensor.shape))
        for path in files
        for name, tensor in parse_local_safetensors_file_metadata(path).tensors.items()
    }


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of the first format that a folder has, sorted by name; it may have several formats."""
    return next((files for pattern in WEIGHTS if (files := sorted(folder.glob(pattern)))), [])


def weight_bytes(folder: Path) -> int:
    """Return the bytes of a folder's weight files."""
    return sum(path.stat().st_size for path in weight_files(folder))


def tokenizer_bytes(settings: Settings) -> int:
    """Return the bytes of the tokenizer and processor files, which every result holds; 0 if they are not here."""
    folder = model_folder(settings)
    if folder is None:
        return 0
    return sum(path.stat().st_size for pattern in (*TOKENIZER, *PROCESSOR) for path in folder.glob(pattern))


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
    formats = (LOADED,) if settings.use_safetensors else (LOADED, PICKLES)
    try:
        files = snapshot_download(
            name, revision=revision, allow_patterns=[*formats, *OTHERS], ignore_patterns="*/*", dry_run=True
        )
        safe = any(file.filename.endswith(".safetensors") for file in files)
        missing = [file for file in files if file.will_download and not (safe and file.filename.endswith(".bin"))]
        if not missing:
            return
        were_disabled = are_progress_bars_disabled()
        if shown:
            total = shown_bytes(sum(file.file_size or 0 for file in missing))
            print(f"Downloading {counted(len(missing), 'file')} of {name} ({total}) ...", flush=True)
            enable_progress_bars()
        try:
            snapshot_download(name, revision=revision, allow_patterns=[file.filename for file in missing])
        finally:
            if were_disabled:
                disable_progress_bars()
    except Exception:  # errors of the Hub and of its HTTP client have no common class; loading raises them again
        return
