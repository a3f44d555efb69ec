"""Shard 4-bit weights over the ranks while a model is loaded, one weight at a time.

bitsandbytes quantizes a whole weight, because its constants belong to blocks of values and to the whole weight. Each rank
quantizes the weight on its device and keeps a shard of the bytes. The constants stay whole; they take an eighth of a bit
to half a bit per value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers.core_model_loading import ConversionOps

from unsloth_ddp.model.loading.shards import as_shard, part_of

# Attributes of a 4-bit weight that PEFT reads when it adds an adapter, and that give its number of values.
KEPT = ("compress_statistics", "quant_type", "quant_state", "blocksize", "quant_storage", "bnb_quantized")


class SplitPacked(ConversionOps):
    """Replace a 4-bit weight by this rank's shard; return other tensors unchanged.

    Args:
        storage: dtype in which the packed bytes are stored; FSDP2 needs a floating-point dtype.
        before: operation that quantizes the weight, if no earlier operation does.
    """

    def __init__(self, mesh: DeviceMesh, storage: torch.dtype, before: Any = None) -> None:
        self.mesh, self.storage, self.before = mesh, storage, before

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitPacked:
        # Upstream copies the operations for every weight; process groups cannot be copied.
        return self

    def convert(
        self, input_dict: dict[str, Any], *args: Any, model: Any = None, full_layer_name: str = "", **others: Any
    ) -> dict[str, Any]:
        """Return the shard under the name of the packed weight."""
        if self.before is not None:
            input_dict = self.before.convert(input_dict, *args, model=model, full_layer_name=full_layer_name, **others)
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
        for one in mapping:
            if any(type(operation).__name__ == "Bnb4bitDeserialize" for operation in getattr(one, "operations", [])):
                one.operations.append(SplitPacked(mesh, storage))
    else:
        packs = quantizer.get_quantize_ops
        quantizer.get_quantize_ops = lambda: SplitPacked(mesh, storage, packs())
    return True
