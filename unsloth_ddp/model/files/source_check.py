"""Refuse models that cannot be trained: adapters, and models with an unsupported quantization."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.sharding import Sharding
from unsloth_ddp.model.files.find import is_folder
from unsloth_ddp.utils.errors import UserError

ADAPTER_FILE = "adapter_config.json"
# Quantizations of a base model on which adapters can be trained, by Transformers' names.
TRAINABLE = {"unsloth": ("bitsandbytes", "mxfp4", "fp8"), "transformers": ("bitsandbytes",)}


def check_no_adapter(model: str, adapter: dict[str, Any] | None) -> None:
    """Refuse an adapter as --model, and say how to train on from it.

    Args:
        adapter: content of its adapter_config.json; None for a model that is not an adapter.
    """
    if adapter is None:
        return
    base = str(adapter.get("base_model_name_or_path") or "").strip()
    named = f"the base model {base}" if base else "a base model that its adapter_config.json does not name"
    option = f"--model {shlex.quote(base)}" if base else "that base as --model"
    raise UserError(
        f"model {model} is an adapter for {named}; give {option} to train a new adapter, with --resume to go on with its run, or the "
        "model into which `python -m unsloth_ddp.export RUN --to merged` merged it."
    )


def check_quantization(
    settings: Settings, backend: str, config: dict[str, Any] | None, sharding: Sharding = "none"
) -> None:
    """Refuse a quantization that the backend or the sharding cannot train, or that contradicts --method.

    Args:
        config: content of the model's config.json; None if it cannot be read yet.
    """
    quantization = (config or {}).get("quantization_config")
    if not isinstance(quantization, dict):
        return
    method = str(quantization.get("quant_method") or "bitsandbytes").lower()
    if method not in TRAINABLE[backend]:
        raise UserError(
            f"model {settings.model} is quantized already ({method}), which this kit does not train with backend {backend}; "
            "give the 16-bit model that it was made from (its model card names it), with --method qlora to load that in "
            "4 bits."
        )
    # Unsloth loads the 16-bit repository instead of the 4-bit one if it knows both.
    replaceable = backend == "unsloth" and not is_folder(settings)
    if method == "bitsandbytes" and settings.method != "qlora" and not replaceable:
        raise UserError(
            f"model {settings.model} is quantized already (bitsandbytes), and method {settings.method} is for 16-bit "
            "weights; give --method qlora, or the 16-bit model that it was made from."
        )
    if sharding == "fsdp2" and quantization.get("load_in_8bit"):
        # bitsandbytes keeps scales beside 8-bit weights, which would be sharded away from them.
        raise UserError(
            f"model {settings.model} is quantized to 8 bits (bitsandbytes), which FSDP2 cannot shard; give the 16-bit model "
            "that it was made from, which --method qlora loads in 4 bits, or a 4-bit one."
        )


def check_source(settings: Settings, backend: str, sharding: Sharding = "none") -> None:
    """Refuse an adapter or a model quantized in a way that cannot be trained, in a folder or on the Hub."""
    model, revision = str(settings.model), settings.model_revision
    check_no_adapter(model, read_model_file(model, ADAPTER_FILE, revision))
    check_quantization(settings, backend, read_model_file(model, "config.json", revision), sharding)


def read_model_file(model: str, name: str, revision: str | None = None) -> dict[str, Any] | None:
    """Return a JSON object of a model; None if the file is missing, unreachable or no object. Loading raises the error."""
    path = Path(model).expanduser() / name
    try:
        if not path.parent.is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(model, name, revision=revision))
        content = json.loads(path.read_text(encoding="utf-8"))
    except Exception:  # the Hub's errors and those of its HTTP client have no common class
        return None
    return content if isinstance(content, dict) else None
