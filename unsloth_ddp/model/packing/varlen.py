"""Compute attention over packed rows with torch's varlen_attn, for models that use the attention of Transformers.

The function is registered with Transformers under NAME, like its own attention functions, and works in compiled
models. Calls that need a mask (padded rows, generation) or 32 bits go to sdpa.
"""

import copy
import inspect
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unsloth_ddp.model.modules import evaluation_mode, without_kernels
from unsloth_ddp.model.packing.attention_operators import attention_with_sinks, wide_attention
from unsloth_ddp.utils.errors import one_line

logger = logging.getLogger("unsloth_ddp")

# Values of a head that flash attention takes.
LARGEST_FLASH_HEAD = 256
# The major compute capability of the GPUs that FlashAttention 4 was compared with torch's kernel on (H100 and H200).
HOPPER = 9
NAME, PROBE_NAME = "torch_varlen", "torch_varlen_probe"
SIXTEEN_BIT = (torch.float16, torch.bfloat16)
# Config fields for the dropout of attention scores, which varlen_attn does not have.
DROPOUT_FIELDS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
# Arguments of attention functions that varlen_attn does not take, and what they are.
UNSUPPORTED_ARGUMENTS = {
    "dropout": "dropout of attention scores",
    "softcap": "a softcap on attention scores",
    "position_bias": "a bias by position",
}
NOT_TAKEN = "the model's attention has {}, which torch's kernel for packed rows does not take"


def is_available() -> bool:
    """Return whether this torch has a kernel that takes grouped heads and windows (2.12 and later; not on ROCm)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    parameters = inspect.signature(varlen_attn).parameters
    flash = torch.backends.cuda.is_flash_attention_available()
    return torch.version.hip is None and flash and {"scale", "window_size", "enable_gqa"} <= parameters.keys()


def has_flash_attention_4(capability: int) -> bool:
    """Return whether FlashAttention 4 is installed and may replace torch's kernel at this major compute capability."""
    from torch.nn.attention import current_flash_attention_impl

    # Unsloth's variable for the same choice.
    choice = os.environ.get("UNSLOTH_FLASH_ATTENTION_IMPL", "").strip().lower()
    allowed = choice in ("", "auto", "on", "1", "true", "fa4") and current_flash_attention_impl() is None
    if capability != HOPPER or not allowed:
        return False
    # It reads this at import, and keeps what it has compiled for later runs.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    try:
        with flash_attention_4():
            return True
    except Exception as error:
        if not (isinstance(error, ModuleNotFoundError) and str(error.name).startswith("flash_attn")):
            logger.warning("FlashAttention 4 is installed and cannot be used: %s", one_line(error))
        return False


@contextmanager
def flash_attention_4() -> Iterator[None]:
    """Compute torch's varlen_attn by FlashAttention 4 inside the block.

    Launching it takes the host longer than torch's kernel, so it is for passes that are captured.
    """
    from torch.nn import attention

    attention.activate_flash_attention_impl("FA4")
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


def obstacle(model: Any) -> str | None:
    """Return why `attend` cannot replace the attention of this Transformers model; None if it can.

    Some models accept the arguments for packed rows and do not pass them on, so a forward pass over six tokens
    records which arguments reach the attention function.
    """
    if not getattr(model, "_supports_flash_attn", False) or not model._can_set_attn_implementation():
        return "Transformers does not let other attention replace that of this model"
    try:
        if any(getattr(model.config, name, None) for name in DROPOUT_FIELDS):
            return NOT_TAKEN.format(UNSUPPORTED_ARGUMENTS["dropout"])
        calls, window = _record_attention_calls(model), _has_window(model.config)
    except Exception as error:
        logger.warning(
            "packed rows use the attention of Transformers, because a trial forward pass failed: %s", one_line(error)
        )
        return "a trial of the model's attention with packed rows failed"
    if not calls:
        return "the model's attention is code of its own"
    if window and not any(others.get("sliding_window") for others in calls):
        return "the model does not pass its sliding window to the attention kernel"
    return next((unsupported for unsupported in map(_obstacle_in, calls) if unsupported), None)


def _has_window(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return any("sliding" in kind for kind in kinds)
    return bool(getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True))


def _obstacle_in(others: dict[str, Any]) -> str | None:
    """Return why `attend` does not take a call with these arguments; None if it does."""
    for name, described in UNSUPPORTED_ARGUMENTS.items():
        if torch.is_tensor(others.get(name)) or others.get(name):
            return NOT_TAKEN.format(described)
    if others.get("cu_seq_lens_q") is None or others.get("max_length_q") is None:
        return "the model does not pass the boundaries of rows to the attention kernel"
    if not others["same_shapes"]:
        return NOT_TAKEN.format("keys of another size than queries, or wider values")
    beside = {"sliding_window": "a sliding window", "s_aux": "attention sinks"}
    if others["head_size"] > LARGEST_FLASH_HEAD and (unsupported := [n for n in beside if others.get(n) is not None]):
        return NOT_TAKEN.format(f"heads of {others['head_size']} values with {beside[unsupported[0]]}")
    return NOT_TAKEN.format("attention to later tokens") if others.get("is_causal") is False else None


def _record_attention_calls(model: Any) -> list[dict[str, Any]]:
    """Return the arguments each layer passes to its attention function for a pack of two rows.

    The model is left as it was.
    """
    from transformers import AttentionInterface

    calls: list[dict[str, Any]] = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **others: Any) -> Any:
        others.setdefault("is_causal", getattr(module, "is_causal", None))
        # Values may be narrower (multi-head latent attention); they are padded.
        alike = key.shape[:3] == value.shape[:3] and key.shape[2:] == query.shape[2:] and value.shape[3] <= key.shape[3]
        calls.append(others | {"same_shapes": alike, "head_size": query.shape[3]})
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    probed = _on_meta(model) if is_sharded(model) else model
    original = model.config.get_text_config()._attn_implementation
    # A name of its own: for NAME, masks would be built.
    AttentionInterface.register(PROBE_NAME, record)
    try:
        _set_attention(probed, PROBE_NAME)
        with evaluation_mode(probed), torch.no_grad(), torch.compiler.set_stance("force_eager"), without_kernels():
            probed(**_two_row_pack(probed.get_input_embeddings().weight.device), use_cache=False)
    finally:
        _set_attention(probed, original)
    return calls


def is_sharded(model: Any) -> bool:
    """Return whether ranks hold parts of the weights, with which only the whole wrapped model can compute.

    Parameters that ZeRO-3 has sharded are empty tensors; those of FSDP2 are DTensors.
    """
    return any(hasattr(parameter, "ds_id") or isinstance(parameter, DTensor) for parameter in model.parameters())


def _on_meta(model: Any) -> Any:
    with torch.device("meta"):
        # The grouped products of experts take 16 bit only there.
        return type(model)(copy.deepcopy(model.config)).to(torch.bfloat16)


def _two_row_pack(device: torch.device) -> dict[str, Any]:
    boundaries = torch.tensor([0, 4, 6], dtype=torch.int32, device=device)
    return {
        "input_ids": torch.ones((1, 6), dtype=torch.int64, device=device),
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1]], device=device),
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), boundaries),
        **dict.fromkeys(("max_length_q", "max_length_k"), 4),
    }


def use(model: Any) -> None:
    """Switch a model for which `obstacle` returns None to varlen_attn."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
    _set_attention(model, NAME)


def _set_attention(model: Any, name: str) -> None:
    """Set the attention of the text decoder, and not of towers, whose patches attend to all others."""
    text = model.config.get_text_config()
    part = next((key for key in model.config.sub_configs if getattr(model.config, key) is text), "")
    model.set_attn_implementation(attn_implementation={part: name})


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype of attention: under autocast, queries can be fp32 after an fp32 normalisation."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def make_mask(**arguments: Any) -> Tensor | None:
    """Return the mask for sdpa, or None for packs and for rows without padding: a mask function of Transformers."""
    from transformers.masking_utils import sdpa_mask

    whole = arguments.get("attention_mask") is None and arguments["q_length"] == arguments["kv_length"]
    if whole and compute_dtype(arguments["dtype"], torch.device(arguments["device"])) in SIXTEEN_BIT:
        return None
    return sdpa_mask(**arguments)


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
    cu_seq_lens_k: Tensor | None = None,
    max_length_k: int | None = None,
    shared_keys: Tensor | None = None,
    dense: bool = False,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute causal attention within each row: an attention function of Transformers.

    Args:
        query: (batch, heads, tokens, head size); a batch of packs is one sequence.
        key, value: the same with as many heads or fewer; values may be narrower.
        attention_mask: from `make_mask`.
        sliding_window: tokens that a token attends to, itself included.
        cu_seq_lens_q: boundaries of packed rows, int32 (rows + 1,); without them every sequence of the batch is a row.
        max_length_q: tokens of the longest packed row.
        shared_keys: the token whose key each token of whole rows has, if the second rows of pairs have no prompt (see
            data/order/collate.py); `cu_seq_lens_k` and `max_length_k` are then those of whole rows, int32 (rows + 1,).
        dense: every sequence of the batch is a row, and torch's attention for such batches is used where it can be.
        s_aux: the sink of each head, (heads,), in the name that Transformers gives it.

    Returns:
        (batch, tokens, heads, size of a value), and None in place of attention weights.
    """
    batch, heads, tokens, size = query.shape
    dtype = compute_dtype(query.dtype, query.device)
    if attention_mask is not None or key.shape[2] != tokens or dtype not in SIXTEEN_BIT:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        if s_aux is not None:
            key, value, attention_mask = _sinks_as_keys(query, key, value, attention_mask, s_aux)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=scaling, **others)
    if dense and s_aux is None and (sliding_window is None or sliding_window >= tokens):
        # torch takes cuDNN's kernel for these on newer GPUs, which is about twice as fast as varlen_attn.
        by_head = torch.nn.functional.scaled_dot_product_attention(
            query.to(dtype),
            key.to(dtype),
            value.to(dtype),
            is_causal=True,
            scale=scaling,
            enable_gqa=key.shape[1] != heads,
        )
        return by_head.transpose(1, 2), None
    boundaries, longest = cu_seq_lens_q, max_length_q
    if boundaries is None or longest is None:
        boundaries = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=query.device)
        longest = tokens

    def by_token(heads_first: Tensor) -> Tensor:
        return heads_first.transpose(1, 2).reshape(batch * tokens, heads_first.shape[1], heads_first.shape[3]).to(dtype)

    width = value.shape[3]
    # One size of heads for the kernels; the scale is that of the keys.
    padded = value if width == size else torch.nn.functional.pad(value, (0, size - width))
    scale = size**-0.5 if scaling is None else scaling
    keys, values, rows = by_token(key), by_token(padded), Rows(boundaries, boundaries, longest, longest)
    if shared_keys is not None:
        assert cu_seq_lens_k is not None and max_length_k is not None, "the boundaries of whole rows are missing"
        # The gradient of a key is the sum of two at most, so that it does not depend on their order.
        keys, values = keys.index_select(0, shared_keys), values.index_select(0, shared_keys)
        rows = Rows(boundaries, cu_seq_lens_k, longest, max_length_k)
    # torch's operator is compiled for an output in the layout of the queries, and FlashAttention 4's is contiguous.
    inputs = (by_token(query).contiguous(), keys, values)
    if s_aux is not None:
        attended = attention_with_sinks(*inputs, s_aux, *rows, scale, _tokens_before(sliding_window))[0]
    else:
        kernel = _flash if size <= LARGEST_FLASH_HEAD else _memory_efficient
        attended = kernel(*inputs, rows, scale, sliding_window)
    return attended.view(batch, tokens, heads, size)[..., :width], None


class Rows(NamedTuple):
    """Boundaries of rows, int32 (rows + 1,), and the longest row, of queries and of keys.

    A row with fewer queries than keys has those of its last tokens.
    """

    of_queries: Tensor
    of_keys: Tensor
    longest: int
    longest_keys: int


def _tokens_before(window: int | None) -> int:
    """Return how many tokens before itself a token attends to; -1 for all."""
    return -1 if window is None else window - 1


def _sinks_as_keys(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and a mask for sdpa with sinks: one more key, with the sink as score and value 0."""
    batch, heads, tokens, _ = query.shape
    if mask is None:
        mask = query.new_ones((tokens, key.shape[2]), dtype=torch.bool).tril(key.shape[2] - tokens)
    scores = query.new_zeros(mask.shape).masked_fill(~mask, -torch.inf).expand(batch, heads, tokens, -1)
    sink_scores = sinks.to(query.dtype).view(-1, 1, 1).expand(batch, heads, tokens, 1)
    key, value = (torch.nn.functional.pad(tensor, (0, 0, 0, 1)) for tensor in (key, value))
    return key, value, torch.cat([scores, sink_scores], dim=-1)


def _flash(query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float, window: int | None) -> Tensor:
    """Return causal attention within rows, (tokens, heads, head size), by flash attention; up to 256 values a head."""
    from torch.nn.attention.varlen import varlen_attn

    grouped = key.shape[1] != query.shape[1]
    attended = varlen_attn(
        query, key, value, *rows, scale=scale, window_size=(_tokens_before(window), 0), enable_gqa=grouped
    )
    assert isinstance(attended, Tensor), "varlen_attn returned log-sum-exp values that were not requested"
    return attended


def _memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float, window: int | None
) -> Tensor:
    """Return the same by torch's memory-efficient kernel, which takes wider heads and no groups of them."""
    if rows.of_keys is not rows.of_queries:
        raise NotImplementedError(
            f"torch has no kernel for prompts that pairs share with heads of {query.shape[2]} values"
        )
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    # The kernel refuses a row that is longer than all rows together.
    return wide_attention(query, key, value, rows.of_queries, min(rows.longest, query.shape[0]), scale, window)[0]
