"""End a run whose trained weights hold NaN or infinity: nothing brings them back, and its checkpoints would replace good ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import RunError


def check_weights(model: torch.nn.Module, runtime: Runtime, step: int, last: Path | None) -> None:
    """Refuse to go on if a trained weight is not finite; every rank calls this at the same step.

    Args:
        last: the last whole checkpoint, if there is one.

    Raises:
        RunError: on every rank; it names the first such weight.
    """
    found = [name for name in runtime.gather(first_broken(model, runtime.ranks.rank)) if name is not None]
    if not found:
        return
    kept = f"{last} is the last whole checkpoint" if last else "there is no checkpoint"
    precision = "" if runtime.precision == "fp32" else ", or use another --precision"
    raise RunError(
        f"After step {step} the trained weights hold NaN or infinity (first in {found[0]}), which no further step mends, so the "
        f"run ends and saves nothing of them; {kept}. Start again with another --run_name and a lower --learning_rate, a "
        f"lower --max_grad_norm or more --warmup_steps{precision}."
    )


def first_broken(model: torch.nn.Module, rank: int) -> str | None:
    """Return the first trained weight of which this rank's part holds NaN or infinity; None if all are finite."""
    parts = [(name, _own_part(weight, rank)) for name, weight in model.named_parameters() if weight.requires_grad]
    parts = [(name, part) for name, part in parts if part.numel()]
    # The largest absolute value is found without a copy of the weights, and NaN comes through it.
    largest = [torch.linalg.vector_norm(part, float("inf")).float() for _, part in parts]
    # Looked at together, so that the host waits for the device once. With parameters in host memory ZeRO-3 keeps small
    # weights on the GPU.
    finite = torch.stack([one.to(largest[0].device) for one in largest]).isfinite().tolist() if largest else []
    return next((name for (name, _), good in zip(parts, finite, strict=True) if not good), None)


def _own_part(weight: Any, rank: int) -> Tensor:
    """Return what this rank holds of a weight: all of it, or its shard of FSDP2 or ZeRO-3."""
    if hasattr(weight, "ds_tensor"):
        held: Tensor = weight.ds_tensor.detach()
        # All parts are of one length; DeepSpeed never sets the memory behind the weight's end.
        return held[: max(0, weight.ds_numel - rank * held.numel())]
    own = weight.detach()
    return own.to_local() if isinstance(own, DTensor) else own
