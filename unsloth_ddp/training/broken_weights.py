"""End a run whose trained weights contain NaN or infinity: it cannot recover, and would replace good checkpoints."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import RunError


def check_weights(model: torch.nn.Module, runtime: Runtime, step: int, last: Path | None) -> None:
    """Raise if a trained weight is not finite; every rank calls this at the same step.

    Args:
        last: the last complete checkpoint, if there is one.

    Raises:
        RunError: on every rank, naming the first such weight.
    """
    broken_names = [name for name in runtime.gather(first_broken(model, runtime.ranks.rank)) if name is not None]
    if not broken_names:
        return
    checkpoint_clause = f"{last} is the last complete checkpoint" if last else "there is no checkpoint"
    precision = "" if runtime.precision == "fp32" else ", or use another --precision"
    raise RunError(
        f"After step {step} the trained weights contain NaN or infinity (first in {broken_names[0]}), from which "
        f"training cannot recover, so the run ends without saving them; {checkpoint_clause}. Start again with another "
        f"--run_name and a lower --learning_rate, a lower --max_grad_norm or more --warmup_steps{precision}."
    )


def first_broken(model: torch.nn.Module, rank: int) -> str | None:
    """Return the name of the first trained weight that is not finite in this rank's part; None if all are finite."""
    parts = [(name, own_part(weight, rank)) for name, weight in model.named_parameters() if weight.requires_grad]
    parts = [(name, part) for name, part in parts if part.numel()]
    # The infinity norm needs no copy of the weights and propagates NaN.
    largest = [torch.linalg.vector_norm(part, float("inf")).float() for _, part in parts]
    # One tensor for all norms lets the host wait for the device once. The norms can be on two devices: with parameters
    # in host memory ZeRO-3 keeps small weights on the GPU.
    finite = torch.stack([norm.to(largest[0].device) for norm in largest]).isfinite().tolist() if largest else []
    return next((name for (name, _), good in zip(parts, finite, strict=True) if not good), None)


def own_part(weight: Any, rank: int) -> Tensor:
    """Return this rank's part of a weight: all of it, or its shard with FSDP2 or ZeRO-3."""
    if hasattr(weight, "ds_tensor"):
        shard: Tensor = weight.ds_tensor.detach()
        # All partitions have the same length; DeepSpeed leaves the padding after the weight's end uninitialized.
        return shard[: max(0, weight.ds_numel - rank * shard.numel())]
    detached = weight.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached
