"""Compute the output head and the cross entropy of selected tokens, a few at a time, without keeping logits.

The gradient of the logits depends only on logits and labels, so it is computed in the forward pass and multiplied with
the head's weight at once: the (tokens, vocabulary) logits never exist as a whole. Shapes do not depend on the labels'
values, so a CUDA graph can capture it. Liger-Kernel (https://arxiv.org/abs/2410.10989) describes the same order of
computation.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from unsloth_ddp.model.forward.compile_options import layer_options

# Number of tokens whose logits exist at once; larger chunks do not make the matrix products faster.
CHUNK = 2048


# Fields of a config for a factor of the logits; logits_scaling is a divisor.
FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")


@dataclass(frozen=True)
class Logits:
    """Say how a model changes its head's products: logits = cap * tanh(factor * products / cap); a cap of 0 is none."""

    factor: float = 1.0
    cap: float = 0.0

    @classmethod
    def of(cls, config: Any) -> Self:
        """Return what the text config of a model says; a wrong reading shows in `check_capture`."""
        factor = math.prod(float(getattr(config, name, None) or 1) for name in FACTORS)
        divisor = float(getattr(config, "logits_scaling", None) or 1)
        return cls(factor / divisor, float(getattr(config, "final_logit_softcapping", None) or 0))


PLAIN = Logits()


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    dtype: torch.dtype,
    changed: Logits = PLAIN,
    *,
    chunk: int | None = None,
) -> Tensor:
    """Return the summed cross entropy of next-token predictions, 0-dim float32.

    Args:
        hidden: (n, hidden size), last hidden states of the selected tokens.
        weight: (vocabulary, hidden size), of a head without bias.
        labels: (n,) int64; negative labels are ignored.
        dtype: of the matrix products; logits are converted to float32 before the softmax.
        changed: what the model does to the products.
        chunk: tokens whose logits exist at once, which are not compiled for then; None for CHUNK tokens, compiled.
    """
    return _HeadLoss.apply(hidden, weight, labels, dtype, changed, chunk)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        dtype: torch.dtype,
        changed: Logits,
        chunk: int | None,
    ) -> Tensor:
        compute = _compiled_chunk() if hidden.is_cuda and chunk is None else _chunk
        trained = weight.requires_grad
        with torch.autocast(hidden.device.type, enabled=False):
            used, states = weight.detach().to(dtype), hidden.to(dtype)
            total = torch.zeros((), dtype=torch.float32, device=hidden.device)
            to_hidden = []
            to_weight = torch.zeros_like(weight, dtype=torch.float32) if trained else None
            for part, part_labels in zip(states.split(chunk or CHUNK), labels.split(chunk or CHUNK), strict=True):
                logits = part @ used.t()
                for tensor in (logits, part_labels):
                    # Compile once for any number of tokens.
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
                loss, to_logits = compute(logits, part_labels, changed.factor, changed.cap)
                total = total + loss
                to_hidden.append(to_logits @ used)
                if to_weight is not None:
                    to_weight += to_logits.t() @ part
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.save_for_backward(torch.cat(to_hidden), *([] if to_weight is None else [to_weight]))
        return total

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        to_hidden, *to_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        first = (to_hidden * above[0]).to(hidden_dtype)
        return first, (to_weight[0] * above[0]).to(weight_dtype) if to_weight else None, None, None, None, None


def _chunk(products: Tensor, labels: Tensor, factor: float, cap: float) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of a chunk and its gradient with respect to the products, in their dtype."""
    scores = products.float() * factor
    if cap:
        scores = torch.tanh(scores / cap) * cap
    normalizer = torch.logsumexp(scores, dim=-1, keepdim=True)
    counts = (labels >= 0)[:, None]
    chosen = scores.gather(1, labels.clamp(min=0)[:, None])
    loss = ((normalizer - chosen) * counts).sum()
    columns = torch.arange(products.shape[1], device=products.device)[None]
    gradient = (torch.exp(scores - normalizer) - (columns == labels[:, None]).float()) * counts
    if cap:
        gradient = gradient * (1 - (scores / cap).square())
    return loss, (gradient * factor).to(products.dtype)


@functools.cache
def _compiled_chunk() -> Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]:
    return torch.compile(_chunk, dynamic=False, options=layer_options())
