"""Make DeepSpeed accumulate, average and save in fp32 when a model is trained in 16 bit, and save tied weights once.

DeepSpeed 0.19.8 accumulates the gradients of ZeRO-2 and ZeRO-3 in the dtype of the model unless
data_types.grad_accum_dtype is set, and averages them in it unless communication_data_type is set. The state dict that
Transformers saves holds the 16-bit copies of the weights; the fp32 weights are in the optimizer. With DDP and FSDP2
all three are fp32.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from unsloth_ddp.utils.files.json import write_json


def reduce_in_fp32(config: dict[str, Any]) -> None:
    """Let DeepSpeed accumulate and average gradients in fp32, unless `config` sets a dtype itself."""
    config.setdefault("communication_data_type", "fp32")
    config.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")


def gather_fp32_weights(
    parameters: Iterable[tuple[str, Parameter]],
    full_weight: Callable[[Parameter], Tensor | None] | None = None,
    *,
    keep: bool,
) -> dict[str, Tensor]:
    """Return the fp32 weights of all trained parameters, on the CPU; every rank calls this.

    Args:
        parameters: named_parameters() of the model, in the same order on every rank.
        full_weight: gathers one weight from the optimizers of all ranks; DeepSpeed's function by default.
        keep: whether this rank needs the weights; otherwise it returns an empty dict.
    """
    if full_weight is None:
        from deepspeed.utils import safe_get_full_fp32_param

        full_weight = safe_get_full_fp32_param
    weights = {}
    for name, parameter in parameters:
        full = full_weight(parameter) if parameter.requires_grad else None
        if keep and full is not None:
            weights[name] = full.detach().cpu()
    return weights


def replace_weights(saved: dict[str, Tensor], parameters: dict[str, Parameter], weights: dict[str, Tensor]) -> None:
    """Replace the 16-bit copies in `saved`, a state dict, by `weights`; tied names get the same weight.

    Args:
        parameters: every name in the model, tied ones too, with its parameter.
    """
    by_parameter = {id(parameters[name]): weight for name, weight in weights.items()}
    for name in saved:
        weight = by_parameter.get(id(parameters.get(name)))
        if weight is not None:
            saved[name] = weight


def tie_again(saved: dict[str, Tensor], parameters: dict[str, Parameter]) -> None:
    """Give the names of a tied weight one tensor in `saved`, a state dict, so that Transformers writes it once.

    accelerate copies the state dict of ZeRO-2 tensor by tensor, so a tied weight would be written under each name.

    Args:
        parameters: as of replace_weights.
    """
    first: dict[int, Tensor] = {}
    for name in saved.keys() & parameters.keys():
        saved[name] = first.setdefault(id(parameters[name]), saved[name])


def name_fp32_in_config(folder: Path) -> None:
    """Set the dtype in config.json to that of the saved weights; Transformers writes that of the model in memory."""
    path = folder / "config.json"
    if path.is_file():
        write_json(path, {**json.loads(path.read_text(encoding="utf-8")), "dtype": "float32"})
