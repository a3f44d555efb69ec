"""Scale losses to the mean over all ranks and accumulation steps; nothing else scales a loss.

The gradient of an optimizer step is that of

    (sum of the losses of all units over all ranks and accumulation steps) / (number of those units)

where a unit is what the task counts: a supervised token, for text. A loss that is a sum of several means, over pairs
and over tokens, has a divisor for each of them. DistributedDataParallel, and gradient_exchange.py, average gradients
over ranks, so each rank has to contribute

    (sum of its own losses) / (global count / world size)

`step_divisor` returns this divisor, which a model of Transformers gets as `num_items_in_batch`. Upstream's own
averaging (average_tokens_across_devices) is switched off, so that the loss is not scaled twice. The divisor may be a
fraction: 2 tokens on 4 ranks give 0.5.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def step_divisor(units: Sequence[Tensor], world_size: int, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the divisor of each rank's summed losses, for the micro-batches of one optimizer step.

    Args:
        units: of each of this rank's micro-batches of the step, 0-dim or (kinds of units,); all are 0 if the first is.
        world_size: number of ranks that average their gradients.
        sum_over_ranks: all-reduce; called exactly once on every rank.

    Returns global count / world size, float32, in the shape of `units`. A step without any unit counts as one, so that
    its loss is 0 and not 0 / 0.
    """
    total = sum_over_ranks(torch.stack(list(units)).sum(dim=0))
    return torch.where(total.flatten()[0] == 0, 1, total).to(torch.float32) / world_size
