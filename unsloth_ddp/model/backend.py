"""Decide once, before Unsloth or Transformers is imported, which of the two trains a model."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import Backend, Runtime
from unsloth_ddp.distributed.sharding import Offload, Sharding
from unsloth_ddp.model.files.check import is_padded_by_unsloth, read_model_file
from unsloth_ddp.model.loading.whole_model import bytes_while_loading, gpu_bytes
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.memory_limits import FILLED
from unsloth_ddp.utils.units import shown_bytes


@dataclass(frozen=True)
class BackendFacts:
    """Hold what the choice of the backend depends on.

    Args:
        cuda: whether the run uses GPUs.
        images: whether rows have images.
        padded: whether Unsloth would pad rows of the model that Transformers packs (files/check.py).
        quantized: whether the weights are quantized in the model's files.
        shares_keys: whether layers of the model take the keys and values of earlier layers.
        loading: bytes of loading the whole model on a GPU and then sharding it; None if they are not known.
        room: bytes of the smallest GPU.
    """

    settings: Settings
    cuda: bool = True
    sharding: Sharding = "none"
    offload: Offload = "none"
    images: bool = False
    padded: bool = False
    quantized: bool = False
    shares_keys: bool = False
    loading: float | None = None
    room: float = 0


def choose_backend(facts: BackendFacts) -> tuple[Backend, str | None]:
    """Return the backend of a run, and why `--backend auto` takes Transformers on a GPU.

    The cause follows "Using backend transformers, " in a sentence.

    Raises:
        UserError: --backend unsloth cannot train this.
    """
    settings, too_large = facts.settings, _too_large_to_load(facts)
    if settings.backend == "unsloth":
        _check_unsloth(facts, too_large)
        return "unsloth", None
    if settings.backend == "transformers" or not facts.cuda:
        return "transformers", None
    if subject := _trained_by_transformers(facts):
        return "transformers", f"because Unsloth is not taken for {subject}"
    if too_large:
        return "transformers", f"which loads model {settings.model} in shards: {too_large}"
    return "unsloth", None


def _too_large_to_load(facts: BackendFacts) -> str | None:
    """Return why Unsloth cannot load the whole model, which it does before FSDP2 shards it."""
    if facts.sharding != "fsdp2" or facts.loading is None or facts.loading <= FILLED * facts.room:
        return None
    needed, room = shown_bytes(facts.loading), shown_bytes(facts.room)
    return f"Unsloth would load it whole, which takes {needed}, and a GPU has {room}"


def _check_unsloth(facts: BackendFacts, too_large: str | None) -> None:
    """Refuse --backend unsloth where it cannot train."""
    settings = facts.settings
    if not facts.cuda:
        raise UserError(
            "backend unsloth needs an accelerator and none is found here; use --backend transformers, or auto."
        )
    if facts.sharding == "zero3" and settings.method == "full":
        raise UserError(
            "method full with sharding zero3 does not train correctly with Unsloth; use --backend transformers, or "
            "sharding fsdp2 or zero2."
        )
    if facts.offload == "parameters":
        raise UserError(
            "parameters in host memory have not been tried with Unsloth, whose kernels read the weights directly; use "
            f"--backend transformers, or accelerate_configs/{facts.sharding}.yaml."
        )
    if facts.shares_keys and settings.gradient_checkpointing not in ("auto", "none"):
        raise UserError(
            f"gradient_checkpointing {settings.gradient_checkpointing} with backend unsloth would lose gradients of "
            f"model {settings.model}, whose layers take the keys and values of earlier layers; give --backend "
            "transformers, or --gradient_checkpointing none."
        )
    if too_large:
        raise UserError(f"model {settings.model}: {too_large}; give --backend transformers, which loads it in shards.")


def _trained_by_transformers(facts: BackendFacts) -> str | None:
    """Return what Unsloth cannot train, or Transformers trains faster: a setting, rows or a model."""
    settings = facts.settings
    # Measured on 1.7B: as fast as Unsloth, and the first step came 10 s sooner (results/speed/fp8_unsloth.json).
    if settings.fp8 and settings.gradient_checkpointing != "unsloth":
        return "fp8"
    if settings.trains_preferences:
        # Log-probabilities of its models were not compared with those of Transformers.
        return f"task {settings.task}"
    if settings.lora_trainable_tokens and settings.method != "full":
        return "lora_trainable_tokens"
    if facts.offload == "parameters":
        return "parameters in host memory"
    # Measured: updates differ from those of DDP; Unsloth with adapters and Transformers with all weights agree to 3e-7.
    if facts.sharding == "zero3" and settings.method == "full":
        return "method full with sharding zero3"
    # Unsloth recomputes such layers in the reentrant way (model/forward/gradient_checkpointing.py).
    if facts.shares_keys and settings.gradient_checkpointing != "none":
        return "a model whose layers share keys and values, of which it loses gradients where it recomputes layers"
    # Measured on images with LoRA: Transformers was 1.4 times as fast, and Gemma 4 took its first step after one minute
    # instead of over five. With QLoRA Unsloth was 1.3 times as fast in half the memory (results/speed/images_*.json).
    if settings.method == "qlora" or settings.gradient_checkpointing == "unsloth":
        return None
    # Of quantized weights Transformers trains fewer kinds, and QLoRA only.
    if facts.images and not facts.quantized:
        return "rows with images"
    # Measured with LoRA on a gpt-oss-like model of 1B on an H200: Unsloth's own trainer, which pads too, reached 11,925
    # tokens/s, and packed rows with Transformers 211,870 (results/speed/todays_models_4.json).
    packs = settings.packing != "off" and settings.precision != "fp32" and settings.attn_implementation is None
    if facts.padded and packs and not _adapts_experts(settings):
        return "a model whose rows it pads"
    return None


def _adapts_experts(settings: Settings) -> bool:
    """Return whether experts get adapters, which Unsloth computes without a copy of the experts' weights."""
    named = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}.intersection(settings.lora_target_modules)
    return settings.method != "full" and bool(settings.lora_target_parameters or named)


def decide_backend(settings: Settings, runtime: Runtime, *, images: bool | None = None) -> None:
    """Decide on the backend of a run, unless it is decided, and say why `auto` takes Transformers; all ranks call this.

    Args:
        images: whether rows have images; None before they are read, which leaves the backend open if they decide it.

    Raises:
        UserError: as choose_backend.
    """
    if runtime.decided_backend is not None:
        return
    facts = _facts_of_run(settings, runtime, images=bool(images))
    backend, cause = choose_backend(facts)
    if images is None and choose_backend(dataclasses.replace(facts, images=True))[0] != backend:
        return
    runtime.backend = backend
    if cause:
        print(f"Using backend transformers, {cause}.", flush=True)


def _facts_of_run(settings: Settings, runtime: Runtime, *, images: bool) -> BackendFacts:
    """Return the facts, alike on every rank; another node may have another version of Transformers, or smaller GPUs."""
    cuda = runtime.device_type == "cuda"
    facts = BackendFacts(settings, cuda, runtime.sharding, runtime.offload, images)
    if not cuda or settings.backend == "transformers":
        return facts
    facts = dataclasses.replace(facts, **runtime.broadcast_from_main(lambda: _facts_of_config(settings)))
    if runtime.sharding != "fsdp2":
        return facts
    room = min(runtime.gather(gpu_bytes()))
    loading = runtime.broadcast_from_main(lambda: bytes_while_loading(settings, runtime.parts))
    return dataclasses.replace(facts, loading=loading, room=room)


def _facts_of_config(settings: Settings) -> dict[str, Any]:
    """Return the facts that the model's config.json holds."""
    config: dict[str, Any] = read_model_file(str(settings.model), "config.json", settings.model_revision) or {}
    text = config.get("text_config")
    of_text = text if isinstance(text, dict) else config
    return {
        "padded": is_padded_by_unsloth(config),
        "quantized": isinstance(config.get("quantization_config"), dict),
        "shares_keys": bool(of_text.get("num_kv_shared_layers")),
    }


def with_backend(settings: Settings, *, images: bool = False) -> Settings:
    """Return the settings with the backend that `auto` takes on GPUs for this model, and for rows with images or not.

    It stays auto where that is Unsloth, because with FSDP2 it depends on the size of the model too.
    """
    if settings.backend != "auto":
        return settings
    backend, _ = choose_backend(BackendFacts(settings, images=images, **_facts_of_config(settings)))
    return dataclasses.replace(settings, backend=backend) if backend == "transformers" else settings
