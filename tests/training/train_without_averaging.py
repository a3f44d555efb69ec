"""train_ddp.py with each rank dividing by its own tokens, as if nothing were averaged over ranks."""

from __future__ import annotations

import torch

import train_ddp
from unsloth_ddp.training import trainer
from unsloth_ddp.training.step.loss import supervised_tokens


def own_count(batches, world_size, sum_over_ranks):
    """The tokens of this rank alone."""
    return torch.stack([supervised_tokens(b["labels"]) for b in batches]).sum().clamp(min=1).float()


if __name__ == "__main__":
    trainer.step_divisor = own_count
    train_ddp.main()
