"""Check that the folders of a run can be written, have room for it, and are shared where they have to be."""

import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.model.files.find import model_folder, weight_bytes
from unsloth_ddp.preflight.checks import Finding, failure, warning
from unsloth_ddp.utils.errors import os_reason
from unsloth_ddp.utils.files.sources import read_source
from unsloth_ddp.utils.units import GIB, MIB, shown_bytes

CACHE_WANTED = 2 * GIB
LOGS_WANTED = GIB // 4
# Tokenizer, trainer state, random states, logs.
BESIDE_WEIGHTS = 64 * MIB
# For a model that is not on this machine (a Hub id that is not in the cache).
UNKNOWN_MODEL = {"full": 64 * GIB, "lora": 4 * GIB, "qlora": 4 * GIB}
# With save_total_limit none and no max_steps the number is not known; this one is assumed.
CHECKPOINTS_IF_UNLIMITED = 5
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
POLL_SECONDS = 0.2
# A network file system may show a new file a little later.
TOKEN_SECONDS = 6


def check_folder(path: Path, needed: int, content: str, option: str) -> Finding:
    """Check that a folder, or the nearest one above it, can be written and has room for what the run writes.

    Args:
        needed: bytes; less than twice that is a warning.
        content: name of what is written there.
        option: the option or variable that names another folder.
    """
    parent = existing(path.absolute())
    try:
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".preflight-") as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(parent).free
    except OSError as error:
        why = os_reason(error)
        remedy = f"{path} cannot be written ({why}); correct that, or choose another folder with {option}."
        return failure(f"{path}: {why}", remedy)
    shown = f"{path}: {shown_bytes(free)} free, about {shown_bytes(needed)} needed"
    if free < needed:
        return failure(shown, f"Free space for {content}, or choose another folder with {option}.")
    if free < 2 * needed:
        remedy = f"{content.capitalize()} may not fit; free some space, or choose another folder with {option}."
        return warning(shown, remedy)
    return Finding(shown)


def existing(path: Path) -> Path:
    """Return a folder, or the nearest one above it that there is."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def output_folder(settings: Settings) -> Path:
    return Path(settings.output_dir).expanduser().resolve()


def find_datasets_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of the datasets cache, by the library's rule but without importing it."""
    if environ.get("HF_DATASETS_CACHE"):
        return Path(environ["HF_DATASETS_CACHE"]).expanduser()
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "datasets"


def read_data_sizes(settings: Settings) -> list[int]:
    """Return the bytes of every local data file whose tokens are cached; those of streamed rows are not."""
    sources = [*([] if settings.streaming else settings.dataset), *settings.eval_dataset]
    paths = [Path(name).expanduser() for name in (read_source(text).name for text in sources) if is_file(name)]
    return [path.stat().st_size for path in paths if path.is_file()]


def read_model_size(settings: Settings) -> tuple[dict[str, Any] | None, int]:
    """Return the model's config and the bytes of its weight files; (None, 0) where it is not on this machine."""
    folder = model_folder(settings)
    if folder is None or not (folder / "config.json").is_file():
        return None, 0
    return json.loads((folder / "config.json").read_text()), weight_bytes(folder)


# ---- what a run writes ----


def estimate_run_bytes(settings: Settings, config: Mapping[str, Any] | None, weight_bytes: int) -> int:
    """Estimate the bytes in the output folder: the checkpoints kept, one being written, and the final weights.

    A checkpoint holds the trained weights and two Adam states for each; other optimizers need less.

    Args:
        config: the model's config.json; None when it is not known.
        weight_bytes: the size of the model's weight files; 0 when not known.
    """
    if config is None or not weight_bytes:
        return UNKNOWN_MODEL[settings.method]
    parameters = weight_bytes // BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    if settings.method == "full":
        trained, width = parameters, 4 if settings.full_weights == "fp32" else 2
    else:
        trained, width = adapter_parameters(config, parameters, settings.lora_r, len(settings.lora_modules_to_save)), 4
    final = trained * width + BESIDE_WEIGHTS + (parameters * 2 if settings.merge else 0)
    return count_checkpoints(settings) * (3 * trained * width + BESIDE_WEIGHTS) + final


def count_checkpoints(settings: Settings) -> int:
    """Return the most checkpoints on disk at one time: those kept and the one that replaces the oldest."""
    if settings.save_strategy == "no":
        return 0
    if settings.save_total_limit is not None:
        return settings.save_total_limit + 1
    if settings.max_steps > 0 and settings.save_strategy == "steps":
        return max(1, settings.max_steps // settings.save_steps)
    return CHECKPOINTS_IF_UNLIMITED


def adapter_parameters(config: Mapping[str, Any], parameters: int, r: int, saved_modules: int) -> int:
    """Return an upper bound of the parameters of a LoRA adapter, with whole modules saved beside it.

    A linear layer of a x b weights gets r x (a + b), which is at most 2 r / hidden_size of them where no side is
    shorter than the hidden size. Shorter ones (keys and values) are a small part of a model.
    """
    text = {**config, **(config.get("text_config") or {})}
    hidden, vocabulary = (
        text.get(name) if isinstance(text.get(name), int) else 0 for name in ("hidden_size", "vocab_size")
    )
    return int(2 * r * parameters / (hidden or 1024)) + saved_modules * (vocabulary or 0) * (hidden or 0)


# ---- whether the nodes see one output folder: node 0 writes a file there and the others look for it ----


def write_token(folder: Path) -> tuple[Path, str] | None:
    """Make a file on node 0; return its path and what of the folder does not exist yet, None on failure."""
    parent = existing(folder)
    path = parent / f".preflight-token-{secrets.token_hex(8)}"
    try:
        path.touch()
    except OSError:
        return None
    return path, str(folder.relative_to(parent))


def find_token(folder: Path, name: str, missing: str) -> bool | None:
    """Return on another node whether node 0's file is in its output folder; None where it cannot look there."""
    parent = existing(folder)
    # The name came over the network.
    path = parent / Path(name).name
    deadline = time.monotonic() + TOKEN_SECONDS
    try:
        while not path.exists():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)
    except (OSError, ValueError):
        return None
    # Folders of several names will be made in one place.
    return missing == str(folder.relative_to(parent))
