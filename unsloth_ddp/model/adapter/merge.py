"""Merge an adapter into its base model, weight by weight where the adapter is plain LoRA on linear layers.

Only one weight of the base model is then in memory at a time; 4-bit weights of bitsandbytes are unpacked one by one.
Everything else (other quantized bases, DoRA, adapted embeddings and experts, models whose files use other weight names
than the model) is merged by PEFT, which holds the whole model.
"""

import gc
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.adapter.weights import load_weights
from unsloth_ddp.model.files.find import StoredTensor, model_folder, safetensors_files, stored_tensors
from unsloth_ddp.model.files.stored_weights import empty_model, keep_what_is_not_modelled, load_on_cpu, names_in_model
from unsloth_ddp.model.files.whole_weights import ADAPTER, describe_without_weights
from unsloth_ddp.model.loading.load import stop_at
from unsloth_ddp.model.parts import is_linear
from unsloth_ddp.utils.files.tensors import ModelFiles

# PEFT's names of the two matrices: PREFIX, the path of the module, and A or B.
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
WEIGHT = ".weight"
# bitsandbytes stores the constants of q_proj.weight as q_proj.weight.absmax and so on.
PART = f"{WEIGHT}."
QUANTIZED = ".quant_state."
# Where Transformers has the conversions that read a weight and its constants as one tensor.
QUANTIZERS = "transformers.integrations."
# Options of a LoraConfig that are off where the change of a weight is scale * B @ A.
EXTENSIONS = (
    "use_dora", "lora_bias", "fan_in_fan_out", "layer_replication", "modules_to_save", "target_parameters",
    "trainable_token_indices", "rank_pattern", "alpha_pattern", "megatron_config", "use_qalora",
    "alora_invocation_tokens", "use_bdlora", "velora_config", "monteclora_config", "arrow_config", "corda_config",
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
        model = _save_merged_by_peft(settings, adapter, target, stop_tokens)
    else:
        model = merge.model
        _save_merged_by_weight(merge, target, stop_tokens)
    keep_what_is_not_modelled(settings, model, target)
    transformers.AutoTokenizer.from_pretrained(adapter).save_pretrained(save_directory=target)
    del model, merge
    gc.collect()


# ---- weight by weight ----


@dataclass(frozen=True)
class Merge:
    """A merge that can be done weight by weight.

    Args:
        files: weight files of the base model, in order, each with the names of the weights that the model's class has.
        constants: of each 4-bit weight, the names and files of its quantization constants.
        changes: of each weight that the adapter changes, the matrices A and B.
        scale: factor of B @ A.
        model: the base model on the meta device.
        sixteen_bit: whether most of the stored weights are of 16 bits, or packed.
    """

    files: dict[Path, list[str]]
    constants: dict[str, dict[str, Path]]
    changes: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scale: float
    model: Any
    sixteen_bit: bool


def plan_merge(settings: Settings, adapter: Path) -> Merge | None:
    """Return the plan of a merge weight by weight; None if the base or the adapter does not allow it.

    Raises:
        UserError: the adapter changes modules that the base model does not have.
    """
    base, file = model_folder(settings), adapter / f"{ADAPTER}.safetensors"
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    if base is None or settings.trust_remote_code or not file.is_file() or not _is_plain(config):
        return None
    model = _without_memory(base, settings) if (paths := safetensors_files(base)) else None
    if model is None:
        return None
    stored = stored_tensors(paths)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    model_shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    model_names = names_in_model(model, stored)
    constants: dict[str, dict[str, Path]] = {}
    for name, tensor in stored.items():
        weight = name.partition(PART)[0] + WEIGHT
        if PART in name and (packed := model_names.get(weight)) in model_shapes:
            constants.setdefault(weight, {})[name] = tensor.path
            # Its file holds packed bytes.
            shapes[weight] = model_shapes[str(packed)]
    changes = _changes(adapter, model, shapes, model_names)
    if changes is None:
        return None
    inside = {name for names in constants.values() for name in names}
    if (
        any(QUANTIZED in name for name in stored)
        and not {model_names[name] for name in stored.keys() - inside} <= model_shapes.keys()
    ):
        # Packed weights under other names than the model's, such as each expert of a stack.
        return None
    written = [name for name in stored if name not in inside and model_names[name] is not None]
    files = {path: [name for name in written if stored[name].path == path] for path in paths}
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    return Merge(files, constants, changes, scale, model, _is_sixteen_bit(stored.values()))


def _is_plain(config: dict[str, Any]) -> bool:
    if config.get("peft_type") != "LORA" or config.get("init_lora_weights", True) not in PLAIN_BEGINNINGS:
        return False
    # An option is off if it is missing, None, False or empty.
    return config.get("bias", "none") == "none" and not any(config.get(name) for name in EXTENSIONS)


def _without_memory(base: Path, settings: Settings) -> Any:
    """Return a folder's model on the meta device; None if only Transformers reads the form of its quantized files."""
    import transformers

    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    # The merged model has 16 bits.
    if (quantization := config.get("quantization_config")) is not None and not quantization.get("load_in_4bit"):
        return None
    model = empty_model(base, settings)
    if (base / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(base)
    return model


def _changes(
    adapter: Path, model: Any, shapes: dict[str, list[int]], model_names: dict[str, str | None]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]] | None:
    """Return the adapter's matrices by the stored name of the changed weight; None if they do not fit the files.

    Args:
        shapes: of the stored weights.
        model_names: the model's name of each.
    """
    from peft import PeftConfig, load_peft_weights
    from peft.tuners.tuners_utils import check_target_module_exists

    weights, config = load_peft_weights(str(adapter), device="cpu"), PeftConfig.from_pretrained(str(adapter))
    linear = (path for path, module in model.named_modules() if is_linear(module))
    modules = [path for path in linear if check_target_module_exists(config, path)]
    if weights.keys() != {f"{PREFIX}{module}{part}" for module in modules for part in (A, B)}:
        return None
    by_name: dict[str | None, list[str]] = {}
    for name, model_name in model_names.items():
        by_name.setdefault(model_name, []).append(name)
    changes = {}
    for module in modules:
        pair = weights[f"{PREFIX}{module}{A}"], weights[f"{PREFIX}{module}{B}"]
        stored = by_name.get(f"{module}{WEIGHT}", [])
        if len(stored) != 1 or shapes[stored[0]] != [pair[1].shape[0], pair[0].shape[1]]:
            return None
        changes[stored[0]] = pair
    return changes


def _save_merged_by_weight(merge: Merge, target: Path, stop_tokens: Sequence[int]) -> None:
    merge.model.config.use_cache = True
    stop_at(merge.model, stop_tokens)
    describe_without_weights(
        lambda state_dict: merge.model.save_pretrained(save_directory=target, state_dict=state_dict), target
    )
    with ModelFiles(target, [name for names in merge.files.values() for name in names]) as out:
        for path, names in merge.files.items():
            # Opened again for each file, so that the pages read for the last one are released.
            with safe_open(path, "pt") as weights:
                for name in names:
                    weight = weights.get_tensor(name)
                    if name in merge.constants:
                        weight = _unpacked(weight, merge.constants[name])
                    if name in merge.changes:
                        first, second = merge.changes[name]
                        weight = weight.float().add_(second.float() @ first.float(), alpha=merge.scale)
                    # A 16-bit model keeps a few weights in fp32 on purpose.
                    stays_fp32 = merge.sixteen_bit and weight.dtype == torch.float32 and name not in merge.changes
                    out.add(name, weight if stays_fp32 or not weight.is_floating_point() else weight.to(torch.bfloat16))
        out.close()


def _is_sixteen_bit(stored: Iterable[StoredTensor]) -> bool:
    """Return whether most of the stored weights are of 16 bits, or packed."""
    count = {True: 0, False: 0}
    for tensor in stored:
        count[tensor.dtype not in ("F32", "F64")] += math.prod(tensor.shape)
    return count[True] > count[False]


def _unpacked(packed: torch.Tensor, constants: dict[str, Path]) -> torch.Tensor:
    """Return the values of a 4-bit weight.

    Args:
        constants: names and files of its quantization constants; a file may end between a weight and its constants.
    """
    from bitsandbytes.functional import QuantState, dequantize_4bit

    tensors = {}
    for name, path in constants.items():
        with safe_open(path, "pt") as weights:
            tensors[name] = weights.get_tensor(name)
    state = QuantState.from_dict(tensors, device=torch.device("cpu"))
    return dequantize_4bit(packed.flatten().view(torch.uint8).unsqueeze(1), state)


# ---- by PEFT ----


def _save_merged_by_peft(settings: Settings, adapter: Path, target: Path, stop_tokens: Sequence[int]) -> Any:
    """Load the base on the CPU in bf16 and merge there; 4-bit weights would round the adapter's changes away."""
    adapted = load_adapted(settings, adapter)
    _untie_adapted_embedding(adapted)
    merged = adapted.merge_and_unload()
    merged.config.use_cache = True
    stop_at(merged, stop_tokens)
    merged.save_pretrained(save_directory=target)
    return merged


def load_adapted(settings: Settings, adapter: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the base model with the adapter, on the CPU.

    Raises:
        UserError: a weight of the adapter is missing, or the base model does not have it.
    """
    from peft import PeftConfig, get_peft_model

    base = load_on_cpu(settings, dtype)
    if getattr(base, "quantization_method", None) is not None or "quantization_config" in base.config.to_dict():
        base = base.dequantize()
    # Without a GPU, Transformers unpacks some weights by itself.
    _forget_packing(base)
    config: Any = PeftConfig.from_pretrained(str(adapter))
    config.inference_mode = False
    adapted = get_peft_model(base, config)
    load_weights(adapted, adapter, str(settings.model))
    return adapted.eval()


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
    """Replace the conversions that unpacked a model's files by those of plain files, so that saving packs none."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    conversions = getattr(model, "_weight_conversions", None) or []
    unpacked = {target for conversion in conversions if _unpacks(conversion) for target in _targets(conversion)}
    plain = [conversion for conversion in get_model_conversion_mapping(model) if unpacked & _targets(conversion)]
    if unpacked:
        model._weight_conversions = [conversion for conversion in conversions if not _unpacks(conversion)] + plain


def _unpacks(conversion: Any) -> bool:
    return any(type(step).__module__.startswith(QUANTIZERS) for step in getattr(conversion, "operations", []))


def _targets(conversion: Any) -> set[str]:
    return {pattern.removesuffix("$") for pattern in conversion.target_patterns}
