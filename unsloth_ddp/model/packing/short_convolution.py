"""Compute the short causal convolutions of hybrid models (LFM2, Qwen3.5) within the rows of a pack.

Transformers calls them by one name in each family's module, with the row of each token in `seq_idx`. Its own function
leaves that out, and the package causal-conv1d, which does not, has to be built.
"""

import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor

from unsloth_ddp.model.modules import text_decoder

# The name in modules of Transformers, and the package that has a kernel of this name.
FUNCTION, PACKAGE = "causal_conv1d_fn", "causal_conv1d"


def convolving_layers(model: Any) -> list[torch.nn.Module]:
    """Return the layers of the text decoder whose forward pass calls FUNCTION."""
    return [module for module in text_decoder(model).modules() if _calls_function(module)]


def convolve_within_rows(model: Any) -> None:
    """Let these layers convolve within rows; they need `seq_idx` in every batch of packs."""
    if importlib.util.find_spec(PACKAGE) is not None:
        return
    for layer in convolving_layers(model):
        inspect.unwrap(type(layer).forward).__globals__[FUNCTION] = causal_convolution


def _calls_function(module: torch.nn.Module) -> bool:
    """Return whether a module's forward pass calls FUNCTION of its own module."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and FUNCTION in code.co_names and FUNCTION in forward.__globals__


def causal_convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    seq_idx: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Convolve each channel with the tokens before: a replacement of FUNCTION, summed in float32.

    Args:
        hidden_states: (batch, channels, tokens).
        weight: (channels, width), of which the last column is that of the token itself.
        seq_idx: the row of each token, int (batch, tokens); without it a sequence is a row.

    Returns:
        (batch, channels, tokens), in the dtype of `hidden_states`.
    """
    width, tokens = weight.shape[-1], hidden_states.shape[-1]
    padded = torch.nn.functional.pad(hidden_states, (width - 1, 0))
    rows = None if seq_idx is None else torch.nn.functional.pad(seq_idx, (width - 1, 0), value=-1)
    total = torch.zeros((), dtype=torch.float32, device=hidden_states.device)
    for place in range(width):
        shifted = padded[..., place : place + tokens]
        if rows is not None:
            shifted = shifted * (rows[:, None, place : place + tokens] == rows[:, None, width - 1 :])
        total = total + shifted.float() * weight[:, place, None].float()
    if bias is not None:
        total = total + bias[:, None].float()
    if activation is not None:
        from transformers.activations import ACT2FN

        total = ACT2FN[activation](total)
    return total.to(hidden_states.dtype)
