"""Configure the adapter for PEFT and Unsloth, and refuse module names that the model does not have."""

import difflib
from collections.abc import Mapping
from typing import Any

import torch

from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.adapter.experts import full_shape, names_in_layers, stacked_experts
from unsloth_ddp.model.modules import base_model
from unsloth_ddp.model.parts import adaptable_layers, is_linear, parts_beside_text
from unsloth_ddp.model.towers import trained_beside
from unsloth_ddp.utils.errors import UserError

# Name of an expert's linear layer -> name of the tensor in which Transformers stacks it. PEFT 0.21 maps names in the
# same way (peft/utils/transformers_weight_conversion.py).
NAMES_OF_EXPERTS = {
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj", "gate_up_proj": "gate_up_proj",
    "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj",
}  # fmt: skip
# The name that PEFT takes for the layer that routes tokens to experts.
ROUTER = "gate"
ALL_LINEAR = "all-linear"


def lora_config(settings: Settings, model: torch.nn.Module, tokenizer: Any = None) -> Any:
    """Return PEFT's LoraConfig for this model; without a tokenizer, that of an adapter without trained tokens.

    Raises:
        UserError: see target_modules, target_parameters and token_indices.
    """
    from peft import LoraConfig

    options = adapter_options(settings, model)
    if tokenizer is not None and settings.lora_trainable_tokens:
        options["trainable_token_indices"] = token_indices(settings, model, tokenizer)
    return LoraConfig(**options, task_type="CAUSAL_LM")


def token_indices(settings: Settings, model: Any, tokenizer: Any) -> dict[str, list[int]]:
    """Return the ids of lora_trainable_tokens for the embedding, and for the output head if it has weights of its own.

    Raises:
        UserError: a name is no token of the tokenizer, or the model has no row for it.
    """
    vocabulary = tokenizer.get_vocab()
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is None or head.weight is embedding.weight
    ends = [embedding] if tied else [embedding, head]
    rows = min(full_shape(end.weight)[0] for end in ends)
    for token in settings.lora_trainable_tokens:
        if vocabulary.get(token, rows) >= rows:
            lacks = f"has {rows:,} rows of the embedding" if token in vocabulary else "has no such token"
            raise UserError(
                f"lora_trainable_tokens {token[:100]}: model {settings.model} {lacks}; add it to a copy of the model "
                "(docs/rows.md, New tokens)."
            )
    ids = sorted({vocabulary[token] for token in settings.lora_trainable_tokens})
    return {path: ids for end in ends for path, module in model.named_modules() if module is end}


def adapter_options(settings: Settings, model: torch.nn.Module) -> dict[str, Any]:
    """Return the arguments that PEFT's LoraConfig and Unsloth's get_peft_model have in common."""
    return {
        "r": settings.lora_r,
        "lora_alpha": settings.lora_alpha,
        "lora_dropout": settings.lora_dropout,
        "target_modules": target_modules(settings, model),
        "target_parameters": target_parameters(settings, model) or None,
        "modules_to_save": settings.lora_modules_to_save or None,
        "use_rslora": settings.use_rslora,
    }


def target_modules(settings: Settings, model: torch.nn.Module) -> list[str]:
    """Return the modules to adapt for PEFT and Unsloth: leaf names where these match nothing else, else paths.

    Raises:
        UserError: there is no module that all-linear could adapt.
    """
    chosen = adapted_paths(settings, model)
    if not chosen and not target_parameters(settings, model):
        raise UserError(
            f"lora_target_modules {ALL_LINEAR}: {settings.model} has no linear layer in its text decoder; name the "
            "modules."
        )
    of_leaf: dict[str, set[str]] = {}
    for path, _ in base_model(model).named_modules():
        of_leaf.setdefault(path.rpartition(".")[2], set()).add(path)
    leaves = {path.rpartition(".")[2] for path in chosen}
    exact = {leaf for leaf in leaves if of_leaf[leaf] <= chosen}
    return sorted(exact) + sorted(path for path in chosen if path.rpartition(".")[2] not in exact)


def adapted_paths(settings: Settings, model: torch.nn.Module) -> set[str]:
    """Return the paths of the modules to adapt.

    all-linear and leaf names (q_proj) stand for layers that rows of text run through (see parts.adaptable_layers), a
    name with a dot for every module whose path ends with it. In MoE models PEFT takes some names for those of experts
    (see target_parameters), even if other layers, such as shared experts, have them too. all-linear leaves them out.
    """
    layers = adaptable_layers(model, trained_beside(model, settings.train_towers))
    names = [name for name in settings.lora_target_modules if not _tensors_called(name, model)]
    chosen = {path for name in names for path in _paths_named(name, model, layers)}
    if ALL_LINEAR in names:
        others = NAMES_OF_EXPERTS.keys() | {ROUTER} if stacked_experts(model) else set()
        chosen |= {path for path in layers if path.rpartition(".")[2] not in others}
    return chosen


def _paths_named(name: str, model: torch.nn.Module, layers: Mapping[str, Any]) -> list[str]:
    """Return the paths that a name in lora_target_modules stands for; `layers` are those of all-linear."""
    modules = dict(base_model(model).named_modules())
    if name in modules:
        return [name]
    ending = [path for path in modules if path.endswith(f".{name}")]
    if "." in name:
        return ending
    # Embeddings and convolutions of the text decoder can be named by their leaves too.
    beside = tuple(f"{path}." for path in parts_beside_text(model))
    return [p for p in ending if p in layers or not (is_linear(modules[p]) or p.startswith(beside))]


def target_parameters(settings: Settings, model: torch.nn.Module) -> list[str]:
    """Return the parameters outside linear layers that get an adapter: the experts that the settings name.

    lora_target_parameters names them, or lora_target_modules by the names that the experts' layers had before they were
    stacked (gate_proj, up_proj, down_proj), as in many guides.

    Raises:
        UserError: lora_dropout is set, which such adapters do not support.
    """
    names = settings.lora_target_parameters
    adapted = names_in_layers(model) if names == ["all-experts"] else list(names)
    for name in settings.lora_target_modules:
        adapted += [tensor for tensor in _tensors_called(name, model) if tensor not in adapted]
    if adapted and settings.lora_dropout:
        raise UserError(
            f"lora_dropout {settings.lora_dropout:g} cannot be combined with an adapter on {', '.join(adapted)[:200]}: "
            "PEFT adds it to the weights, so inputs cannot be dropped; give --lora_dropout 0, or leave these out."
        )
    return adapted


def _tensors_called(name: str, model: torch.nn.Module) -> list[str]:
    """Return the stacked weights that contain the experts' layers of this name; empty for a path or another name."""
    stacked = NAMES_OF_EXPERTS.get(name)
    return [tensor for tensor in names_in_layers(model) if stacked and tensor.rpartition(".")[2] in (stacked, name)]


def check_module_names(settings: Settings, model: torch.nn.Module) -> None:
    """Refuse an adapted head, and a name without a module or parameter, which PEFT ignores if another name matches.

    A name matches if it is the end of the dotted path.
    """
    modules = [f".{name}" for name, _ in model.named_modules()]
    for option in ("lora_target_modules", "lora_modules_to_save"):
        for name in getattr(settings, option):
            if option == "lora_target_modules" and name == ALL_LINEAR:
                continue
            matches = any(module.endswith(f".{name}") for module in modules)
            if not matches and not (option == "lora_target_modules" and _tensors_called(name, model)):
                raise UserError(f"{option} {name[:100]} is not a module of {settings.model}; {_advice(name, model)}")
            if option == "lora_target_modules":
                _check_target(name, settings, model)
    _check_parameter_names(settings, model)


def _check_target(name: str, settings: Settings, model: torch.nn.Module) -> None:
    """Refuse the output head, and a leaf name that stands for no layer which rows of text train."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    if any(module is head and f".{path}".endswith(f".{name}") for path, module in model.named_modules()):
        raise UserError(
            f"lora_target_modules {name[:100]} is the output head of {settings.model}, whose weight the loss "
            "multiplies directly, so an adapter on it would not be trained; leave it out, or give "
            f"--lora_modules_to_save {name[:100]}."
        )
    if _tensors_called(name, model) or _paths_named(
        name, model, adaptable_layers(model, trained_beside(model, settings.train_towers))
    ):
        return
    path = next(path for path, _ in base_model(model).named_modules() if f".{path}".endswith(f".{name}"))
    raise UserError(
        f"lora_target_modules {name[:100]} is a tower, a router or another module of {settings.model} that rows of "
        f"text do not train or should not; leave it out, or give its path to adapt it all the same ({path})."
    )


def _check_parameter_names(settings: Settings, model: torch.nn.Module) -> None:
    names, stacked = settings.lora_target_parameters, names_in_layers(model)
    if names == ["all-experts"] and stacked:
        return
    paths = [
        f".{path}.{name}"
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if not isinstance(module, torch.nn.Linear) and len(full_shape(parameter)) in (2, 3)
    ]
    for name in names:
        if not any(path.endswith(f".{name}") for path in paths):
            has = f"its experts are in {', '.join(stacked)}" if stacked else "it has no experts in stacked tensors"
            raise UserError(
                f"lora_target_parameters {name[:100]} is not a parameter of {settings.model} of 2 or 3 dimensions "
                f"outside linear layers; {has}, all-experts is given alone, and lora_target_modules names linear "
                "layers."
            )


def _advice(name: str, model: torch.nn.Module) -> str:
    """Return the advice at the end of the message that refuses a module name."""
    if "," in name:
        return f"separate names by spaces ({' '.join(name.replace(',', ' ').split())[:100]})."
    if name == ALL_LINEAR:
        return f"{ALL_LINEAR} is for lora_target_modules."
    with_weights = sorted({path.split(".")[-2] for path, _ in model.named_parameters() if "." in path})
    similar = difflib.get_close_matches(name[:100], with_weights, n=1, cutoff=0.6)
    return f"did you mean {similar[0]}?" if similar else f"it has {', '.join(with_weights[:20])}."
