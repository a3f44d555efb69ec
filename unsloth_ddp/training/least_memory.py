"""Refuse a run that certainly does not fit, by the sizes of its weights, before the model is downloaded.

Only weights, and with --method full their gradients and optimizer states, are counted, so a run that passes may still run
out of memory; `python -m unsloth_ddp.plan` estimates the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.sharding import describe_sharding
from unsloth_ddp.model.whole_model import read_tensors, whole_bytes
from unsloth_ddp.training.optimizer_memory import optimizer_bytes
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.host_memory import available_bytes
from unsloth_ddp.utils.units import shown_bytes

# Bytes of a number in each type.
NUMBER_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def check_memory(settings: Settings, runtime: Runtime) -> None:
    """Refuse a run on GPUs that needs more GPU or host memory than there is; every rank calls this.

    Raises:
        UserError: on every rank, naming what is needed and what there is.
    """
    if runtime.device_type != "cuda":
        return
    import torch

    total = int(torch.cuda.get_per_process_memory_fraction() * torch.cuda.mem_get_info()[1])
    rooms = runtime.gather((total, available_bytes()))
    gpu, host = runtime.broadcast_from_main(lambda: least_bytes(read_tensors(settings), settings, runtime))
    layout = describe_sharding(runtime.sharding, runtime.offload, runtime.copies, runtime.ranks.world_size)
    way = f"method {settings.method} {'without sharding' if runtime.sharding == 'none' else f'with {layout}'}"
    for (total, available), location in zip(rooms, runtime.locations, strict=True):
        if gpu > total:
            raise UserError(
                f"model {settings.model} does not fit: {way} needs at least {shown_bytes(gpu)} on every GPU, and {location} "
                f"has {shown_bytes(total)}; python -m unsloth_ddp.plan with --gpu_memory lists what fits."
            )
        if available is not None and host > available:
            raise UserError(
                f"model {settings.model} does not fit into host memory: {way} needs at least {shown_bytes(host)} on every node, "
                f"and {shown_bytes(available)} are available to {location}; use more nodes, or "
                f"accelerate_configs/{runtime.sharding}.yaml with more GPUs."
            )


def least_bytes(tensors: Sequence[tuple[str, str, list[int]]], settings: Settings, runtime: Runtime) -> tuple[int, int]:
    """Return the bytes that every GPU, and the host memory of every node, has to hold at least.

    Args:
        tensors: (name, safetensors dtype, shape) of the tensors in the model's files.
    """
    sharding, offload, full = runtime.sharding, runtime.offload, settings.method == "full"
    zero = sharding in ("zero2", "zero3")
    precision = NUMBER_BYTES[runtime.precision]
    each = 1 if settings.fp8 else NUMBER_BYTES[settings.full_weights] if full and not zero else precision
    # Weights in FP8 may stay so, as packed ones do.
    stored = [(name, "U8" if dtype.startswith("F8") else dtype, shape) for name, dtype, shape in tensors]
    weights = whole_bytes(stored, each, packs=settings.method == "qlora")
    states = 0.0
    if full:
        # Gradients and optimizer states, and DeepSpeed's fp32 copies of 16-bit weights.
        master = 4 if zero else each
        copies = 4 if zero and precision < 4 else 0
        # Paged states may lie in host memory.
        kept = 0 if settings.optim.startswith("paged") else optimizer_bytes(settings.optim, master)
        states = weights / each * (master + copies + kept)
    world = runtime.ranks.world_size
    parts = {"none": 1, "zero2": world, "zero3": world, "fsdp2": runtime.parts}[sharding]
    held = weights if sharding == "zero2" else weights / parts
    gpu = held + states / parts
    if offload == "none":
        return int(gpu), 0
    host = states / parts
    if offload == "optimizer":
        gpu = held
    else:
        # FSDP2 loads a part on the GPU before it moves it.
        gpu = held if sharding == "fsdp2" else 0.0
        host += held
    return int(gpu), int(host * runtime.ranks.local_world_size)
