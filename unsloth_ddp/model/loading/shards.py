"""Shard tensors along the first dimension, as FSDP2 does: the last ranks may have smaller or empty shards.

bitsandbytes quantizes a whole weight to 4 bits, because its constants belong to blocks of values and to the whole
weight. Each rank quantizes the weight on its device and keeps a shard of the bytes. The constants stay whole; they take
an eighth of a bit to half a bit per value.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import Module, Parameter
from transformers.core_model_loading import ConversionOps

# Attributes of a 4-bit weight that PEFT reads when it adds an adapter, and that give its number of values.
KEPT = ("compress_statistics", "quant_type", "quant_state", "blocksize", "quant_storage", "bnb_quantized")


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


# Places of a weight: (path, module, name in the module).
Places = list[tuple[str, Module, str]]


def places(model: Module) -> list[tuple[Parameter, Places]]:
    """Return every weight with its places; a tied weight has several."""
    places_by_weight: dict[Parameter, Places] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            places_by_weight.setdefault(parameter, []).append((f"{path}.{name}".lstrip("."), module, name))
    return list(places_by_weight.items())


def put(weight: Parameter, weight_places: Places) -> None:
    """Put a weight into all places of the one that it replaces."""
    for _, module, name in weight_places:
        setattr(module, name, weight)


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


class SplitPacked(ConversionOps):
    """Replace a 4-bit weight by this rank's shard; return other tensors unchanged.

    Args:
        storage: dtype in which the packed bytes are stored; FSDP2 needs a floating-point dtype.
        packer: operation that quantizes the weight, if no earlier operation does.
    """

    def __init__(self, mesh: DeviceMesh, storage: torch.dtype, packer: Any = None) -> None:
        self.mesh, self.storage, self.packer = mesh, storage, packer

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Upstream copies the operations for every weight; process groups cannot be copied.
        return self

    def convert(
        self, input_dict: dict[str, Any], *args: Any, model: Any = None, full_layer_name: str = "", **others: Any
    ) -> dict[str, Any]:
        """Return the shard under the name of the packed weight."""
        if self.packer is not None:
            input_dict = self.packer.convert(input_dict, *args, model=model, full_layer_name=full_layer_name, **others)
        return {name: self._part(value, model, full_layer_name) for name, value in input_dict.items()}

    def _part(self, packed: Any, model: Any, path: str) -> Any:
        if type(packed).__name__ != "Params4bit":
            return packed
        module = model.get_submodule(path.rpartition(".")[0])
        module.quant_state, module.quant_storage = packed.quant_state, self.storage
        stored = packed.data.view(torch.uint8).flatten().view(self.storage).unsqueeze(1)
        weight = as_shard(part_of(stored, self.mesh), stored, self.mesh)
        weight.__dict__.update({name: getattr(packed, name) for name in KEPT if hasattr(packed, name)})
        return weight


def split_quantized(quantizer: Any, mapping: list[Any], mesh: DeviceMesh) -> bool:
    """Make Transformers' 4-bit quantizer keep shards of packed weights; return False for any other quantizer.

    Args:
        mapping: the conversions of the model's weights; SplitPacked is added to those that read packed weights.
    """
    if type(quantizer).__name__ != "Bnb4BitHfQuantizer":
        return False
    storage = quantizer.quantization_config.bnb_4bit_quant_storage
    if not storage.is_floating_point:
        storage = quantizer.quantization_config.bnb_4bit_compute_dtype
    if quantizer.pre_quantized:
        for conversion in mapping:
            if any(type(step).__name__ == "Bnb4bitDeserialize" for step in getattr(conversion, "operations", [])):
                conversion.operations.append(SplitPacked(mesh, storage))
    else:
        packs = quantizer.get_quantize_ops
        quantizer.get_quantize_ops = lambda: SplitPacked(mesh, storage, packs())
    return True
