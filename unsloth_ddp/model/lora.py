"""Describe the adapter to PEFT and Unsloth, and refuse module names that the model does not have."""

from __future__ import annotations

import difflib
from typing import Any

import torch

from unsloth_ddp.config.parse import Settings
from unsloth_ddp.utils.errors import UserError


def lora_config(settings: Settings) -> Any:
    """Return PEFT's description of the adapter."""
    from peft import LoraConfig

    targets = settings.lora_target_modules
    return LoraConfig(
        r=settings.lora_r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=targets[0] if targets == ["all-linear"] else targets,
        modules_to_save=settings.lora_modules_to_save or None,
        use_rslora=settings.use_rslora,
        task_type="CAUSAL_LM",
    )


def target_modules(settings: Settings, model: torch.nn.Module) -> list[str]:
    """Return the module names to adapt; all-linear means every linear layer except the output head, as in PEFT."""
    if settings.lora_target_modules != ["all-linear"]:
        return settings.lora_target_modules
    head = model.get_output_embeddings()  # type: ignore[operator]
    linear = (n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head)
    return sorted({name.rpartition(".")[2] for name in linear})


def check_module_names(settings: Settings, model: torch.nn.Module) -> None:
    """Refuse a name that matches no module, which PEFT ignores if another name matches.

    A name matches a module if it is the end of the module's dotted path.

    Raises:
        UserError: naming the most similar module.
    """
    modules = [f".{name}" for name, _ in model.named_modules()]
    for option in ("lora_target_modules", "lora_modules_to_save"):
        given = getattr(settings, option)
        if option == "lora_target_modules" and given == ["all-linear"]:
            continue
        for name in given:
            if not any(module.endswith(f".{name}") for module in modules):
                raise UserError(f"{option} {name[:100]} is not a module of {settings.model}; {_advice(name, model)}")


def _advice(name: str, model: torch.nn.Module) -> str:
    """Return the end of the sentence that refuses a module name."""
    if "," in name:
        return f"separate names by spaces ({' '.join(name.replace(',', ' ').split())[:100]})."
    if name == "all-linear":
        return "all-linear is given alone, in lora_target_modules."
    with_weights = sorted({path.split(".")[-2] for path, _ in model.named_parameters() if "." in path})
    similar = difflib.get_close_matches(name[:100], with_weights, n=1, cutoff=0.6)
    return f"did you mean {similar[0]}?" if similar else f"it has {', '.join(with_weights[:20])}."
