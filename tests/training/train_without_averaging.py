"""train_ddp.py with each rank dividing by its own tokens, as if nothing were averaged over ranks."""

from __future__ import annotations

import torch

import train_ddp
from unsloth_ddp.training.step import optimizer_step


def own_count(units, world_size, sum_over_ranks):
    """The tokens of this rank alone."""
    return torch.stack(units).sum().clamp(min=1).float()


if __name__ == "__main__":
    optimizer_step.step_divisor = own_count
    train_ddp.main()
