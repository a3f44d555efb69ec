"""Find the experts of an MoE model, which Transformers stacks in 3-dim tensors instead of linear layers."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd

# Config fields for the number of experts of a layer, and for the number of experts per token.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")


def number_in(config: Any, names: tuple[str, ...]) -> int:
    """Return the first positive integer among the fields `names` of a config; 0 if there is none."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def stacked_experts(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the stacked weights of all experts by their full names; empty for a model without experts.

    Each has the shape (experts, out, in) or (experts, in, out). Convolutions and the
    positions of towers have 3-dim weights too and are left out.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = number_in(text, EXPERTS)
    if not count:
        return {}
    return {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        if not isinstance(module, _ConvNd)
        for name, parameter in module.named_parameters(recurse=False)
        if len(full_shape(parameter)) == 3 and full_shape(parameter)[0] == count
    }


def full_shape(parameter: Any) -> tuple[int, ...]:
    """Return the original shape of a weight, even if ZeRO-3 has emptied its tensor or it is quantized to 4 bit."""
    packed = getattr(parameter, "quant_state", None)
    return tuple(packed.shape if packed is not None else getattr(parameter, "ds_shape", parameter.shape))


def name_in_layer(full_name: str) -> str:
    """Return the name of a parameter without the path of its layer: model.layers.0.mlp.experts.w is mlp.experts.w."""
    return re.sub(r"^.*?\.\d+\.", "", full_name)


def names_in_layers(model: torch.nn.Module) -> list[str]:
    """Return the unique names of the stacked weights within their layers, sorted."""
    return sorted({name_in_layer(name) for name in stacked_experts(model)})


def adapted_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (name within the layer, tensor) of each parameter that PEFT adapts by target_parameters."""
    from peft.tuners.lora.layer import ParamWrapper

    for path, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            path = path.replace(".base_layer", "")
            yield name_in_layer(f"{path}.{module.parameter_name}"), module.get_param()


def describe_experts(model: torch.nn.Module) -> str | None:
    """Return whether the experts are trained, for the table before step 1; None for a model without experts."""
    stacked = stacked_experts(model)
    if not stacked:
        return None
    if all(parameter.requires_grad for parameter in stacked.values()):
        return "trained; the balancing loss is left out"
    adapted = {
        name for name, parameter in adapted_parameters(model) if any(parameter is tensor for tensor in stacked.values())
    }
    if not adapted:
        return "left as they are; --lora_target_parameters all-experts adapts them"
    return f"adapted ({', '.join(sorted(adapted))}); the balancing loss is left out"
