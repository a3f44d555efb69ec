"""Read the weights of an adapter into a model, and refuse what does not fit: a key that is missing, or one that is not used.

PEFT only warns of such keys, and the model then answers as its base.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from unsloth_ddp.model.files.check import ADAPTER_WEIGHTS
from unsloth_ddp.model.modules import base_model
from unsloth_ddp.model.parts import adaptable_layers, path_in_class
from unsloth_ddp.utils.errors import UserError, one_line

# PEFT's names: PREFIX, the path of the module, and one of these.
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
EMBEDDING_A = ".lora_embedding_A"


def adapted_modules(folder: Path) -> list[str]:
    """Return the paths of the modules whose change an adapter's file holds as two matrices."""
    from safetensors import safe_open

    with safe_open(folder / ADAPTER_WEIGHTS, framework="numpy") as file:
        names = [name.removeprefix(PREFIX) for name in file.keys()]  # noqa: SIM118
    return sorted({name.removesuffix(end) for name in names for end in (A, EMBEDDING_A) if name.endswith(end)})


def changed_modules(folder: Path, model: Any) -> set[str]:
    """Return the paths of the modules that an adapter changes: those of its file, and layers of the text that its config names.

    Names in the config of an adapter of earlier versions could match modules of towers too.
    """
    from peft import PeftConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    config: Any = PeftConfig.from_pretrained(str(folder))
    paths = {path for path, _ in base_model(model).named_modules()}

    def here(names: Iterable[str]) -> set[str]:
        return {name if name in paths else path_in_class(name, model) for name in names}

    if not isinstance(config.target_modules, str):
        config.target_modules = here(config.target_modules or ())
    named = {path for path in adaptable_layers(model) if check_target_module_exists(config, path)}
    return named | (here(adapted_modules(folder)) & paths)


def read_weights(folder: Path, model: Any) -> dict[str, Tensor]:
    """Return the tensors of an adapter's file under the names that they have for this class of the base model.

    Adapters of earlier versions of the kit may have the names of a text class. Their adapters on towers, which text never
    reached, are left out: B is zero there.
    """
    from peft import load_peft_weights

    found: dict[str, Tensor] = load_peft_weights(str(folder), device="cpu")
    modules = {path for path, _ in base_model(model).named_modules()}
    plain = {path.replace(".base_layer", "") for path in modules}
    weights = {}
    for name, tensor in found.items():
        path, part = _split(name.removeprefix(PREFIX))
        if path not in plain and (known := path_in_class(path, model)) in plain:
            path = known
        weights[f"{PREFIX}{path}{part}"] = tensor
    end = ".lora_B" if any(path.endswith(".lora_B") for path in modules) else ""
    for name in [name for name in weights if name.endswith(B)]:
        module = name.removesuffix(B)
        if f"{module.removeprefix(PREFIX)}{end}" not in modules and not weights[name].any():
            del weights[name], weights[f"{module}{A}"]
    return weights


def _split(name: str) -> tuple[str, str]:
    """Return the path of a module and the rest of the name of its tensor."""
    path, dot, part = name.partition(".lora_")
    if not dot:
        path, dot, part = name.rpartition(".")
    return path, f"{dot}{part}"


def load_weights(model: Any, folder: Path, base: str) -> None:
    """Read an adapter into a model with an adapter of the same form.

    Args:
        base: name of the base model, for messages.

    Raises:
        UserError: naming a weight that the adapter lacks, or that the model does not have.
    """
    from peft import set_peft_model_state_dict

    from unsloth_ddp.model.loading.load import is_model_file_error

    try:
        read: Any = set_peft_model_state_dict(model, read_weights(folder, model))
    except Exception as error:
        if not is_model_file_error(error) and not isinstance(error, RuntimeError):
            raise
        raise UserError(f"The adapter in {folder} cannot be loaded: {one_line(error)}.") from None
    if read.unexpected_keys:
        raise UserError(
            f"The adapter in {folder} holds {sorted(read.unexpected_keys)[0]}, which its base model {base} does not have; "
            "check whether the base model was replaced."
        )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad or ".lora_" in name}
    if absent := sorted(trained.intersection(read.missing_keys)):
        raise UserError(
            f"The adapter in {folder} lacks {len(absent)} of its {len(trained)} weights (the first: {absent[0]}); check "
            "whether its file was replaced or settings.yaml was edited."
        )
