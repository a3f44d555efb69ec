"""Merge an adapter into its base model, weight by weight where the adapter is plain LoRA on linear layers.

Only one weight of the base model is then in memory at a time; 4-bit weights of bitsandbytes are unpacked one by one. Everything
else (other quantized bases, DoRA, adapted embeddings and experts, models whose files use other weight names than the model)
is merged by PEFT, which holds the whole model.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.files import model_folder, safetensors_files
from unsloth_ddp.model.load import safetensors_only, stop_at
from unsloth_ddp.model.whole_weights import ADAPTER, describe_without_weights
from unsloth_ddp.utils.tensor_files import ModelFiles

WEIGHT = ".weight"
# bitsandbytes stores the constants of q_proj.weight as q_proj.weight.absmax and so on.
PART = f"{WEIGHT}."
QUANTIZED = ".quant_state."
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
# Transformers' conversion that reads a weight and its constants as one tensor.
UNPACKS = "Bnb4bitDeserialize"
# Options of a LoraConfig that are off where the change of a weight is scale * B @ A.
EXTENSIONS = (
    "use_dora", "lora_bias", "fan_in_fan_out", "layer_replication", "modules_to_save", "target_parameters",
    "trainable_token_indices", "rank_pattern", "alpha_pattern", "megatron_config", "use_qalora", "alora_invocation_tokens",
    "use_bdlora", "velora_config", "monteclora_config", "arrow_config", "corda_config",
)  # fmt: skip
# Values of init_lora_weights that do not change the base model's weights.
PLAIN_BEGINNINGS = (True, False, "gaussian")


def save_merged(settings: Settings, adapter: Path, target: Path, stop_tokens: Sequence[int]) -> None:
    """Merge the adapter at `adapter` into its base model and write the whole model, in bf16, to `target`.

    Generation with the written model stops at the base model's EOS and at `stop_tokens`.
    """
    import transformers

    merge = plan_merge(settings, adapter)
    if merge is None:
        _save_merged_by_peft(settings, adapter, target, stop_tokens)
    else:
        _save_merged_by_weight(merge, target, stop_tokens)
    transformers.AutoTokenizer.from_pretrained(adapter).save_pretrained(target)
    gc.collect()


# ---- weight by weight ----


@dataclass(frozen=True)
class Merge:
    """A merge that can be done weight by weight.

    Args:
        files: weight files of the base model, in order, each with the names of its weights.
        constants: of each 4-bit weight, the names and files of its quantization constants.
        adapter: file of the adapter.
        changed: names of the weights that the adapter changes.
        scale: factor of B @ A.
        model: the base model on the meta device.
    """

    files: dict[Path, list[str]]
    constants: dict[str, dict[str, Path]]
    adapter: Path
    changed: frozenset[str]
    scale: float
    model: Any


def plan_merge(settings: Settings, adapter: Path) -> Merge | None:
    """Return the plan of a merge weight by weight; None if the base or the adapter does not allow it."""
    base, file = model_folder(settings), adapter / f"{ADAPTER}.safetensors"
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    if base is None or settings.trust_remote_code or not file.is_file() or not _is_plain(config):
        return None
    model = _without_memory(base) if (paths := safetensors_files(base)) else None
    if model is None:
        return None
    shapes: dict[str, list[int]] = {}
    stored: dict[str, Path] = {}
    for path in paths:
        with safe_open(path, "pt") as weights:
            found = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        shapes |= found
        stored |= dict.fromkeys(found, path)
    own = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    constants: dict[str, dict[str, Path]] = {}
    for name, path in stored.items():
        if (weight := name.partition(PART)[0] + WEIGHT) in own and PART in name:
            constants.setdefault(weight, {})[name] = path
            # Its file holds packed bytes.
            shapes[weight] = own[weight]
    changed = _changed_weights(file, shapes)
    if changed is None or not changed <= {name for name, shape in own.items() if len(shape) == 2}:
        return None
    inside = {name for names in constants.values() for name in names}
    if any(QUANTIZED in name for name in stored) and not stored.keys() - inside <= own.keys():
        # Packed weights under other names than the model's, such as each expert of a stack.
        return None
    files = {path: [name for name, at in stored.items() if at == path and name not in inside] for path in paths}
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    return Merge(files, constants, file, changed, scale, model)


def _is_plain(config: dict[str, Any]) -> bool:
    if config.get("peft_type") != "LORA" or config.get("init_lora_weights", True) not in PLAIN_BEGINNINGS:
        return False
    # An option is off if it is missing, None, False or empty.
    return config.get("bias", "none") == "none" and not any(config.get(name) for name in EXTENSIONS)


def _without_memory(base: Path) -> Any:
    """Return a folder's model on the meta device; None if its files store weights in another form than the model."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(base)
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        if not quantization.get("load_in_4bit"):
            return None
        # The merged model has 16 bits.
        del config.quantization_config
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None):
        return None
    if (base / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(base)
    return model


def _changed_weights(adapter: Path, shapes: dict[str, list[int]]) -> frozenset[str] | None:
    """Return the weights that an adapter changes; None if it contains other tensors or does not fit the base's files."""
    with safe_open(adapter, "pt") as file:
        found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    modules = {name.removeprefix(PREFIX).removesuffix(A) for name in found if name.endswith(A)}
    if found.keys() != {f"{PREFIX}{module}{part}" for module in modules for part in (A, B)}:
        return None
    for module in modules:
        change = [found[f"{PREFIX}{module}{B}"][0], found[f"{PREFIX}{module}{A}"][1]]
        if shapes.get(f"{module}.weight") != change:
            return None
    return frozenset(f"{module}.weight" for module in modules)


def _save_merged_by_weight(merge: Merge, target: Path, stop_tokens: Sequence[int]) -> None:
    merge.model.config.use_cache = True
    stop_at(merge.model, stop_tokens)
    describe_without_weights(lambda state_dict: merge.model.save_pretrained(target, state_dict=state_dict), target)
    out = ModelFiles(target, [name for names in merge.files.values() for name in names])
    try:
        for path, names in merge.files.items():
            # Opened again for each file, so that the pages read for the last one are released.
            with safe_open(path, "pt") as weights, safe_open(merge.adapter, "pt") as adapter:
                for name in names:
                    weight = weights.get_tensor(name)
                    if name in merge.constants:
                        weight = _unpacked(weight, merge.constants[name])
                    if name in merge.changed:
                        module = f"{PREFIX}{name.removesuffix(WEIGHT)}"
                        change = adapter.get_tensor(f"{module}{B}").float() @ adapter.get_tensor(f"{module}{A}").float()
                        weight = weight.float().add_(change, alpha=merge.scale)
                    out.add(name, weight.to(torch.bfloat16) if weight.is_floating_point() else weight)
        out.close()
    finally:
        out.remove_unfinished()


def _unpacked(packed: torch.Tensor, constants: dict[str, Path]) -> torch.Tensor:
    """Return the values of a 4-bit weight.

    Args:
        constants: names and files of its quantization constants; a file may end between a weight and its constants.
    """
    from bitsandbytes.functional import QuantState, dequantize_4bit

    found = {}
    for name, path in constants.items():
        with safe_open(path, "pt") as weights:
            found[name] = weights.get_tensor(name)
    state = QuantState.from_dict(found, device=torch.device("cpu"))
    return dequantize_4bit(packed.flatten().view(torch.uint8).unsqueeze(1), state)


# ---- by PEFT ----


def _save_merged_by_peft(settings: Settings, adapter: Path, target: Path, stop_tokens: Sequence[int]) -> None:
    """Load the base on the CPU in bf16 and merge there; 4-bit weights would round the adapter's changes away."""
    import transformers
    from peft import PeftModel

    base: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(settings.model),
        revision=settings.model_revision,
        trust_remote_code=settings.trust_remote_code,
        use_safetensors=safetensors_only(settings),
        dtype=torch.bfloat16,
        device_map={"": "cpu"},
    )
    if getattr(base, "quantization_method", None) is not None or "quantization_config" in base.config.to_dict():
        base = base.dequantize()
        _forget_packing(base)
    adapted = PeftModel.from_pretrained(base, str(adapter))
    _untie_adapted_embedding(base)
    merged = adapted.merge_and_unload()
    merged.config.use_cache = True
    stop_at(merged, stop_tokens)
    merged.save_pretrained(target)


def _untie_adapted_embedding(model: Any) -> None:
    """Give the output head its own weight if it shares that of an adapted embedding.

    In training the head keeps the base model's weight. PEFT would add the embedding's change to both, and it writes the
    head's own weight only where the two differ.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    shared: Any = getattr(getattr(embedding, "base_layer", None), "weight", None)
    if head is not None and shared is not None and head.weight is shared:
        head.weight = torch.nn.Parameter(shared.detach().clone())


def _forget_packing(model: Any) -> None:
    """Drop the conversions that unpacked a model's files, which Transformers cannot revert when it saves the model."""
    known = getattr(model, "_weight_conversions", None)
    if known:
        model._weight_conversions = [one for one in known if not _unpacks(one)]


def _unpacks(conversion: Any) -> bool:
    return any(type(step).__name__ == UNPACKS for step in getattr(conversion, "operations", []))
