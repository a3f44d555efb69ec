"""Attention over packed rows by torch's varlen_attn, for models whose attention is that of Transformers.

Registered with Transformers under NAME, as its own attention functions are, and so usable inside what is compiled.
What needs a mask (padded rows, generation) is left to sdpa.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

NAME = "torch_varlen"


def is_available() -> bool:
    """Whether this torch has a kernel that takes grouped heads and windows (2.12 and later; not on ROCm)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    known = inspect.signature(varlen_attn).parameters
    flash = torch.backends.cuda.is_flash_attention_available()
    return torch.version.hip is None and flash and {"scale", "window_size", "enable_gqa"} <= known.keys()


def can_replace(model: Any) -> bool:
    """Whether the attention of this Transformers model hands over all that `attend` needs, and wants no more than it has.

    Models that take flash attention do hand over; what varlen_attn lacks is dropout, capped scores, attention sinks and
    values of another size than keys.
    """
    config = model.config
    hands_over = (
        getattr(model, "_supports_attention_backend", False)
        and getattr(model, "_supports_flash_attn", False)
        and model._can_set_attn_implementation()
    )
    wants_more = (
        getattr(config, "attention_dropout", 0)
        or getattr(config, "attn_logit_softcapping", None)
        or getattr(config, "v_head_dim", None)
        or not getattr(config, "is_causal", True)
        or any(hasattr(module, "sinks") for module in model.modules())
    )
    return bool(hands_over and not wants_more)


def use(model: Any) -> None:
    """Let a model for which `can_replace` holds attend through varlen_attn."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    model.set_attn_implementation(NAME)


def make_mask(**given: Any) -> Tensor | None:
    """The mask that sdpa would get, a mask function of Transformers; None for packs and for rows without padding."""
    from transformers.masking_utils import sdpa_mask

    if given.get("attention_mask") is None and given["q_length"] == given["kv_length"]:
        return None
    mask: Tensor | None = sdpa_mask(**given)
    return mask


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Causal attention within each row, an attention function of Transformers.

    Args:
        query: (batch, heads, tokens, head size); a batch of packs is one sequence.
        key, value: the same with as many heads or fewer.
        attention_mask: of `make_mask`.
        sliding_window: tokens that a token sees, itself included.
        cu_seq_lens_q: borders of packed rows, int32 (rows + 1,); without them every sequence of the batch is a row.
        max_length_q: tokens of the longest packed row.

    Returns:
        (batch, tokens, heads, head size), and no weights.
    """
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, tokens, size = query.shape
    if attention_mask is not None or key.shape[2] != tokens:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        masked: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return masked
    borders, longest = cu_seq_lens_q, max_length_q
    if borders is None or longest is None:
        borders = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=query.device)
        longest = tokens
    device = query.device.type
    # fp32 weights in a normalisation make queries fp32 under autocast, which custom operators are not part of.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype

    def by_token(heads_first: Tensor) -> Tensor:
        return heads_first.transpose(1, 2).reshape(batch * tokens, heads_first.shape[1], size).to(dtype)

    attended = varlen_attn(
        by_token(query),
        by_token(key),
        by_token(value),
        borders,
        borders,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=key.shape[1] != heads,
    )
    assert isinstance(attended, Tensor), "the log-sums were not asked for"
    return attended.view(batch, tokens, heads, size), None
