"""Collect what this node would train with, as plain values to compare: versions, code, settings, files, variables."""

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.revisions import dataset_revisions, find_cached_commit
from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.model.files.find import TOKENIZER
from unsloth_ddp.model.files.identity import describe_files, describe_model
from unsloth_ddp.preflight.checks import run_with_limit
from unsloth_ddp.utils.errors import UserError, one_line
from unsloth_ddp.utils.redaction import is_secret_name
from unsloth_ddp.utils.units import shown_bytes
from unsloth_ddp.utils.versions import PACKAGES, kit_checksum, versions

OTHER_PACKAGES = ("bitsandbytes", "deepspeed", "tensorboard", "nbconvert")
FLAG_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "ACCELERATE_USE_", "FSDP_", "PARALLELISM_CONFIG_", "UNSLOTH_")
FLAGS = (
    "ACCELERATE_MIXED_PRECISION", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS",
)  # fmt: skip
# These belong to one node: the place of its caches, and the launcher's file for the exit code.
NOT_COMPARED = ("UNSLOTH_COMPILE_LOCATION", "UNSLOTH_DDP_EXIT_CODE_FILE")


def collect_identity(
    settings: Settings, environ: Mapping[str, str], gpus: Sequence[Mapping[str, Any]] = (), seconds: float = 200
) -> dict[str, Any]:
    """Collect everything that has to agree on all nodes, ready for JSON; the error of a part that fails is in `unknown`."""
    deadline = time.monotonic() + seconds
    parts: dict[str, Callable[[], Any]] = {
        "versions": read_versions,
        "code": kit_checksum,
        "settings": lambda: dataclasses.asdict(settings),
        "data": lambda: describe_data(settings),
        "model": lambda: describe_model_files(settings),
        "flags": lambda: read_variables(environ),
        "gpus": lambda: list(gpus),
    }
    found: dict[str, Any] = {"unknown": {}}
    for name, part in parts.items():
        try:
            found[name] = run_with_limit(part, max(1.0, deadline - time.monotonic()))
        except Exception as error:
            found["unknown"][name] = f"{type(error).__name__}: {one_line(error)}"
    return found


def read_versions() -> dict[str, str]:
    """Return the versions of Python, CUDA, NCCL and the installed packages."""
    import torch

    found = versions((*PACKAGES, *OTHER_PACKAGES))
    # The imported version counts, with the suffix of its build (+cu130).
    found["torch"] = torch.__version__
    found["cuda"] = str(torch.version.cuda)
    with contextlib.suppress(Exception):
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return found


def read_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that decide how ranks communicate and compute."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in FLAGS or name.startswith(FLAG_PREFIXES)) and name not in NOT_COMPARED and not is_secret_name(name)
    }


def describe_data(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return an entry for every source of rows, by option and position, and for the chat template's file."""
    found, revisions = {}, dataset_revisions(settings)
    for option in ("dataset", "eval_dataset"):
        sources: list[str] = getattr(settings, option)
        for number, source in enumerate(sources, 1):
            label = f"{option} {Path(source).name}" + (f" ({number})" if len(sources) > 1 else "")
            path = Path(source).expanduser()
            if not is_file(source):
                found[label] = {"hub": find_cached_commit(source, "dataset", revisions.get(source))}
            elif settings.streaming and option == "dataset" and path.is_dir():
                found[label] = {"content": _describe_names(path)}
            else:
                found[label] = _describe_file(path)
    if settings.chat_template and settings.chat_template not in ("chatml", "training"):
        found["chat_template"] = _describe_file(Path(settings.chat_template).expanduser())
    return found


def describe_model_files(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return an entry for config, tokenizer and each weight file of a local model; a Hub model's commit."""
    name = str(settings.model)
    path = Path(name).expanduser()
    if not path.is_dir():
        if is_file(name):
            return {"model": {"missing": str(path)}}
        return {"model": {"hub": find_cached_commit(name, "model", settings.model_revision)}}
    try:
        found = {file: {"content": described} for file, described in describe_model(settings).items()}
    except UserError as error:
        return {"model": {"refused": str(error)}}
    tokenizer = [file for pattern in TOKENIZER for file in path.glob(pattern)]
    return {**found, "tokenizer": {"content": describe_files(path, tokenizer)}}


def _describe_file(path: Path) -> dict[str, Any]:
    return {"content": describe_files(path.parent, [path])} if path.is_file() else {"missing": str(path)}


def _describe_names(folder: Path) -> str:
    """Return the bytes of a folder, and a checksum of its files' names and sizes: streamed data is too large to read."""
    digest, length = hashlib.sha256(), 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)}\0{size}\0".encode())
        length += size
    return f"{shown_bytes(length)}, names and sizes {digest.hexdigest()[:10]}"
