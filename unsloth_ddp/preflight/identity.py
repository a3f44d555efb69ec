"""What this node would bring into a run, as plain values to be compared: versions, code, settings, files, flags."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_ddp.config.options import OPTIONS, Settings
from unsloth_ddp.data.sources import is_file
from unsloth_ddp.model.files import weight_bytes
from unsloth_ddp.preflight.bounded import bounded
from unsloth_ddp.preflight.compare import SECRET
from unsloth_ddp.utils.errors import one_line
from unsloth_ddp.utils.units import GIB, MIB
from unsloth_ddp.utils.versions import PACKAGES, versions

OTHER_PACKAGES = ("bitsandbytes", "deepspeed", "tensorboard", "nbconvert")
FLAG_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "ACCELERATE_USE_", "FSDP_", "UNSLOTH_")
FLAGS = (
    "ACCELERATE_MIXED_PRECISION", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS",
)  # fmt: skip
# Each node's own: where its caches are, and what the launcher writes for it.
NOT_COMPARED = ("UNSLOTH_COMPILE_LOCATION", "UNSLOTH_DDP_EXIT_CODE_FILE")
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.jinja",
    "*.model",
)
# Options that name files or folders.
PATHS = tuple(name for name, option in OPTIONS.items() if option.path)

# About ten seconds of one core; beyond it a file is compared by samples.
READ_WHOLE = 4 * GIB
SAMPLES = 512
KIT = Path(__file__).resolve().parents[1]


def identity(
    settings: Settings, environ: Mapping[str, str], gpus: Sequence[Mapping[str, Any]] = (), seconds: float = 200
) -> dict[str, Any]:
    """Everything that has to be alike on all nodes, ready for JSON; a part that fails says so under `unknown`.

    Args:
        gpus: what node.visible_gpus found.
        seconds: how long all parts together may take; those that are not done by then are not known.
    """
    deadline = time.monotonic() + seconds
    parts = {
        "versions": all_versions,
        "code": kit_code,
        "settings": lambda: plain_settings(settings),
        "data": lambda: data_files(settings),
        "model": lambda: model_files(settings),
        "flags": lambda: flags(environ),
        "gpus": lambda: list(gpus),
    }
    found: dict[str, Any] = {"unknown": {}}
    for name, part in parts.items():
        try:
            found[name] = bounded(part, max(1.0, deadline - time.monotonic()))
        except Exception as error:
            found["unknown"][name] = f"{type(error).__name__}: {one_line(error)}"
    return found


def plain_settings(settings: Settings) -> dict[str, Any]:
    """Every option; a secret's value is replaced by a digest, since it travels to the other nodes."""
    options = dataclasses.asdict(settings)
    for name, value in options["trainer_args"].items():
        if SECRET.search(name):
            options["trainer_args"][name] = hashlib.sha256(repr(value).encode()).hexdigest()[:12]
    return options


def all_versions() -> dict[str, str]:
    """Python, CUDA, NCCL, and the packages that are installed."""
    import torch

    found = versions((*PACKAGES, *OTHER_PACKAGES))
    # What is imported decides, and a build's suffix (+cu130) is part of it.
    found["torch"] = torch.__version__
    found["cuda"] = str(torch.version.cuda)
    with contextlib.suppress(Exception):
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return found


def kit_code(root: Path = KIT) -> dict[str, str]:
    """`hash` of the kit's Python files and configs, and the git commit they are from (+dirty: with changes)."""
    files = [p for p in root.rglob("*.py") if "__pycache__" not in p.parts]
    files += [root.parent / "train_ddp.py", *(root.parent / "accelerate_configs").glob("*.yaml")]
    digest = hashlib.sha256()
    for path in sorted(p for p in files if p.is_file()):
        digest.update(str(path.relative_to(root.parent)).encode() + b"\0" + path.read_bytes() + b"\0")
    return {"hash": digest.hexdigest(), "commit": git_commit(root.parent)}


def git_commit(folder: Path) -> str:
    """`1a2b3c4d5e`, with +dirty after it when files differ from the commit; `no git` elsewhere."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "no git"
    return commit + ("+dirty" if changed else "")


def flags(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables that decide how ranks talk and compute."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in FLAGS or name.startswith(FLAG_PREFIXES)) and name not in NOT_COMPARED and not SECRET.search(name)
    }


def data_files(settings: Settings) -> dict[str, dict[str, Any]]:
    """Every source of rows, by option and place in it, and the chat template's file."""
    found = {}
    for option in ("dataset", "eval_dataset"):
        sources: list[str] = getattr(settings, option)
        for number, source in enumerate(sources, 1):
            label = f"{option} {Path(source).name}" + (f" ({number})" if len(sources) > 1 else "")
            path = Path(source).expanduser()
            if not is_file(source):
                found[label] = hub_entry(source, "dataset")
            elif settings.streaming and option == "dataset" and path.is_dir():
                found[label] = folder_entry(path)
            else:
                found[label] = file_entry(path)
    if settings.chat_template and settings.chat_template != "chatml":
        found["chat_template"] = file_entry(Path(settings.chat_template).expanduser())
    return found


def model_files(settings: Settings) -> dict[str, dict[str, Any]]:
    """config.json and the tokenizer's files by checksum, the weights by their bytes; a Hub model by its commit."""
    path = Path(str(settings.model)).expanduser()
    if not path.is_dir():
        return {
            "model": {"missing": str(path)}
            if is_file(str(settings.model))
            else hub_entry(str(settings.model), "model", settings.model_revision)
        }
    names: Iterable[Path] = {path / "config.json", *(f for pattern in TOKENIZER_FILES for f in path.glob(pattern))}
    found = {file.name: file_entry(file) for file in sorted(names)}
    found["weights"] = {"bytes": weight_bytes(path)}
    return found


def file_entry(path: Path) -> dict[str, Any]:
    """A file's bytes and SHA-256; of a very large one, that of evenly spread samples."""
    if not path.is_file():
        return {"missing": str(path)}
    length = path.stat().st_size
    with path.open("rb") as file:
        if length <= READ_WHOLE:
            return {"bytes": length, "digest": hashlib.file_digest(file, "sha256").hexdigest()}
        digest = hashlib.sha256()
        for number in range(SAMPLES):
            file.seek((length - MIB) * number // (SAMPLES - 1))
            digest.update(file.read(MIB))
    return {"bytes": length, "digest": digest.hexdigest(), "sampled": True}


def folder_entry(folder: Path) -> dict[str, Any]:
    """The bytes of a folder's files, and SHA-256 of their names and sizes: of a set to be streamed, too much to read."""
    digest, length = hashlib.sha256(), 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)}\0{size}\0".encode())
        length += size
    return {"bytes": length, "digest": digest.hexdigest(), "sampled": True}


def hub_entry(name: str, kind: str, revision: str | None = None) -> dict[str, Any]:
    """The commit of a Hub model or dataset that the cache holds; None when it will be downloaded."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
    if revision and (folder / "snapshots" / revision).is_dir():
        return {"hub": revision}
    try:
        return {"hub": (folder / "refs" / (revision or "main")).read_text().strip()}
    except OSError:
        return {"hub": None}
