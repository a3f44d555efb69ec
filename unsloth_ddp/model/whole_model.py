"""Take the backend that loads in shards where the whole model does not fit on one GPU, which Unsloth would load first."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unsloth_ddp.config.parse import Settings
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.files import model_folder
from unsloth_ddp.utils.units import shown_bytes

# Models that Unsloth trained from shards in benchmarks/correctness/unsloth_shards.py.
TRIED_IN_SHARDS = ("llama", "qwen3")
# Part of a GPU that loading may fill, beside CUDA's context, NCCL's buffers and a layer that is converted.
FILLED = 0.9
# Bytes of a value that bitsandbytes packs to 4 bits, with its constants.
PACKED = 0.53


def choose_backend_by_size(settings: Settings, runtime: Runtime) -> None:
    """With FSDP2 and --backend auto, replace Unsloth by Transformers if the whole model does not fit on every GPU.

    Every rank calls this, before the backend is imported. A model of unknown size keeps Unsloth.
    """
    if runtime.sharding != "fsdp2" or runtime.backend != "unsloth" or settings.backend != "auto":
        return
    short = short_of_memory(settings, runtime)
    if short is None:
        return
    runtime.use_backend("transformers")
    if runtime.ranks.is_main:
        needed, room = map(shown_bytes, short)
        print(
            f"Backend transformers is taken, which loads model {settings.model} in shards: to load it whole with Unsloth "
            f"takes {needed} of the {room} of a GPU.",
            flush=True,
        )


def short_of_memory(settings: Settings, runtime: Runtime) -> tuple[int, int] | None:
    """Return the bytes that loading the whole model takes and those of the smallest GPU, where it does not fit; else None.

    Every rank calls this. A model of unknown size is taken to fit.
    """
    import torch

    total = int(torch.cuda.get_per_process_memory_fraction() * torch.cuda.mem_get_info()[1])
    room = min(runtime.gather(total))
    needed = runtime.broadcast_from_main(lambda: bytes_while_loading(settings, runtime.parts))
    return None if needed is None or needed <= FILLED * room else (needed, room)


def tried_in_shards(settings: Settings, model_type: str, *, quantized: bool, copies: int = 1) -> bool:
    """Return whether Unsloth trained such a model from shards in a test: plain LoRA on models whose code Unsloth replaces.

    Args:
        model_type: of the model's config.json.
        quantized: the model's files are quantized.
        copies: of the model that FSDP2 shards.
    """
    plain = settings.method == "lora" and not (
        settings.fp8 or settings.lora_modules_to_save or settings.lora_target_parameters or copies > 1
    )
    return plain and model_type in TRIED_IN_SHARDS and not quantized


def bytes_while_loading(settings: Settings, parts: int) -> int | None:
    """Return the peak of loading the whole model on a GPU and then splitting it; None if its size is not known.

    Args:
        parts: processes that a copy of the model is split over.
    """
    tensors = read_tensors(settings)
    if not tensors:
        return None
    # accelerate keeps weights that are trained in fp32, and holds a part beside the whole while it splits.
    each = 4.0 if settings.method == "full" else 2.0
    return int(whole_bytes(tensors, each, packs=settings.method == "qlora") * (1 + 1 / parts))


def whole_bytes(tensors: Iterable[tuple[str, str, list[int]]], each: float, *, packs: bool) -> float:
    """Return the bytes of a loaded model.

    Args:
        tensors: (name, dtype of safetensors, shape) of those in its files.
        each: bytes of a value once it is loaded.
        packs: matrices of layers are packed to 4 bits.
    """
    return sum(math.prod(shape) * _bytes_of(name, dtype, shape, each, packs=packs) for name, dtype, shape in tensors)


def _bytes_of(name: str, dtype: str, shape: list[int], each: float, *, packs: bool) -> float:
    if dtype in ("U8", "I8"):
        return 1.0  # packed already
    embeds = "embed" in name or "lm_head" in name
    return PACKED if packs and len(shape) > 1 and not embeds else each


def read_tensors(settings: Settings) -> list[tuple[str, str, list[int]]]:
    """Return (name, dtype, shape) of the tensors in a model's safetensors files, here or on the Hub; none if unknown."""
    from huggingface_hub import get_safetensors_metadata, parse_local_safetensors_file_metadata

    folder, model = model_folder(settings), str(settings.model)
    try:
        files: Iterable[Any] = []
        if not Path(model).expanduser().is_dir():
            with contextlib.suppress(Exception):  # no network: what is in the cache counts
                files = get_safetensors_metadata(model, revision=settings.model_revision).files_metadata.values()
        if folder is not None and not files:
            files = [parse_local_safetensors_file_metadata(path) for path in sorted(folder.glob("*.safetensors"))]
        return [(name, str(t.dtype), list(t.shape)) for file in files for name, t in file.tensors.items()]
    except Exception:  # damaged files: loading says what is wrong
        return []
