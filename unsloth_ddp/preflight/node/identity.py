"""Collect what this node would train with, as plain values to compare: versions, code, settings, files, variables."""

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.hub import use_cache_if_hub_is_unreachable
from unsloth_ddp.data.sources.revisions import dataset_revisions, find_cached_commit
from unsloth_ddp.data.sources.rows import is_file
from unsloth_ddp.distributed.runtime import quiet_imports
from unsloth_ddp.model.files.check import ADAPTER_FILE, base_of_reference
from unsloth_ddp.model.files.identity import (
    describe_files,
    describe_model,
    describe_opened,
    loaded_folders,
    opened_names,
)
from unsloth_ddp.preflight.checks import run_with_limit
from unsloth_ddp.utils.errors import UserError, one_line
from unsloth_ddp.utils.files.opened import UNREAD, recording
from unsloth_ddp.utils.files.sources import read_source
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
    """Collect what has to agree on all nodes, ready for JSON; the errors of parts that fail are in `unknown`."""
    deadline = time.monotonic() + seconds
    parts: dict[str, Callable[[], Any]] = {
        "versions": read_versions,
        "code": kit_checksum,
        "settings": lambda: dataclasses.asdict(settings),
        "data": lambda: describe_data(settings),
        "model": lambda: describe_models(settings),
        "flags": lambda: read_variables(environ),
        "gpus": lambda: list(gpus),
    }
    identity: dict[str, Any] = {"unknown": {}}
    for name, part in parts.items():
        try:
            identity[name] = run_with_limit(part, max(1.0, deadline - time.monotonic()))
        except Exception as error:
            identity["unknown"][name] = f"{type(error).__name__}: {one_line(error)}"
    return identity


def read_versions() -> dict[str, str]:
    """Return the versions of Python, CUDA, NCCL and the installed packages."""
    import torch

    by_package = versions((*PACKAGES, *OTHER_PACKAGES))
    # The imported version counts, with the suffix of its build (+cu130).
    by_package["torch"] = torch.__version__
    by_package["cuda"] = str(torch.version.cuda)
    with contextlib.suppress(Exception):
        by_package["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return by_package


def read_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that decide how ranks communicate and compute."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in FLAGS or name.startswith(FLAG_PREFIXES)) and name not in NOT_COMPARED and not is_secret_name(name)
    }


def describe_data(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return an entry for every source of rows, by option and position, and for the chat template's file."""
    entries, revisions = {}, dataset_revisions(settings)
    for option in ("dataset", "eval_dataset"):
        sources = [read_source(text).name for text in getattr(settings, option)]
        for number, source in enumerate(sources, 1):
            label = f"{option} {Path(source).name}" + (f" ({number})" if len(sources) > 1 else "")
            path = Path(source).expanduser()
            if not is_file(source):
                entries[label] = {"hub": find_cached_commit(source, "dataset", revisions.get(source))}
            elif settings.streaming and option == "dataset" and path.is_dir():
                entries[label] = {"content": _describe_names(path)}
            else:
                entries[label] = _describe_file(path)
    if settings.chat_template and settings.chat_template not in ("chatml", "training"):
        entries["chat_template"] = _describe_file(Path(settings.chat_template).expanduser())
    return entries


def describe_models(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return an entry for each file that loading the models will open, and for a Hub model's commit."""
    reference, base = settings.of_reference, base_of_reference(settings)
    sources = {"model": settings, "reference_model": reference, "reference_base": base if base != reference else None}
    entries: dict[str, dict[str, Any]] = {}
    for part, source in sources.items():
        if source is None:
            continue
        name, folder = str(source.model), Path(str(source.model)).expanduser()
        if is_file(name) and not folder.is_dir():
            entries[part] = {"missing": name}
        elif not folder.is_dir():
            entries[part] = {"hub": find_cached_commit(name, "model", source.model_revision)}
            try:
                # A run would refuse it, too.
                use_cache_if_hub_is_unreachable(source)
            except UserError as error:
                entries[part] = {"refused": str(error)}
        else:
            is_adapter = (folder / ADAPTER_FILE).is_file()
            try:
                described = {} if is_adapter else describe_model(source)
            except UserError as error:
                entries[part] = {"refused": str(error)}
                continue
            entries |= {f"{part}/{file}": {"content": content} for file, content in described.items()}
            _open_beside_weights(source, is_adapter=is_adapter)
    folders = loaded_folders(settings)
    opened = describe_opened(folders, opened_names(folders))
    entries |= {name: {"content": content} for name, content in opened.items() if content != UNREAD}
    return {name.removeprefix("model/"): entry for name, entry in entries.items()}


def _open_beside_weights(settings: Settings, *, is_adapter: bool) -> None:
    """Open what loading a local model opens, without its weights; what cannot be opened is refused elsewhere."""
    quiet_imports()
    import peft
    import torch
    import transformers

    from unsloth_ddp.model.loading.classes import model_class, read_config
    from unsloth_ddp.model.loading.load import load_tokenizer

    def make_empty() -> None:
        config = read_config(settings)
        with torch.device("meta"):
            model_class(config, settings).from_config(config, trust_remote_code=settings.trust_remote_code)

    folder, trust = str(settings.model), settings.trust_remote_code
    loads: list[Callable[[], Any]] = [
        make_empty,
        lambda: load_tokenizer(settings),
        lambda: transformers.AutoProcessor.from_pretrained(folder, trust_remote_code=trust),
        lambda: transformers.GenerationConfig.from_pretrained(folder),
    ]
    for load in [lambda: peft.PeftConfig.from_pretrained(folder)] if is_adapter else loads:
        with recording(), contextlib.suppress(Exception):
            load()


def _describe_file(path: Path) -> dict[str, Any]:
    return {"content": describe_files(path.parent, [path])} if path.is_file() else {"missing": str(path)}


def _describe_names(folder: Path) -> str:
    """Return the bytes of a folder and a checksum of its files' names and sizes; streamed data is too large."""
    digest, length = hashlib.sha256(), 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)}\0{size}\0".encode())
        length += size
    return f"{shown_bytes(length)}, names and sizes {digest.hexdigest()[:10]}"
