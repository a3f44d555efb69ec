"""Compute the output head and the cross entropy of selected tokens, a few at a time, without keeping logits.

The gradient of the logits depends only on logits and labels, so it is computed in the forward pass and multiplied with the
head's weight at once: the (tokens, vocabulary) logits never exist as a whole. Shapes do not depend on the labels' values,
so a CUDA graph can capture it. Liger-Kernel (https://arxiv.org/abs/2410.10989) describes the same order of computation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from unsloth_ddp.model.forward.compile_options import repeatable_options

# Number of tokens whose logits exist at once; larger chunks do not make the matrix products faster.
CHUNK = 2048


def head_loss(hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the summed cross entropy of next-token predictions, 0-dim float32.

    Args:
        hidden: (n, hidden size), last hidden states of the selected tokens.
        weight: (vocabulary, hidden size), of a head without bias.
        labels: (n,) int64; negative labels are ignored.
        dtype: of the matrix products; logits are converted to float32 before the softmax.
    """
    total: Tensor = _HeadLoss.apply(hidden, weight, labels, dtype)
    return total


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        compute = _compiled_chunk() if hidden.is_cuda else _chunk
        trained = weight.requires_grad
        with torch.autocast(hidden.device.type, enabled=False):
            used, states = weight.detach().to(dtype), hidden.to(dtype)
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            to_hidden = []
            to_weight = torch.zeros_like(weight, dtype=torch.float32) if trained else None
            for part, part_labels in zip(states.split(CHUNK), labels.split(CHUNK), strict=True):
                logits = part @ used.t()
                for one in (logits, part_labels):
                    # Compile once for any number of tokens.
                    torch._dynamo.maybe_mark_dynamic(one, 0)
                loss, to_logits = compute(logits, part_labels)
                total = total + loss
                to_hidden.append(to_logits @ used)
                if to_weight is not None:
                    to_weight += to_logits.t() @ part
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.save_for_backward(torch.cat(to_hidden), *([] if to_weight is None else [to_weight]))
        return total

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        to_hidden, *to_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        first = (to_hidden * above[0]).to(hidden_dtype)
        return first, (to_weight[0] * above[0]).to(weight_dtype) if to_weight else None, None, None


def _chunk(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of a chunk and its gradient with respect to the logits, in their dtype."""
    scores = logits.float()
    normalizer = torch.logsumexp(scores, dim=-1, keepdim=True)
    counts = (labels >= 0)[:, None]
    chosen = scores.gather(1, labels.clamp(min=0)[:, None])
    loss = ((normalizer - chosen) * counts).sum()
    columns = torch.arange(logits.shape[1], device=logits.device)[None]
    gradient = (torch.exp(scores - normalizer) - (columns == labels[:, None]).float()) * counts
    return loss, gradient.to(logits.dtype)


@functools.cache
def _compiled_chunk() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    return torch.compile(_chunk, dynamic=False, options=repeatable_options())
