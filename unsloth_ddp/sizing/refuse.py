"""Refuse a run that certainly does not fit, by the sizes of its weights, before the model is downloaded.

Only weights, and with --method full their gradients and optimizer states, are counted, so a run that passes may still
run out of memory; `python -m unsloth_ddp.plan` estimates the rest.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.sharding import describe_sharding
from unsloth_ddp.model.files.check import base_of_reference, read_model_file
from unsloth_ddp.model.loading.whole_model import gpu_bytes, read_tensors, whole_bytes
from unsloth_ddp.sizing.optimizer_states import OF_BITSANDBYTES, OF_THE_WEIGHTS_TYPE, optimizer_bytes
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.host_memory import available_bytes
from unsloth_ddp.utils.memory_limits import NUMBER_BYTES
from unsloth_ddp.utils.units import shown_bytes

# (name, safetensors dtype, shape)
StoredTensor = tuple[str, str, list[int]]
# Tensors that the class of a text model may leave in the files: layers that predict further tokens, other media.
UNREAD = re.compile(r"(^|\.)(mtp|visual|vision|audio|multi_modal)")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Optimizers that are known to keep states for every weight in GPU memory; GaLore and APOLLO keep small ones, and paged
# states may lie in host memory.
WITH_STATES = {*OF_THE_WEIGHTS_TYPE, *OF_BITSANDBYTES, "adamw_torch_8bit", "adamw_torch_4bit"}


def check_memory(settings: Settings, runtime: Runtime) -> None:
    """Refuse a run on GPUs that needs more GPU or host memory than there is; every rank calls this.

    Raises:
        UserError: on every rank, naming what is needed and what there is.
    """
    if runtime.device_type != "cuda":
        return
    rooms = runtime.gather((gpu_bytes(), available_bytes()))
    gpu, host, what = runtime.broadcast_from_main(lambda: _needed(settings, runtime))
    layout = describe_sharding(runtime.sharding, runtime.offload, runtime.copies, runtime.ranks.world_size)
    way = f"method {settings.method} {'without sharding' if runtime.sharding == 'none' else f'with {layout}'}"
    for (total, available), location in zip(rooms, runtime.locations, strict=True):
        if gpu > total:
            raise UserError(
                f"{what} does not fit: {way} needs at least {shown_bytes(gpu)} on every GPU, and {location} "
                f"has {shown_bytes(total)}; python -m unsloth_ddp.plan with --gpu_memory lists what fits."
            )
        if available is not None and host > available:
            raise UserError(
                f"model {settings.model} does not fit into host memory: {way} needs at least {shown_bytes(host)} on "
                f"every node, and {shown_bytes(available)} are available to {location}; use more nodes, or "
                f"accelerate_configs/{runtime.sharding}.yaml with more GPUs."
            )


def _needed(settings: Settings, runtime: Runtime) -> tuple[int, int, str]:
    """Return the least bytes of GPU and host memory, and the model that needs them (or two: reference_model.py)."""
    tensors, model, reference = _read_certain(settings), f"model {settings.model}", base_of_reference(settings)
    gpu, host = least_bytes(tensors, settings, runtime)
    if reference is None:
        return gpu, host, model
    parts = runtime.parts if runtime.sharding == "fsdp2" else 1
    ours, theirs = (_weights(stored, settings, runtime) / parts for stored in (tensors, _read_certain(reference)))
    # It is there before gradients and optimizer states are, or in each step.
    both = int((gpu if settings.streaming else ours) + theirs)
    return (
        (both, host, f"{model} beside reference_model {settings.reference_model}") if both > gpu else (gpu, host, model)
    )


def _read_certain(settings: Settings) -> list[StoredTensor]:
    config = read_model_file(str(settings.model), "config.json", settings.model_revision)
    return certain_tensors(read_tensors(settings), config or {})


def certain_tensors(tensors: Sequence[StoredTensor], config: Mapping[str, Any]) -> list[StoredTensor]:
    """Return the tensors of a model's files without those that loading may leave out.

    These are layers and parts that a text model does not use, and an output head that is tied to the embedding.

    Args:
        config: content of the model's config.json.
    """
    text = config.get("text_config")
    configs = [text, config] if isinstance(text, dict) else [config]
    layers = next((c["num_hidden_layers"] for c in configs if isinstance(c.get("num_hidden_layers"), int)), None)
    # Transformers ties them by default.
    ties = [c.get("tie_word_embeddings") for c in configs]
    untied = False in ties and True not in ties

    def is_certain(name: str) -> bool:
        layer = LAYER.search(name)
        beyond = layers is not None and layer is not None and int(layer[1]) >= layers
        return not (beyond or UNREAD.search(name) or (name.endswith("lm_head.weight") and not untied))

    return [tensor for tensor in tensors if is_certain(tensor[0])]


def least_bytes(tensors: Sequence[StoredTensor], settings: Settings, runtime: Runtime) -> tuple[int, int]:
    """Return the bytes that every GPU, and the host memory of every node, has to hold at least.

    Args:
        tensors: see `certain_tensors`.
    """
    sharding, offload, full = runtime.sharding, runtime.offload, settings.method == "full"
    zero = sharding in ("zero2", "zero3")
    precision, each = NUMBER_BYTES[runtime.precision], _each(settings, runtime)
    weights = _weights(tensors, settings, runtime)
    states = 0.0
    if full:
        # Gradients and optimizer states, and DeepSpeed's fp32 copies of 16-bit weights.
        master = 4 if zero else each
        copies = 4 if zero and precision < 4 else 0
        paged = settings.optim.startswith("paged")
        state_bytes = optimizer_bytes(settings.optim, master) if settings.optim in WITH_STATES and not paged else 0
        states = weights / each * (master + copies + state_bytes)
    world = runtime.ranks.world_size
    parts = {"none": 1, "zero2": world, "zero3": world, "fsdp2": runtime.parts}[sharding]
    rank_weights = weights if sharding == "zero2" else weights / parts
    gpu = rank_weights + states / parts
    if offload == "none":
        return int(gpu), 0
    host = states / parts
    if offload == "optimizer":
        gpu = rank_weights
    else:
        # FSDP2 loads a part on the GPU before it moves it.
        gpu = rank_weights if sharding == "fsdp2" else 0.0
        host += rank_weights
    return int(gpu), int(host * runtime.ranks.local_world_size)


def _each(settings: Settings, runtime: Runtime) -> int:
    """Return the bytes of a value of the loaded weights."""
    zero = runtime.sharding in ("zero2", "zero3")
    whole = settings.method == "full" and not zero
    return 1 if settings.fp8 else NUMBER_BYTES[settings.full_weights if whole else runtime.precision]


def _weights(tensors: Sequence[StoredTensor], settings: Settings, runtime: Runtime) -> float:
    """Return the bytes of a model's weights after loading."""
    packs = settings.method == "qlora" and not settings.fp8
    # Weights in FP8 may stay so, as packed ones do; QLoRA may pack them.
    stored = [(name, "U8" if dtype.startswith("F8") and not packs else dtype, shape) for name, dtype, shape in tensors]
    return whole_bytes(stored, _each(settings, runtime), packs=packs)
