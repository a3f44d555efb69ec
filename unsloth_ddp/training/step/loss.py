"""Scale losses to the token mean over all ranks and accumulation steps; nothing else scales a loss.

The gradient of an optimizer step is that of

    (sum of the supervised token losses over all ranks and accumulation steps) / (number of those tokens)

DistributedDataParallel, and gradient_exchange.py, average gradients over ranks, so each rank has to contribute

    (sum of its own token losses) / (global count / world size)

`step_divisor` returns this divisor, which the model gets as `num_items_in_batch`. Upstream's own averaging
(average_tokens_across_devices) is switched off, so that the loss is not scaled twice. The divisor may be a fraction:
2 tokens on 4 ranks give 0.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from unsloth_ddp.data.chat.labels import IGNORED


def supervised_tokens(labels: Tensor) -> Tensor:
    """Count the next-token predictions that `labels` (batch, sequence) supervise; position 0 is never predicted.

    Returns a 0-dim int64 tensor on the device of `labels`, without waiting for the device.
    """
    return (labels[..., 1:] != IGNORED).sum()


def step_divisor(
    batches: Iterable[Mapping[str, Tensor]], world_size: int, sum_over_ranks: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the divisor of each rank's summed token losses, for the micro-batches of one optimizer step.

    Args:
        batches: this rank's micro-batches of the step, each with `labels` (batch, sequence).
        world_size: number of ranks that average their gradients.
        sum_over_ranks: all-reduce of a 0-dim tensor; called exactly once on every rank.

    Returns a 0-dim float32 tensor, global count / world size. A step without any supervised token counts as one,
    so that its loss is 0 and not 0 / 0.
    """
    local = torch.stack([supervised_tokens(batch["labels"]) for batch in batches]).sum()
    return sum_over_ranks(local).clamp(min=1).to(torch.float32) / world_size


def logits_to_step_loss(logits: Tensor, labels: Tensor, divisor: Tensor) -> Tensor:
    """Return summed token losses / divisor from logits (batch, sequence, vocabulary), for a model that takes no divisor.

    The model's own mean cannot be converted to a sum: for a micro-batch without supervised tokens it is 0 / 0, and its
    gradient is NaN even if the loss is replaced by 0.
    """
    predicted = logits[..., :-1, :].flatten(0, -2).float()
    targets = labels[..., 1:].flatten().to(logits.device)
    return torch.nn.functional.cross_entropy(predicted, targets, ignore_index=IGNORED, reduction="sum") / divisor
