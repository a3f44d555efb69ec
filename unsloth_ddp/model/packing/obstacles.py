"""Find reasons not to pack rows that a model shows without computing (row_check.py finds the others)."""

import copy
import importlib.util
import inspect
import re
import sys
from typing import Any

import torch

from unsloth_ddp.model.forward.compile_options import uncompiled
from unsloth_ddp.model.modules import base_model, text_decoder
from unsloth_ddp.model.packing.short_convolution import convolving_layers

# Layers that carry a state from one token to the next, and so from the end of a row into the next row of the pack.
STATEFUL_LAYERS = re.compile(
    r"mamba|deltanet|rwkv|recurrent|linear_?attention|lightning|xlstm|retention|v4\w+compressor", re.IGNORECASE
)
# Of these, the package flash-linear-attention has kernels that begin a new state with each row.
WITH_KERNELS = re.compile("deltanet|linear_?attention", re.IGNORECASE)
# Attention within fixed chunks of the sequence, regardless of row boundaries.
CHUNKED_ATTENTION = "chunked_attention"


def mixing_reason(model: Any) -> str | None:
    """Return why rows of a pack would influence each other, whatever computes the layers; None if none is known.

    Layers with a state are left to `state_reason`: some kernels begin a new state with each row.
    """
    base = base_model(model)
    config = base.config.get_text_config()
    if getattr(base.config, "is_encoder_decoder", False):
        return "the model has an encoder, which attends to the whole pack"
    parameters = inspect.signature(base.forward).parameters
    hidden = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    if "position_ids" not in parameters and not hidden:
        return "the model takes no position_ids, which mark where rows begin"
    if CHUNKED_ATTENTION in (getattr(config, "layer_types", None) or ()):
        return "the model's chunked attention depends on the place in the sequence"
    trainer = sys.modules.get("unsloth.trainer")
    if trainer is not None and any(name in config.model_type for name in trainer.PADDING_FREE_BLOCKLIST):
        return f"Unsloth does not pack {config.model_type} models"
    return None


def state_reason(model: Any) -> str | None:
    """Return why a layer carries a state from row to row of a pack, unless its kernel resets it; else None."""
    stateful = stateful_layer(model)
    if stateful is None:
        return None
    lacks_kernel = WITH_KERNELS.search(stateful) and importlib.util.find_spec("fla") is None
    without = " without flash-linear-attention (uv sync --extra hybrid)" if lacks_kernel else ""
    return f"the model's {stateful} layers carry a state from one row into the next{without}"


def stateful_layer(model: Any) -> str | None:
    """Return the class of the first layer of a model's text decoder that carries a state from token to token, if any.

    Short convolutions that short_convolution.py computes within rows have none.
    """
    within_rows = {part for layer in convolving_layers(model) for part in layer.modules()}
    for module in text_decoder(model).modules():
        name = type(module).__name__
        convolution = isinstance(module, torch.nn.Conv1d) and module.kernel_size != (1,)
        convolves = convolution and module not in within_rows
        whole = hasattr(module, "config_class")
        if not whole and (STATEFUL_LAYERS.search(name) or hasattr(module, "A_log") or convolves):
            return name
    return None


def lookahead_reason(model: Any) -> str | None:
    """Return why no kernel computes packs with images, if masks let tokens of an image attend to later ones."""
    base = base_model(model)
    make = getattr(base, "create_masks_for_generate", None)
    names = [name for name in inspect.signature(make).parameters if name.endswith("token_type_ids")] if make else []
    if make is None or not names:
        return None
    config = copy.deepcopy(base.config)
    config._attn_implementation = "sdpa"
    # Which of the two marks an image depends on the class.
    kinds = dict.fromkeys(names, torch.tensor([[0, 0, 1, 1]]))
    # Unsloth would compile the masks for the CPU.
    with uncompiled():
        created = make(
            config=config, inputs_embeds=torch.zeros(1, 4, 1), attention_mask=None, past_key_values=None,
            position_ids=None, **kinds,
        )  # fmt: skip
    masks = created.values() if isinstance(created, dict) else [created]
    if not any(mask is not None and mask.triu(1).any() for mask in masks):
        return None
    return "tokens of an image attend to later ones, which kernels for packed rows do not take"
