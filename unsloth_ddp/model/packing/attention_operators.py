"""Define attention within rows for which torch has kernels, but no backward pass that can be compiled."""

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
# The code of torch's memory-efficient kernel for causal attention.
CAUSAL_FROM_TOP_LEFT = 1


@torch.library.custom_op("unsloth_ddp::attention_with_sinks", mutates_args=())
def attention_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, of_queries: Tensor, of_keys: Tensor, longest: int,
    longest_keys: int, scale: float, tokens_before: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return causal attention within rows whose softmax has a sink: one more score a head, to no value.

    Flash attention computes it without sinks, and its log-sum-exp values say how much the sinks take.

    Args:
        query, key, value: (tokens, heads, head size); keys and values have as many heads or fewer.
        sinks: (heads,).
        of_queries, of_keys: boundaries of rows, int32 (rows + 1,).
        longest, longest_keys: tokens of the longest row.
        tokens_before: tokens before itself that a token attends to; -1 for all.

    Returns:
        (tokens, heads, head size), and log-sum-exp values with sinks for the backward pass, float32 (heads, tokens).
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    # From torch 2.15 on cuDNN's kernel may be taken otherwise, whose values the backward pass below does not take.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        attended, sums = varlen_attn(
            query, key, value, of_queries, of_keys, longest, longest_keys, return_aux=AuxRequest(lse=True), scale=scale,
            window_size=(tokens_before, 0), enable_gqa=key.shape[1] != query.shape[1],
        )  # fmt: skip
    with_sinks = torch.logaddexp(sums, sinks.float()[:, None])
    share_of_tokens = (sums - with_sinks).exp().T[..., None]
    return (attended * share_of_tokens).to(query.dtype), with_sinks


@attention_with_sinks.register_fake
def _(query: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


def _keep_for_backward_with_sinks(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.others = inputs[6:]


def _backward_with_sinks(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    """Return the gradients of queries, keys, values and sinks.

    Flash attention's backward pass takes a softmax from its log-sum-exp values, and its derivative from its output
    (algorithm 2 of arXiv:2307.08691). Given those with sinks, it computes the gradients with sinks.
    """
    query, key, value, sinks, of_queries, of_keys, attended, sums = ctx.saved_tensors
    longest, longest_keys, scale, tokens_before = ctx.others
    # torch's kernel takes the state of random numbers, which only dropout has.
    random_state = torch.zeros((2,), dtype=torch.uint64, device=query.device)
    gradients = torch.ops.torch_attn._varlen_attn_backward(
        grad.contiguous(), query, key, value, attended, sums, of_queries, of_keys, longest, longest_keys,
        tokens_before < 0, random_state, scale, [tokens_before, 0],
    )  # fmt: skip
    of_sinks = None
    if ctx.needs_input_grad[3]:
        share_of_sinks = (sinks.float()[:, None] - sums).exp()
        of_sinks = -(share_of_sinks * (grad.float() * attended.float()).sum(-1).T).sum(1).to(sinks.dtype)
    return *gradients, of_sinks, *(None,) * 6


attention_with_sinks.register_autograd(_backward_with_sinks, setup_context=_keep_for_backward_with_sinks)


# torch cannot compile the backward pass of its memory-efficient kernel within rows: what describes it to the compiler
# does not take the kernel's arguments (torch 2.11 to 2.14).
@torch.library.custom_op("unsloth_ddp::wide_attention", mutates_args=())
def wide_attention(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return attention (tokens, heads, head size), and its log-sum-exp values (rows, heads, padded row)."""
    rows = (None, boundaries, boundaries, longest, longest)
    attended, sums, *_ = aten._efficient_attention_forward(
        query[None], key[None], value[None], *rows, 0.0, CAUSAL_FROM_TOP_LEFT, True, scale=scale, window_size=window
    )
    return attended[0], sums


@wide_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int, *_: Any) -> tuple[Tensor, Tensor]:
    aligned = (longest + 31) // 32 * 32
    sums = query.new_empty((boundaries.shape[0] - 1, query.shape[1], aligned), dtype=torch.float32)
    return query.new_empty((*query.shape[:2], value.shape[2])), sums


@torch.library.custom_op("unsloth_ddp::wide_attention_backward", mutates_args=())
def wide_attention_backward(
    grad: Tensor, inputs: list[Tensor], attended: Tensor, sums: Tensor, longest: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values; `inputs` are these and the boundaries of rows."""
    query, key, value, boundaries = inputs
    unused = torch.zeros((), dtype=torch.int64, device=query.device)
    # In one part, since several parts add to the gradients of keys in any order.
    gradients = aten._efficient_attention_backward(
        grad[None].contiguous(), query[None], key[None], value[None], None, attended[None], boundaries, boundaries,
        longest, longest, sums, 0.0, unused, unused, CAUSAL_FROM_TOP_LEFT, False, scale=scale, num_splits_key=1,
        window_size=window,
    )  # fmt: skip
    by_query, by_key, by_value = (gradient[0].contiguous() for gradient in gradients[:3])
    return by_query, by_key, by_value


@wide_attention_backward.register_fake
def _(grad: Tensor, inputs: list[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    by_query, by_key, by_value = (tensor.new_empty(tensor.shape) for tensor in inputs[:3])
    return by_query, by_key, by_value


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.others = inputs[4:]


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    *inputs, attended, sums = ctx.saved_tensors
    return *wide_attention_backward(grad, inputs, attended, sums, *ctx.others), None, None, None, None


wide_attention.register_autograd(_backward, setup_context=_keep_for_backward)
