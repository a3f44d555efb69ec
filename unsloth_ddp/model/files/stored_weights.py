"""Relate the weights in a checkpoint's files to those of the model's class, and keep what the class does not have.

Transformers renames weights when it loads older checkpoints, and ignores those that its class does not model, such as
layers that predict several tokens (MTP). A model trained or merged from such a checkpoint is to contain them too.
"""

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.files.find import SAFETENSORS, in_folder, model_folder, safetensors_files, stored_tensors
from unsloth_ddp.model.loading.classes import model_class, read_config
from unsloth_ddp.model.loading.load import safetensors_only
from unsloth_ddp.model.modules import base_model
from unsloth_ddp.utils.files.tensors import ModelFiles
from unsloth_ddp.utils.units import counted

INDEX = f"{SAFETENSORS}.index.json"
# Tensors of old checkpoints that the model computes itself.
COMPUTED = re.compile(r"rotary_emb\.inv_freq$|position_ids$")
# Files beside weights, config and tokenizer that belong to a model.
BESIDE = ("*preprocessor_config.json", "processor_config.json", "audio_tokenizer_config.json", "LICENSE*", "NOTICE*")
PLAIN = ("BF16", "F16", "F32")


def empty_model(folder: Path, settings: Settings) -> Any:
    """Return the model of a folder on the meta device, in the class of its config.json, without quantization."""
    settings = in_folder(settings, folder)
    config = read_config(settings)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    with torch.device("meta"):
        auto = model_class(config, settings)
        return auto.from_config(config, dtype=torch.bfloat16, trust_remote_code=settings.trust_remote_code)


def load_on_cpu(settings: Settings, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return the model of the settings on the CPU, without an adapter and ready to evaluate."""
    auto = model_class(read_config(settings), settings)
    model: Any = auto.from_pretrained(
        str(settings.model),
        revision=settings.model_revision,
        trust_remote_code=settings.trust_remote_code,
        use_safetensors=safetensors_only(settings),
        dtype=dtype,
        device_map={"": "cpu"},
    )
    return model.eval()


def names_in_model(model: Any, stored: Iterable[str]) -> dict[str, str | None]:
    """Return the model's name of each stored weight; None for one that the class does not model.

    A weight that is made of several stored ones, or stored in another form, has their names in common.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, rename_source_key

    conversions = get_model_conversion_mapping(model)
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    renamings: list[Any] = [conversion for conversion in conversions if not isinstance(conversion, WeightConverter)]
    weights = dict(model.state_dict())
    modules = {path for path, _ in model.named_modules() if path}
    model_names: dict[str, str | None] = {}
    for name in stored:
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, weights)
        # As loading does: some patterns for older names match today's names too.
        renamed = name if renamed not in weights and name in weights else renamed
        # Constants of quantized weights have the module of their weight.
        is_modelled = (
            renamed in weights or renamed.rpartition(".")[0] in modules or renamed.partition(".weight.")[0] in modules
        )
        model_names[name] = renamed if is_modelled or COMPUTED.search(name) else None
    return model_names


def complete_result(settings: Settings, model: Any, folder: Path) -> None:
    """Add what the base model has beside its weights to the adapter or the model in `folder`."""
    if settings.method == "full":
        keep_what_is_not_modelled(settings, base_model(model), folder)
    elif (base := model_folder(settings)) is not None:
        copy_processor(base, folder)


def keep_what_is_not_modelled(settings: Settings, model: Any, folder: Path) -> None:
    """Complete a whole model in `folder` by what its base has beside: weights that its class lacks, processor files.

    Prints the weights by their number.

    Args:
        model: of the base's class; its weights are not read.
    """
    base = model_folder(settings)
    if base is None:
        return
    copy_processor(base, folder)
    stored, written = (stored_tensors(safetensors_files(place)) for place in (base, folder))
    model_names = names_in_model(model, stored)
    lost = sorted(name for name, model_name in model_names.items() if model_name is None and name not in written)
    if not lost:
        return
    count, kind = counted(len(lost), "weight"), type(model).__name__
    which = f"{count} of {settings.model} that {kind} does not model (the first: {lost[0]})"
    if any(stored[name].dtype not in PLAIN for name in lost):
        print(
            f"The {which} are quantized and not in {folder.name}; copy them from the base model if you need them.",
            flush=True,
        )
        return
    _add_tensors(folder, {name: stored[name].path for name in lost})
    print(f"Kept {which}; they are the base model's, unchanged.", flush=True)


def copy_processor(base: Path, folder: Path) -> None:
    """Copy the processor's files and the licence of a model to `folder`, unless it has files of these names."""
    for path in sorted({path for pattern in BESIDE for path in base.glob(pattern)}):
        if path.is_file() and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def _add_tensors(folder: Path, tensors: dict[str, Path]) -> None:
    """Add tensors to a model's weight files, in a file of their own that the index lists."""
    with ModelFiles(folder, list(tensors), stem="base", file_bytes=None) as files:
        for name, path in tensors.items():
            with safe_open(path, "pt") as weights:
                files.add(name, weights.get_tensor(name))
        files.close()
    everything = [*safetensors_files(folder), folder / "base.safetensors"]
    final = [
        path.rename(folder / f"model-{number:05d}-of-{len(everything):05d}.safetensors")
        for number, path in enumerate(everything, start=1)
    ]
    weight_map = {name: tensor.path.name for name, tensor in sorted(stored_tensors(final).items())}
    index = {"metadata": {"total_size": sum(path.stat().st_size for path in final)}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
