"""Shard tensors along the first dimension, as FSDP2 does: the last ranks may have smaller or empty shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import Module, Parameter


def placements(mesh: DeviceMesh) -> list[Placement]:
    """Return the placements of tensors on the mesh: sharded over its last dimension, replicated over the others."""
    return [*[Replicate()] * (mesh.ndim - 1), Shard(0)]


def rows_of(length: int, mesh: DeviceMesh) -> slice:
    """Return the rows of this rank out of `length`."""
    ranks, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    each = -(-length // ranks)
    return slice(min(rank * each, length), min((rank + 1) * each, length))


def part_shape(shape: Sequence[int], mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the shape of this rank's shard of a tensor with at least one dimension."""
    rows = rows_of(shape[0], mesh)
    return (rows.stop - rows.start, *shape[1:])


def part_of(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a copy of this rank's shard of a tensor, so that the whole can be freed."""
    return whole[rows_of(whole.shape[0], mesh)].clone()


def as_shard(part: Tensor, like: Tensor, mesh: DeviceMesh) -> Parameter:
    """Return this rank's shard as a DTensor parameter with the shape and requires_grad of `like`."""
    stride = torch.empty(like.shape, device="meta").stride()
    whole = DTensor.from_local(part, mesh, placements(mesh), run_check=False, shape=like.shape, stride=stride)
    return Parameter(whole, like.requires_grad)


def places(model: Module) -> Iterator[tuple[str, Module, str, Parameter]]:
    """Yield (path, module, name in the module, weight) of every weight; a tied weight comes several times."""
    for path, module in list(model.named_modules()):
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            yield f"{path}.{name}".lstrip("."), module, name, parameter


@contextlib.contextmanager
def copied_with_modules() -> Iterator[None]:
    """Make `copy.deepcopy` work for modules with sharded weights, which PEFT copies for modules_to_save.

    torch cannot copy all DTensors.
    """

    def copied(part: DTensor, memo: dict[int, Any]) -> Parameter:
        return as_shard(part.to_local().detach().clone(), part, part.device_mesh)

    # Inherited from Tensor otherwise.
    DTensor.__deepcopy__ = copied  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del DTensor.__deepcopy__
