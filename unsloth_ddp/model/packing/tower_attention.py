"""Compute the attention of a tower over all images of a micro-batch at once, with torch's varlen_attn.

Towers that join the patches of all images (Qwen's, GLM's) know where each image ends. Transformers splits the patches
there for every kernel but flash attention's: it waits for the GPU and starts a kernel for each image and layer, in
which the GPU idles. Pixtral's gets a mask of all patches by all patches instead, and none for flash attention.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from unsloth_ddp.distributed.precision import AMPERE
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.packing.varlen import LARGEST_FLASH_HEAD, SIXTEEN_BIT, compute_dtype, is_available
from unsloth_ddp.model.parts import parts_beside_text
from unsloth_ddp.model.towers import image_tower

# Transformers hands the boundaries of images to functions with "flash" in their names.
NAME = "torch_varlen_flash_images"


def join_images(runtime: Runtime, model: Any) -> None:
    """Compute attention within images in one call a layer, if the tower joins the patches of all images."""
    capable = runtime.device_type == "cuda" and is_available() and torch.cuda.get_device_capability() >= AMPERE
    if capable and (layers := joined_layers(model)) is not None:
        use(layers)


def joined_layers(model: Any) -> Module | None:
    """Return what runs the layers of a tower, if they get the patches of all images and can know where each image ends.

    They get the boundaries, or the tower gives flash attention the position of each patch in its image, not a mask.
    """
    if (tower := image_tower(model)) is None:
        return None
    modules = list(parts_beside_text(model)[tower.path].modules())
    codes = [c for m in modules if (c := getattr(inspect.unwrap(type(m).forward), "__code__", None)) is not None]
    placed = any("is_flash_attention_requested" in c.co_names and "position_ids" in c.co_varnames for c in codes)
    if not placed and "cu_seqlens" not in inspect.signature(type(tower.blocks[0]).forward).parameters:
        return None
    return next(m for m in modules if any(isinstance(c, ModuleList) and tower.blocks[0] in c for c in m.children()))


def use(layers: Module) -> bool:
    """Switch the attention of a tower's layers; return whether it is Transformers' sdpa, which alone is replaced."""
    from transformers import AttentionInterface

    configs = {id(c): c for m in layers.modules() if (c := getattr(m, "config", None)) is not None}
    if not configs or any(config._attn_implementation != "sdpa" for config in configs.values()):
        return False
    AttentionInterface.register(NAME, attend)
    for config in configs.values():
        config._attn_implementation = NAME
    layers.register_forward_pre_hook(_with_boundaries, with_kwargs=True)
    return True


def _with_boundaries(
    _: Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the boundaries of images to positions of patches (patches, axes); an image begins where all are 0."""
    positions = kwargs.get("position_ids")
    if positions is None:
        return inputs, kwargs
    starts = (positions == 0).all(-1).nonzero()[:, 0]
    ends = torch.nn.functional.pad(starts, (0, 1), value=len(positions)).int()
    return inputs, kwargs | {"cu_seq_lens_q": ends, "max_length_q": int(ends.diff().max())}


def attend(
    module: Module,
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
        q, k, v = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
        ends, longest = cu_seq_lens_q, max_length_q
        attended = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(-1, -1))
        assert isinstance(attended, Tensor)
        return attended[None], None
    images = zip(*(tensor.split(cu_seq_lens_q.diff().tolist(), dim=2) for tensor in (query, key, value)), strict=True)
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    return torch.cat([sdpa(module, *image, None, scaling=scaling, is_causal=False)[0] for image in images], dim=1), None


def by_kernel(query: Tensor, dtype: torch.dtype) -> bool:
    """Return whether torch's kernel takes these queries in this precision."""
    size = query.shape[3]
    return query.is_cuda and dtype in SIXTEEN_BIT and size <= LARGEST_FLASH_HEAD and size % 8 == 0
