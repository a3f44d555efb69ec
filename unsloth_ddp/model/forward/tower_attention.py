"""Compute the attention of a tower over all images of a micro-batch at once, with torch's varlen_attn.

Towers that join the patches of all images (Qwen's, GLM's) know where each image ends. Transformers splits the patches there for
every kernel but flash attention's: it waits for the GPU and starts a kernel for each image and layer, in which the GPU idles.
"""

from __future__ import annotations

import inspect
from typing import Any, TypeGuard

import torch
from torch import Tensor

from unsloth_ddp.distributed.precision import AMPERE
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.forward.varlen import LARGEST_FLASH_HEAD, SIXTEEN_BIT, compute_dtype, is_available
from unsloth_ddp.model.towers import ImageTower, image_tower

# Transformers hands the boundaries of images to functions with "flash" in their names.
NAME = "torch_varlen_flash_images"


def join_images(runtime: Runtime, model: Any) -> None:
    """Compute attention within images in one call a layer, if the tower joins the patches of all images."""
    tower = image_tower(model)
    capable = runtime.device_type == "cuda" and is_available() and torch.cuda.get_device_capability() >= AMPERE
    if capable and joins_images(tower):
        use(tower.blocks)


def joins_images(tower: ImageTower | None) -> TypeGuard[ImageTower]:
    """Return whether the layers of a tower get the patches of all images, and where each image ends."""
    return tower is not None and "cu_seqlens" in inspect.signature(type(tower.blocks[0]).forward).parameters


def use(blocks: list[Any]) -> bool:
    """Switch the attention of a tower's layers; return whether it is Transformers' sdpa, which alone is replaced."""
    from transformers import AttentionInterface

    configs = {id(c): c for block in blocks for m in block.modules() if (c := getattr(m, "config", None)) is not None}
    if not configs or any(config._attn_implementation != "sdpa" for config in configs.values()):
        return False
    AttentionInterface.register(NAME, attend)
    for config in configs.values():
        config._attn_implementation = NAME
    return True


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention of every patch to all patches of its image: an attention function of Transformers.

    Args:
        query, key, value: (1, heads, patches, head size), in 16 bit or under autocast; else sdpa computes each image.
        cu_seq_lens_q: boundaries of images, int32 (images + 1,).
        max_length_q: patches of the largest image.

    Returns:
        (1, patches, heads, head size), and None in place of attention weights.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert attention_mask is None and cu_seq_lens_q is not None, "the boundaries of images are missing"
    dtype = compute_dtype(query.dtype, query.device)
    if by_kernel(query, dtype):
        from torch.nn.attention.varlen import varlen_attn

        assert max_length_q is not None
        q, k, v = (one[0].transpose(0, 1).to(dtype) for one in (query, key, value))
        ends, longest = cu_seq_lens_q, max_length_q
        attended = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, -1))
        assert isinstance(attended, Tensor)
        return attended[None], None
    images = zip(*(one.split(cu_seq_lens_q.diff().tolist(), dim=2) for one in (query, key, value)), strict=True)
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return torch.cat([sdpa(module, *one, None, scaling=scaling, is_causal=False)[0] for one in images], dim=1), None


def by_kernel(query: Tensor, dtype: torch.dtype) -> bool:
    """Return whether torch's kernel takes these queries in this precision."""
    size = query.shape[3]
    return query.is_cuda and dtype in SIXTEEN_BIT and size <= LARGEST_FLASH_HEAD and size % 8 == 0
