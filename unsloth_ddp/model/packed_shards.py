"""Cut 4-bit weights into the parts of ranks while a model is read, one layer at a time.

bitsandbytes packs a whole weight, since its constants belong to blocks of values and to all of them. Each rank packs it
on its device and keeps a part of the bytes; the constants stay whole, an eighth of a bit to half a bit a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers.core_model_loading import ConversionOps

from unsloth_ddp.model.shards import as_shard, part_of

# What PEFT reads of a 4-bit weight when it adds an adapter, and what tells how many values it stands for.
KEPT = ("compress_statistics", "quant_type", "quant_state", "blocksize", "quant_storage", "bnb_quantized")


class SplitPacked(ConversionOps):
    """Replace a packed weight by this rank's part of it; anything else passes through.

    Args:
        storage: dtype of the packed bytes, for FSDP2 a floating-point one.
        before: packs the weight, if it is not packed by an operation before this one.
    """

    def __init__(self, mesh: DeviceMesh, storage: torch.dtype, before: Any = None) -> None:
        self.mesh, self.storage, self.before = mesh, storage, before

    def __deepcopy__(self, memo: dict[int, Any]) -> SplitPacked:
        # Upstream copies the operations for every weight; process groups cannot be copied.
        return self

    def convert(
        self, input_dict: dict[str, Any], *args: Any, model: Any = None, full_layer_name: str = "", **others: Any
    ) -> dict[str, Any]:
        """Return the part under the name that the packed weight has."""
        if self.before is not None:
            input_dict = self.before.convert(input_dict, *args, model=model, full_layer_name=full_layer_name, **others)
        return {name: self._part(value, model, full_layer_name) for name, value in input_dict.items()}

    def _part(self, packed: Any, model: Any, path: str) -> Any:
        if not is_packed(packed):
            return packed
        module = model.get_submodule(path.rpartition(".")[0])
        module.quant_state, module.quant_storage = packed.quant_state, self.storage
        stored = packed.data.view(torch.uint8).flatten().view(self.storage).unsqueeze(1)
        weight = as_shard(part_of(stored, self.mesh), stored, self.mesh)
        weight.__dict__.update({name: getattr(packed, name) for name in KEPT if hasattr(packed, name)})
        return weight


def is_packed(weight: Any) -> bool:
    """Return whether this is, or will be, a weight that bitsandbytes packs to 4 bits."""
    return type(weight).__name__ == "Params4bit"


def split_quantized(quantizer: Any, mapping: list[Any], mesh: DeviceMesh) -> bool:
    """Let a quantizer of Transformers keep parts of the packed weights; return False if it is not the 4-bit one.

    Args:
        mapping: the conversions of the model's weights; those that read packed weights get one operation more.
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


def prepare_for_adapters(
    model: Any, *, use_gradient_checkpointing: bool, gradient_checkpointing_kwargs: dict[str, Any]
) -> Any:
    """Freeze all weights and switch gradient checkpointing on, as PEFT's prepare_model_for_kbit_training does.

    That would take packed parts for 16-bit weights, and it keeps weights that are not packed in fp32. FSDP2 gathers them
    in the precision of the run anyway, so they stay as they are, which halves the embedding and the output head.
    """
    for weight in model.parameters():
        weight.requires_grad = False
    if use_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs)
    return model
