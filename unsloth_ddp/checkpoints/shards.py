"""Write the tensors of a sharded run as one safetensors file a rank, and read them on any number of ranks.

    weights/shard-00000-of-00002.safetensors     the parts of the trained weights that rank 0 holds
    optimizer/shard-00000-of-00002.safetensors   the same of the optimizer's state

The format is that of torch's HuggingFaceStorageWriter: a part stands under the name of its tensor, and the header tells
where in the tensor it begins. torch's own reader reads it here, and nothing is unpickled: torch's other format keeps
its index as a pickle. The files are not written by torch, because its writer builds the whole file of a rank in host
memory, twice, and sends plans between the ranks as pickles; parts that are written one by one need neither. No rank
waits for another while it writes.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from unsloth_ddp.utils.files.tensors import TensorFile, header_room

WEIGHTS, OPTIMIZER = "weights", "optimizer"
# The names that torch's HuggingFaceStorageReader looks for in a header.
OFFSETS_KEY, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


class MissingTensor(ValueError):
    """A checkpoint's shards do not hold what the run needs; the message names the tensor."""


def is_plain_shard(tensor: Tensor) -> bool:
    """Return whether every value of a tensor is held by some rank, as numbers that a file can hold."""
    if not isinstance(tensor, DTensor):
        return False
    split = all(isinstance(placement, (Shard, Replicate)) for placement in tensor.placements)
    return split and type(tensor.to_local()) in (Tensor, torch.nn.Parameter)


def write_shards(folder: Path, tensors: Mapping[str, Tensor], rank: int, world_size: int) -> Path:
    """Write the parts of `tensors` that this rank holds, and return the file.

    A tensor that all ranks hold is written by rank 0, and a part that several hold by the first of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"shard-{rank:05d}-of-{world_size:05d}.safetensors"
    offsets = {}
    with TensorFile(path, header_room(list(tensors))) as file:
        for name, tensor in tensors.items():
            part = _part_of(tensor, rank)
            if part is None:
                continue
            values, begin = part
            file.add(name, values)
            offsets[name] = {OFFSETS: begin}
        file.close({"format": "pt", OFFSETS_KEY: json.dumps(offsets, separators=(",", ":"))})
    return path


def _part_of(tensor: Tensor, rank: int) -> tuple[Tensor, list[int]] | None:
    """Return the part of a tensor that this rank has to write and where it begins; None if it has none."""
    if not isinstance(tensor, DTensor):
        return (tensor, [0] * tensor.dim()) if rank == 0 else None
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    copies = [
        at for at, placement in zip(coordinate, tensor.placements, strict=True) if isinstance(placement, Replicate)
    ]
    local = tensor.to_local()
    if any(copies) or local.numel() == 0:
        return None
    _, begin = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return local, list(begin)


class _Reader(HuggingFaceStorageReader):
    """torch's reader, which would read the header of every file again for each tensor."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(str(folder))
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata


class Shards:
    """The tensors in one folder of shards.

    Raises:
        MissingTensor: a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise MissingTensor(f"the shards in {folder} cannot be read: {error}") from None
        self._tensors: Any = self._metadata.state_dict_metadata

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name].properties.dtype

    def shape(self, name: str) -> torch.Size:
        return self._tensors[name].size

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill each tensor, or this rank's part of it, with what was saved; every rank reads by itself.

        Raises:
            MissingTensor: a tensor was not saved whole, or in another shape.
        """
        for name, tensor in tensors.items():
            if name not in self._tensors:
                raise MissingTensor(f"{self.folder} holds no {name}")
            if self.shape(name) != tensor.shape:
                raise MissingTensor(f"{name} in {self.folder} is {list(self.shape(name))} and not {list(tensor.shape)}")
            # torch's reader leaves what no file holds as it is.
            if sum(math.prod(part.sizes) for part in self._tensors[name].chunks) != tensor.numel():
                raise MissingTensor(f"{self.folder} holds only a part of {name}")
        if not tensors:
            return
        with warnings.catch_warnings():
            # It warns that ranks do not talk to each other, which is what is asked for.
            warnings.simplefilter("ignore")
            try:
                dcp.load(dict(tensors), storage_reader=_Reader(self.folder, self._metadata), no_dist=True)
            except CheckpointException as error:
                raise MissingTensor(f"{self.folder} cannot be read: {error}") from None

    def whole(self, name: str) -> Tensor:
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.read_into({name: tensor})
        return tensor
