"""Save and load runs whose weights FSDP2 splits over the ranks, with no process holding a whole model.

A checkpoint holds what each rank has, in shards, and one copy of a model that has several; of a run with adapters also
the adapter, which is small. The finished adapter or model is gathered weight by weight. Upstream gathers all weights, and
the optimizer's state, in the memory of rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
from unsloth_ddp.model.whole_weights import (
    describe_without_weights,
    gathered,
    saved_tensors,
    write_adapter,
    write_model,
)
from unsloth_ddp.utils.errors import UserError


class ShardedSaving:
    """Writes and reads the weights and the optimizer of a model that FSDP2 shards; every rank calls each method."""

    def __init__(self, runtime: Runtime, checkpoints: Checkpoints) -> None:
        self.runtime = runtime
        self.checkpoints = checkpoints

    def save_model(
        self, model: Any, folder: Path, describe: Callable[[dict[str, Tensor]], None], *, checkpoint: bool
    ) -> None:
        """Write the adapter or model to `folder`; of a checkpoint, this rank's part of the trained weights.

        Args:
            describe: writes everything but the weights (configs, tokenizer); it is given a state dict without values.
        """
        main, attempt = self.runtime.ranks.is_main, self.checkpoints.attempt
        give_back_whole_weights(model)
        tensors = named_tensors(model)

        def fetch(name: str) -> Tensor:
            return gathered(tensors[name])

        target = folder if main else None
        if hasattr(model, "peft_config"):
            names = self.runtime.broadcast_from_main(lambda: _adapter_names(model, tensors))
            if main:
                attempt(lambda: describe({name: torch.empty(0) for name in tensors}))
            write_adapter(names, fetch, target, attempt)
        else:
            if main:
                attempt(lambda: describe_without_weights(describe, folder))
            if not checkpoint:
                write_model(model, list(saved_tensors(model, tensors)), fetch, target, attempt)
        if checkpoint:
            ranks, copies = self.runtime.ranks, self.runtime.copies
            attempt(lambda: _each(self.checkpoints.wrote, save_weights(folder, model, ranks, copies)))

    def save_optimizer(self, folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Write this rank's part of the optimizer's state."""
        give_back_whole_weights(model)
        ranks, copies = self.runtime.ranks, self.runtime.copies
        written = save_optimizer(folder, model, optimizer, ranks, self.checkpoints.attempt, copies)
        self.checkpoints.attempt(lambda: _each(self.checkpoints.wrote, written))

    def load_weights(self, folder: Path, model: Any) -> None:
        """Read this rank's part of the trained weights.

        Raises:
            UserError: the checkpoint does not hold them, on some rank.
        """
        give_back_whole_weights(model)
        self._together(folder, lambda: load_weights(folder, model))

    def load_optimizer(self, folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Read this rank's part of the optimizer's state.

        Raises:
            UserError: the checkpoint does not hold it, on some rank.
        """
        give_back_whole_weights(model)
        ranks, copies = self.runtime.ranks, self.runtime.copies
        self._together(folder, lambda: load_optimizer(folder, model, optimizer, ranks, copies))

    def _together(self, folder: Path, read: Callable[[], None]) -> None:
        problem = None
        try:
            read()
        except MissingTensor as error:
            problem = str(error)
        problems = [found for found in self.runtime.gather(problem) if found]
        if problems:
            raise UserError(
                f"{folder} cannot be resumed: {problems[0]}. Give --resume another checkpoint, or start again with another --run_name."
            )


def _adapter_names(model: Any, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Return the model's name of each weight of the adapter, and the one that PEFT saves it under."""
    from peft import get_peft_model_state_dict

    names = {id(tensor): name for name, tensor in tensors.items()}
    saved = get_peft_model_state_dict(model, state_dict=tensors, adapter_name=model.active_adapter)
    return {names[id(tensor)]: name for name, tensor in saved.items()}


def _each(work: Callable[[Path], None], paths: Iterable[Path]) -> None:
    for path in paths:
        work(path)
