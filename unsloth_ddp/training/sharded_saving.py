"""Write the weights of checkpoints; save and load runs whose weights FSDP2 shards, without a whole model.

A checkpoint contains one shard per rank; with hybrid sharding only the shards of one replica. A run with adapters also
saves the adapter, which is small. The finished adapter or model is gathered weight by weight. Upstream gathers all
weights and the optimizer's state in the memory of rank 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unsloth_ddp.checkpoints.sharded_state import (
    give_back_whole_weights,
    load_optimizer,
    load_weights,
    named_tensors,
    save_optimizer,
    save_weights,
)
from unsloth_ddp.checkpoints.shards import MissingTensor
from unsloth_ddp.checkpoints.writer import Checkpoints
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.files.whole_weights import (
    describe_without_weights,
    gathered,
    saved_tensors,
    write_adapter,
    write_model,
)
from unsloth_ddp.utils.errors import UserError


@dataclass(eq=False)
class ShardedSaving:
    """Write and read the weights and the optimizer of a model that FSDP2 shards; every rank calls each method."""

    runtime: Runtime
    checkpoints: Checkpoints

    def save_model(
        self, model: Any, folder: Path, describe: Callable[[dict[str, Tensor]], None], *, checkpoint: bool
    ) -> None:
        """Write the adapter or model to `folder`, and for a checkpoint this rank's shard of the trained weights.

        Args:
            describe: writes everything but the weights (configs, tokenizer); it gets a state dict of empty tensors.
            checkpoint: whether a checkpoint is written; a whole model is then not gathered.
        """
        main, attempt = self.runtime.ranks.is_main, self.checkpoints.attempt
        give_back_whole_weights(model)
        tensors = named_tensors(model)

        def fetch(name: str) -> Tensor:
            return gathered(tensors[name])

        target = folder if main else None
        if hasattr(model, "peft_config"):
            names = self.runtime.broadcast_from_main(lambda: adapter_names(model, _empty(tensors)))
            if main:
                attempt(lambda: describe(_empty(tensors)))
            write_adapter(names, fetch, target, attempt)
        else:
            if main:
                attempt(lambda: describe_without_weights(describe, folder))
            if not checkpoint:
                write_model(model, list(saved_tensors(model, tensors)), fetch, target, attempt)
        if checkpoint:
            rank, parts = self.runtime.ranks.rank, self.runtime.parts
            attempt(lambda: self.checkpoints.wrote(save_weights(folder, model, rank, parts)))

    def save_optimizer(self, folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Write this rank's shard of the optimizer's state."""
        give_back_whole_weights(model)
        rank, parts = self.runtime.ranks.rank, self.runtime.parts
        written = save_optimizer(folder, model, optimizer, rank, parts, self.checkpoints.attempt)
        self.checkpoints.attempt(lambda: self.checkpoints.wrote(written))

    def load_weights(self, folder: Path, model: Any) -> None:
        """Read this rank's shard of the trained weights.

        Raises:
            UserError: on every rank, if a weight of any rank is missing from the checkpoint.
        """
        give_back_whole_weights(model)
        self._together(folder, lambda: load_weights(folder, model))

    def load_optimizer(self, folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Read this rank's shard of the optimizer's state.

        Raises:
            UserError: on every rank, if a state of any rank is missing from the checkpoint.
        """
        give_back_whole_weights(model)
        rank, parts = self.runtime.ranks.rank, self.runtime.parts
        self._together(folder, lambda: load_optimizer(folder, model, optimizer, rank, parts))

    def _together(self, folder: Path, read: Callable[[], None]) -> None:
        problem = None
        try:
            read()
        except MissingTensor as error:
            problem = str(error)
        problems = [rank_problem for rank_problem in self.runtime.gather(problem) if rank_problem]
        if problems:
            raise UserError(
                f"{folder} cannot be resumed: {problems[0]}. Give --resume another checkpoint, or start again with "
                "another --run_name."
            )


def adapter_names(model: Any, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return a mapping from the model's name of each adapter weight to the name that PEFT saves it under."""
    from peft import get_peft_model_state_dict

    names = {id(tensor): name for name, tensor in tensors.items()}
    saved = get_peft_model_state_dict(model, state_dict=tensors, adapter_name=model.active_adapter)
    return {names[id(tensor)]: name for name, tensor in saved.items()}


def _empty(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a tensor of its own without values for every name."""
    return {name: torch.empty(0) for name in tensors}


def saved_weights(model: Any) -> dict[str, Tensor]:
    """Return what save_pretrained would write of an unsharded adapter or model, under the model's names."""
    tensors = named_tensors(model)
    if hasattr(model, "peft_config"):
        return {name: tensors[name] for name in adapter_names(model, _empty(tensors))}
    return saved_tensors(model, tensors)


def write_weights(
    model: Any, weights: dict[str, Tensor], folder: Path, describe: Callable[[dict[str, Tensor]], None]
) -> None:
    """Write an unsharded adapter or model from its `saved_weights`, or copies of them.

    Args:
        describe: see ShardedSaving.save_model.
    """
    if hasattr(model, "peft_config"):
        empty = _empty(named_tensors(model))
        describe(empty)
        write_adapter(adapter_names(model, empty), weights.__getitem__, folder, lambda write: write())
    else:
        describe_without_weights(describe, folder)
        write_model(model, list(weights), weights.__getitem__, folder, lambda write: write())
