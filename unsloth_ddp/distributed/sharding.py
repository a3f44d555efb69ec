"""Read the kind of sharding from the launcher's variables, and refuse settings that do not work with it.

none   every GPU holds the whole model, gradients and optimizer states (DDP)
zero2  gradients and optimizer states are sharded over the GPUs (DeepSpeed)
zero3  the weights too, from loading on (DeepSpeed)
fsdp2  the weights too (PyTorch), from loading on with the transformers backend, after loading with Unsloth

With fsdp2 there can be several copies of the model (hybrid sharding), each sharded over neighbouring ranks.

Beside it, what lies in host memory between its uses:

none        nothing
optimizer   optimizer states and the fp32 copies of trained weights, with the optimizer's step (DeepSpeed)
parameters  the weights too
"""

import importlib.util
import json
import os
import re
import shutil
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any, Literal

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.ranks import node_range
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.units import counted

Sharding = Literal["none", "zero2", "zero3", "fsdp2"]
Offload = Literal["none", "optimizer", "parameters"]

# The variables that accelerate launch sets for accelerate_configs/fsdp2.yaml; UNSLOTH_FSDP2=1 stands for all of them.
FSDP2_ENVIRONMENT = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_OFFLOAD_PARAMS": "false",
}
# Sizes of accelerate's parallelism_config; it reads them only with the switch.
PARALLELISM = "PARALLELISM_CONFIG_"
PARALLELISM_SWITCH = "ACCELERATE_USE_PARALLELISM_CONFIG"
COPIES, PARTS = "DP_REPLICATE_SIZE", "DP_SHARD_SIZE"
# accelerate replaces any optimizer by DeepSpeed's Adam for the CPU where it offloads, silently; these take the same
# steps.
CPU_ADAM = ("adamw_torch", "adamw_torch_fused")
# Variables with which Unsloth splits the model over the ranks itself, whatever the launcher says, and the values that
# do not. It would give the ranks of a group the same rows, and the kit gives them different ones.
SPLITS_OF_UNSLOTH = {
    "UNSLOTH_TP_SIZE": ("", "1"),
    "UNSLOTH_PP_SIZE": ("", "1"),
    "UNSLOTH_FSDP2": ("", "0", "1", "false", "true", "no", "yes", "off", "on"),
    "UNSLOTH_FSDP2_BACKEND": ("", "accelerate", "hf", "transformers"),
}


def is_on(environ: Mapping[str, str], name: str) -> bool:
    """Return whether a variable of the launcher switches something on."""
    return environ.get(name, "").lower() in ("1", "true", "yes", "on")


def shards_weights(sharding: Sharding) -> bool:
    """Return whether the sharding splits the weights over the GPUs."""
    return sharding in ("zero3", "fsdp2")


def loads_in_shards(sharding: Sharding, backend: str) -> bool:
    """Return whether the kit loads each rank's part of the model; DeepSpeed does so by itself."""
    return sharding == "fsdp2" and backend == "transformers"


def sharding_from_environment(environ: Mapping[str, str]) -> Sharding:
    """Return the kind of sharding that the launcher asks for.

    Raises:
        UserError: the kit does not support it.
    """
    for name, harmless in SPLITS_OF_UNSLOTH.items():
        if (value := environ.get(name, "").strip()).lower() not in harmless:
            raise UserError(
                f"{name}={value} lets Unsloth split the model over the ranks itself, which the kit cannot train; unset "
                "it, and shard with accelerate_configs/fsdp2.yaml (or UNSLOTH_FSDP2=1 under torchrun)."
            )
    sharding, sizes = _sharding(environ), _parallelism(environ)
    described = ", ".join(f"{name.lower()} {size}" for name, size in sizes.items())
    if sizes.keys() - {COPIES, PARTS} or (sizes and sharding != "fsdp2"):
        raise UserError(
            f"parallelism_config with {described} is not supported with sharding {sharding}; use "
            "accelerate_configs/fsdp2_hybrid.yaml (dp_replicate_size and dp_shard_size with FSDP2), or leave it out of "
            "the accelerate config."
        )
    return sharding


def copies_from_environment(environ: Mapping[str, str], world_size: int, nodes: int) -> int:
    """Return how many copies of the model the launcher asks for, each of which is split over world_size / copies ranks.

    Raises:
        UserError: the sizes are no numbers, or do not multiply to the number of processes.
    """
    sizes = _parallelism(environ)
    if sharding_from_environment(environ) != "fsdp2" or world_size == 1 or not sizes:
        return 1
    by_name = {COPIES: "1", PARTS: "1", **sizes}
    if by_name[COPIES] == "nodes":
        by_name[COPIES] = str(nodes)
    for name, size in by_name.items():
        if not re.fullmatch(r"0*[1-9]\d{0,8}", size):
            words = ", or nodes" if name == COPIES else ""
            raise UserError(f"{name.lower()} is {size}, but it takes a whole number above 0{words}.")
    copies, parts = int(by_name[COPIES]), int(by_name[PARTS])
    if PARTS not in sizes and world_size % copies == 0:
        parts = world_size // copies
    if copies * parts != world_size:
        described = " x ".join(f"{name.lower()} {by_name[name]}" for name in (COPIES, PARTS) if name in sizes)
        raise UserError(
            f"{described} does not fit {world_size} processes on {counted(nodes, 'node')}, whose number is the product "
            "of dp_replicate_size and dp_shard_size; use accelerate_configs/fsdp2_hybrid.yaml (one replica per node), "
            "or fsdp2.yaml."
        )
    if parts == 1:
        raise UserError(
            f"dp_replicate_size {copies} leaves one of {world_size} processes for each replica of the model, so that "
            "nothing is sharded; use accelerate_configs/fsdp2.yaml, or without sharding multi_node.yaml."
        )
    if copies > 1 and offload_from_environment(environ) != "none":
        raise UserError(
            f"dp_replicate_size {copies} with parameters in host memory has not been tried; use "
            "accelerate_configs/fsdp2_offload.yaml or fsdp2_hybrid.yaml."
        )
    return copies


def _parallelism(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the sizes of parallelism_config that are not 1, by name; UNSLOTH_FSDP2 switches it on too."""
    if not (is_on(environ, PARALLELISM_SWITCH) or is_on(environ, "UNSLOTH_FSDP2")):
        return {}
    sizes = {name.removeprefix(PARALLELISM): size for name, size in environ.items() if name.startswith(PARALLELISM)}
    return {name: size for name, size in sizes.items() if name.endswith("_SIZE") and size != "1"}


def _sharding(environ: Mapping[str, str]) -> Sharding:
    if is_on(environ, "ACCELERATE_USE_DEEPSPEED"):
        stage = str(_zero_section(environ).get("stage", environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")))
        if stage not in ("2", "3"):
            raise UserError(
                f"DeepSpeed ZeRO stage {stage} is not supported; use accelerate_configs/zero2.yaml or zero3.yaml."
            )
        return "zero2" if stage == "2" else "zero3"
    if is_on(environ, "UNSLOTH_FSDP2"):
        return "fsdp2"
    if is_on(environ, "ACCELERATE_USE_FSDP"):
        if environ.get("FSDP_VERSION", "1") != "2":
            raise UserError("FSDP version 1 is not supported; use accelerate_configs/fsdp2.yaml.")
        return "fsdp2"
    return "none"


def offload_from_environment(environ: Mapping[str, str]) -> Offload:
    """Return what the launcher asks to keep in host memory.

    Raises:
        UserError: the kit does not support it.
    """
    sharding = sharding_from_environment(environ)
    if sharding == "fsdp2":
        return "parameters" if is_on(environ, "FSDP_OFFLOAD_PARAMS") else "none"
    if sharding == "none":
        return "none"
    devices = {}
    for part in ("optimizer", "param"):
        section = f"offload_{part}"
        default = environ.get(f"ACCELERATE_DEEPSPEED_{section.upper()}_DEVICE", "none")
        devices[part] = str((_zero_section(environ).get(section) or {}).get("device", default)).lower()
        if devices[part] not in ("none", "cpu"):
            raise UserError(
                f"{section}_device {devices[part]} is not supported; use cpu "
                f"(accelerate_configs/{sharding}_offload.yaml) or none."
            )
    if devices["param"] == "cpu":
        if sharding == "zero2":
            raise UserError(
                "offload_param_device cpu needs ZeRO-3: ZeRO-2 keeps the weights whole; use zero3_offload.yaml."
            )
        if devices["optimizer"] == "none":
            raise UserError(
                "offload_param_device cpu without offload_optimizer_device cpu is not supported; use "
                "zero3_offload.yaml."
            )
        return "parameters"
    return "optimizer" if devices["optimizer"] == "cpu" else "none"


def _zero_section(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return zero_optimization of the DeepSpeed config file; empty without a file."""
    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if not path:
        return {}
    try:
        section = json.loads(Path(path).read_text())["zero_optimization"]
        return {**section, "stage": section["stage"]}
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"The DeepSpeed config {path} cannot be read, or has no zero_optimization.stage; correct it, or use "
            "accelerate_configs/zero2.yaml."
        ) from None


def check_sharding(sharding: Sharding, settings: Settings, device_type: str, world_size: int) -> None:
    """Refuse settings that do not work with this sharding; model/backend.py refuses a backend."""
    if sharding == "none":
        return
    if settings.lora_trainable_tokens and settings.method != "full" and shards_weights(sharding):
        raise UserError(
            f"lora_trainable_tokens {' '.join(settings.lora_trainable_tokens)[:100]} does not work with sharding "
            f"{sharding}, whose "
            "weights PEFT cannot read row by row; use accelerate_configs/ddp.yaml or zero2.yaml, or "
            "--lora_modules_to_save with the "
            "embedding and the output head."
        )
    if settings.reference_model and sharding != "fsdp2":
        raise UserError(
            f"reference_model {settings.reference_model} does not work with sharding {sharding}, as DeepSpeed prepares "
            "one model; use accelerate_configs/fsdp2.yaml or ddp.yaml."
        )
    if settings.reference_model and settings.streaming:
        raise UserError(
            f"reference_model {settings.reference_model} does not work with sharding {sharding} and streaming, as a "
            "step would gather two models; leave --streaming out, or use accelerate_configs/ddp.yaml."
        )
    if sharding in ("zero2", "zero3") and device_type != "cuda":
        raise UserError(f"sharding {sharding} needs GPUs and none is used here; use accelerate_configs/cpu.yaml.")
    # An elastic job may come down to one process, which holds every shard until others are back.
    if sharding == "fsdp2" and world_size == 1 and not node_range():
        raise UserError(
            "sharding fsdp2 shards a model over several GPUs, but one process was started; use "
            "accelerate_configs/single_gpu.yaml."
        )
    if sharding == "fsdp2" and _reads_whole_weights(settings.optim):
        raise UserError(
            f"optim {settings.optim} cannot be combined with sharding fsdp2, whose sharded weights it cannot update; "
            "give --optim adamw_torch_fused, or adamw_torch_8bit for 8-bit states."
        )
    if sharding in ("zero2", "zero3") and importlib.util.find_spec("deepspeed") is None:
        raise UserError(f"sharding {sharding} needs DeepSpeed, which is not installed; run uv sync --extra deepspeed.")
    if sharding == "zero3" and settings.method == "qlora":
        raise UserError(
            "method qlora cannot be combined with sharding zero3, which cannot gather packed 4-bit weights; use fsdp2, "
            "or zero2."
        )
    if shards_weights(sharding) and settings.gradient_checkpointing == "unsloth":
        raise UserError(
            f"gradient_checkpointing unsloth cannot be combined with sharding {sharding}: what it moves to host memory "
            "is recomputed when the weights are already sharded again; use --gradient_checkpointing torch."
        )


def _reads_whole_weights(optimizer: str) -> bool:
    """Return whether an optimizer cannot step on DTensors: Adafactor, and bitsandbytes' kernels."""
    if optimizer.startswith("adamw_torch"):
        return False
    return optimizer in ("adafactor", "ademamix") or any(
        word in optimizer for word in ("8bit", "32bit", "paged", "bnb")
    )


def check_offload(offload: Offload, sharding: Sharding, settings: Settings, device_type: str = "cuda") -> None:
    """Refuse settings that do not work with weights or optimizer states in host memory."""
    if offload == "none":
        return
    config = f"accelerate_configs/{sharding}.yaml"
    if device_type != "cuda":
        raise UserError(
            f"sharding {sharding} with {offload} in host memory needs GPUs to compute on, and none is used here; use "
            f"{config}."
        )
    if offload == "parameters" and settings.method == "qlora":
        raise UserError(
            "method qlora cannot be combined with parameters in host memory, because 4-bit weights have no CPU "
            f"kernels; use {config}, or --method lora."
        )
    if sharding == "fsdp2":
        if "8bit" in settings.optim or "4bit" in settings.optim or settings.optim.startswith("paged"):
            raise UserError(
                f"optim {settings.optim} needs a GPU, but with parameters in host memory the optimizer runs on the "
                f"CPU; give --optim adamw_torch_fused, or use {config}."
            )
        return
    if settings.optim not in CPU_ADAM:
        raise UserError(
            f"optim {settings.optim} cannot be combined with an optimizer in host memory, because DeepSpeed uses its "
            f"own CPU Adam there; give --optim adamw_torch, or use {config}."
        )
    compiler = os.environ.get("CXX") or "c++"
    if not (shutil.which(compiler) or shutil.which("g++")):
        raise UserError(
            f"sharding {sharding} with its optimizer in host memory compiles DeepSpeed's Adam for the CPU, and this "
            f"machine has no C++ compiler ({compiler}); install g++, or use {config}."
        )


def describe_sharding(sharding: Sharding, offload: Offload, copies: int = 1, world_size: int = 1) -> str:
    """Return the sharding in words, with the number of copies and what lies in host memory."""
    offloaded = {"optimizer": "optimizer", "parameters": "parameters and optimizer"}
    hybrid = [f"{copies} copies, each split over {counted(world_size // copies, 'process')}"] if copies > 1 else []
    return ", ".join([sharding, *hybrid, *([f"{offloaded[offload]} in host memory"] if offload != "none" else [])])


def sharding_warnings(sharding: Sharding, settings: Settings, nodes: int, copies: int = 1) -> list[str]:
    """Return sentences for the main process to print: settings without effect, and what will be slow."""
    warnings = []
    if shards_weights(sharding) and settings.compare_answers:
        warnings.append(
            f"compare_answers is ignored: sharding {sharding} leaves no GPU the whole model to answer with."
        )
    if sharding in ("zero2", "zero3") and settings.method == "full" and settings.full_weights == "bf16":
        warnings.append(
            f"full_weights bf16 is ignored: sharding {sharding} keeps fp32 master weights, sharded over the GPUs."
        )
    if shards_weights(sharding) and copies % nodes:
        faster = "zero2.yaml" if sharding == "zero3" else "fsdp2_hybrid.yaml"
        where = "the model fits on each GPU" if sharding == "zero3" else "it fits on a node"
        warnings.append(
            f"Sharding {sharding} over {nodes} nodes gathers every layer's weights over the network in every step, "
            f"because no node holds the whole model; unless InfiniBand or the like joins the nodes, use {faster} where "
            f"{where}."
        )
    return warnings


def complete_environment(sharding: Sharding, environ: MutableMapping[str, str]) -> None:
    """Set the variables that a kind of sharding needs before libraries are imported; variables that are set stay.

    With them UNSLOTH_FSDP2=1 under torchrun means the same as accelerate_configs/fsdp2.yaml.
    """
    # The kit makes the mesh of copies and parts: accelerate knows no "nodes", and has no FSDP2 on a CPU.
    environ.pop(PARALLELISM_SWITCH, None)
    if sharding == "fsdp2":
        for name, value in FSDP2_ENVIRONMENT.items():
            environ.setdefault(name, value)
    if sharding == "zero3":
        # A block that Unsloth compiles as one region cannot gather its weights while it runs: step 1 never ends.
        environ.setdefault("UNSLOTH_BLOCK_COMPILE", "0")
