"""Find reasons not to pack rows for a model: layers or positions that mix the rows of a pack."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch

from unsloth_ddp.model.modules import base_model, text_decoder

# Layers that carry a state from one token to the next, and so from the end of a row into the next row of the pack.
STATEFUL_LAYERS = re.compile(
    r"mamba|deltanet|rwkv|shortconv|recurrent|linear_?attention|lightning|xlstm|retention|v4\w+compressor",
    re.IGNORECASE,
)
# Attention within fixed chunks of the sequence, regardless of row boundaries.
CHUNKED_ATTENTION = ("chunked_attention",)
# Their attention depends on the distance between tokens in the sequence, which position_ids do not change.
ALIBI_MODELS = ("bloom", "mpt")
# Speech models whose text decoder does not pass position_ids on.
IGNORE_POSITIONS = ("moshi",)
# Models that build masks without position_ids, so that rows are separate only with a varlen kernel.
MASKS_WITHOUT_POSITIONS = ("afmoe", "biogpt", "falcon", "gpt_oss", "granitemoehybrid", "opt", "xglm")
# Models that call flash attention without position_ids, so that rows are separate only with a mask.
FLASH_WITHOUT_POSITIONS = ("gpt_neo", "gptj")


def mixing_reason(model: Any) -> str | None:
    """Return why rows of a pack would influence each other in this model, or None if they would not."""
    base = base_model(model)
    config = base.config
    stateful = next(_stateful_layers(text_decoder(base)), None)
    if stateful is not None:
        return f"the model's {stateful} layers carry a state from one row into the next"
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if text is not config:
        return "the model takes images or sound, and packing is not supported for such models"
    if getattr(config, "is_encoder_decoder", False):
        return "the model has an encoder, which attends to the whole pack"
    if getattr(config, "alibi", False) or config.model_type in ALIBI_MODELS:
        return "the model's attention (ALiBi) depends on the distance in the sequence"
    if "mrope_section" in _rope_parameters(config):
        return "the model's positions (M-RoPE) do not mark where rows begin"
    parameters = inspect.signature(base.forward).parameters
    hidden = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    if "position_ids" not in parameters and not hidden:
        return "the model takes no position_ids, which mark where rows begin"
    if config.model_type in IGNORE_POSITIONS:
        return "the model does not pass on the positions that mark where rows begin"
    if any(_starts_after_padding_index(*named) for named in base.named_modules()):
        return "the model counts positions from its padding index, and packed rows count from 0"
    chunked = [kind for kind in getattr(config, "layer_types", None) or [] if kind in CHUNKED_ATTENTION]
    if chunked:
        return f"the model's {chunked[0].replace('_', ' ')} depends on the place in the sequence"
    return _unsloth_reason(config.model_type)


def lost_boundaries_reason(model_type: str, kernel: str | None, implementation: str) -> str | None:
    """Return why this attention implementation does not get the row boundaries, or None if it does.

    Args:
        kernel: the kernel for packed rows, or None if rows are separated by a mask.
        implementation: the attention implementation of Transformers (sdpa, flash_attention_2, ...).
    """
    if kernel is None and model_type in MASKS_WITHOUT_POSITIONS:
        return f"the masks of {model_type} models do not keep rows apart"
    if "flash" in implementation and model_type in FLASH_WITHOUT_POSITIONS:
        return f"{model_type} models do not pass row boundaries to flash attention"
    return None


def untested_reason(model: Any) -> str | None:
    """Return why packing is untested with this model although no error is known, or None."""
    if "token_type_ids" in inspect.signature(base_model(model).forward).parameters:
        return "the model takes token_type_ids, with which packing is untested"
    return None


def _starts_after_padding_index(name: str, module: torch.nn.Module) -> bool:
    positions = isinstance(module, torch.nn.Embedding) and name.endswith("position_embeddings")
    return positions and module.padding_idx is not None


def _rope_parameters(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def _stateful_layers(model: torch.nn.Module) -> Iterator[str]:
    for module in model.modules():
        name = type(module).__name__
        convolves = isinstance(module, torch.nn.Conv1d) and module.kernel_size != (1,)
        whole = hasattr(module, "config_class")
        if not whole and (STATEFUL_LAYERS.search(name) or hasattr(module, "A_log") or convolves):
            yield name


def _unsloth_reason(model_type: str) -> str | None:
    trainer = sys.modules.get("unsloth.trainer")
    if trainer is not None and any(name in model_type for name in trainer.PADDING_FREE_BLOCKLIST):
        return f"Unsloth does not pack {model_type} models"
    return None
