"""Save and load the trained weights and the optimizer of a sharded run, each rank its own part.

Every number that is split as its weight is goes to the shards, which any number of ranks can read. The rest of an
optimizer's state is what is the same on all ranks (counters, options), in optimizer.pt, and what is packed in a way of
its own (torchao's 8-bit states), in optimizer_rank_N.pt, which the same number of ranks has to read. Of several copies
of a model the ranks of the first one write, and all read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from unsloth_ddp.checkpoints.shards import OPTIMIZER, WEIGHTS, MissingTensor, Shards, is_plain_shard, write_shards

OPTIMIZER_FILE = "optimizer.pt"
# What wrappers add to the name of a module.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def plain_name(name: str) -> str:
    """Return the name of a weight without what wrappers add to it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that belong to a model's state, with their names."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def give_back_whole_weights(model: torch.nn.Module) -> None:
    """Make every weight the part that its rank holds: after an evaluation some of them are still whole.

    FSDP2 keeps the last layers whole until a backward pass, and until then a model names other tensors as its weights
    than those that the optimizer knows.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def named_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights and persistent buffers of a model under all of their names."""
    weights = {plain_name(name): weight for name, weight in model.named_parameters(remove_duplicate=False)}
    return weights | {plain_name(name): buffer for name, buffer in persistent_buffers(model)}


def trained_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return what training changes: trainable weights and, where no weight is frozen, buffers."""
    tensors: dict[str, Tensor] = {
        plain_name(name): weight for name, weight in model.named_parameters() if weight.requires_grad
    }
    if all(weight.requires_grad for weight in model.parameters()):
        tensors |= {plain_name(name): buffer for name, buffer in persistent_buffers(model)}
    return tensors


def has_shards(checkpoint: Path) -> bool:
    """Return whether a checkpoint holds weights in shards."""
    return (checkpoint / WEIGHTS).is_dir()


def save_weights(checkpoint: Path, model: torch.nn.Module, rank: int, parts: int) -> list[Path]:
    """Write this rank's part of the trained weights, and return its file, if it writes one.

    Args:
        parts: processes that each copy of the model is split over; those of the first copy write.
    """
    return [write_shards(checkpoint / WEIGHTS, trained_tensors(model), rank, parts)] if rank < parts else []


def load_weights(checkpoint: Path, model: torch.nn.Module) -> None:
    """Read this rank's part of the trained weights into the model.

    Raises:
        MissingTensor: the checkpoint does not hold a weight of this model.
    """
    with torch.no_grad():
        Shards(checkpoint / WEIGHTS).read_into(trained_tensors(model))


# ---- optimizer ----


def save_optimizer(
    checkpoint: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, parts: int,
    attempt: Callable[[Callable[[], Any]], Any],
) -> list[Path]:  # fmt: skip
    """Write this rank's part of the optimizer's state, and return its files.

    Args:
        parts: see save_weights.
        attempt: runs a write, and records its failure.
    """
    if rank >= parts:
        return []
    names = _names(model)
    split: dict[str, Tensor] = {}
    split_keys: dict[str, list[str]] = {}
    common: dict[str, dict[str, Any]] = {}
    unsplit: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[parameter]
        for key, value in state.items():
            if _as_parameter(value, parameter):
                split[f"{name}.{key}"] = value
                split_keys.setdefault(name, []).append(key)
            elif not isinstance(value, Tensor) or value.dim() == 0:
                common.setdefault(name, {})[key] = value
            else:
                unsplit.setdefault(name, {})[key] = value
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    written: list[Path] = []

    def save(name: str, content: Any) -> None:
        checkpoint.mkdir(parents=True, exist_ok=True)
        torch.save(content, checkpoint / name)
        written.append(checkpoint / name)

    if rank == 0:
        attempt(
            lambda: save(OPTIMIZER_FILE, {"groups": groups, "state": common, "split": split_keys, "own": bool(unsplit)})
        )
    if unsplit:
        attempt(lambda: save(_own_file(rank), {"world_size": parts, "state": unsplit}))
    attempt(lambda: written.append(write_shards(checkpoint / OPTIMIZER, split, rank, parts)))
    return written


def load_optimizer(
    checkpoint: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, parts: int
) -> None:
    """Read this rank's part of the optimizer's state into the optimizer, whatever the number of ranks that wrote it.

    Raises:
        MissingTensor: the checkpoint does not hold a state of this optimizer, or only for another number of parts.
    """
    names = _names(model)
    saved = torch.load(checkpoint / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
    unsplit: dict[str, dict[str, Any]] = {}
    if saved["own"]:
        file = checkpoint / _own_file(rank % parts)
        mine: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True) if file.is_file() else {}
        if mine.get("world_size") != parts:
            raise MissingTensor(
                f"the state of this optimizer in {checkpoint} can be read by as many processes as wrote it only; start "
                "as many, or choose another optimizer for a run that changes their number"
            )
        unsplit = mine["state"]
    groups = {frozenset(group["params"]): group for group in saved["groups"]}
    shards = Shards(checkpoint / OPTIMIZER)
    state: dict[int, dict[str, Any]] = {}
    split: dict[str, Tensor] = {}
    param_groups = []
    index = 0
    for group in optimizer.param_groups:
        same = groups.get(frozenset(names[parameter] for parameter in group["params"]))
        if same is None:
            raise MissingTensor(f"the optimizer in {checkpoint} has other groups of weights")
        param_groups.append({**same, "params": list(range(index, index + len(group["params"])))})
        for parameter in group["params"]:
            name = names[parameter]
            values = {**saved["state"].get(name, {}), **unsplit.get(name, {})}
            for key in saved["split"].get(name, ()):
                full = f"{name}.{key}"
                if full not in shards.names:
                    raise MissingTensor(f"{checkpoint} holds no {full}")
                values[key] = split[full] = torch.zeros_like(parameter, dtype=shards.dtype(full), requires_grad=False)
            if values:
                state[index] = values
            index += 1
    shards.read_into(split)
    optimizer.load_state_dict({"state": state, "param_groups": param_groups})


def _names(model: torch.nn.Module) -> dict[Tensor, str]:
    return {weight: plain_name(name) for name, weight in model.named_parameters()}


def _as_parameter(value: Any, parameter: Tensor) -> bool:
    """Return whether a state is split over the ranks as its weight is."""
    if not isinstance(parameter, DTensor):
        return False
    same = isinstance(value, DTensor) and value.shape == parameter.shape and value.placements == parameter.placements
    return same and is_plain_shard(value)


def _own_file(rank: int) -> str:
    return f"optimizer_rank_{rank}.pt"
