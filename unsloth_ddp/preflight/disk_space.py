"""Estimate the bytes that a run writes, from the model's config and the settings: pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.utils.units import GIB, MIB

# Tokenizer, trainer state, random states, logs.
BESIDE_WEIGHTS = 64 * MIB
# For a model that is not on this machine (a Hub id that is not in the cache).
UNKNOWN_MODEL = {"full": 64 * GIB, "lora": 4 * GIB, "qlora": 4 * GIB}
# With save_total_limit none and no max_steps the number is not known; this one is assumed.
CHECKPOINTS_IF_UNLIMITED = 5
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


def estimate_run_bytes(settings: Settings, config: Mapping[str, Any] | None, weight_bytes: int) -> int:
    """Estimate the bytes in the output folder: the checkpoints kept, one being written, and the final weights.

    A checkpoint holds the trained weights and two Adam states for each; other optimizers need less.

    Args:
        config: the model's config.json; None when it is not known.
        weight_bytes: the size of the model's weight files; 0 when not known.
    """
    if config is None or not weight_bytes:
        return UNKNOWN_MODEL[settings.method]
    parameters = weight_bytes // BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 2)
    if settings.method == "full":
        trained, width = parameters, 4 if settings.full_weights == "fp32" else 2
    else:
        adapted = bool(settings.lora_target_parameters) or settings.lora_target_modules != ["all-linear"]
        saved = len(settings.lora_modules_to_save)
        trained, width = count_adapter_parameters(config, settings.lora_r, saved, experts_adapted=adapted), 4
    final = trained * width + BESIDE_WEIGHTS + (parameters * 2 if settings.merge else 0)
    return count_checkpoints(settings) * (3 * trained * width + BESIDE_WEIGHTS) + final


def count_checkpoints(settings: Settings) -> int:
    """Return the most checkpoints on disk at one time: those kept and the one that replaces the oldest."""
    if settings.save_strategy == "no":
        return 0
    if settings.save_total_limit is not None:
        return settings.save_total_limit + 1
    if settings.max_steps > 0 and settings.save_strategy == "steps":
        return max(1, settings.max_steps // settings.save_steps)
    return CHECKPOINTS_IF_UNLIMITED


def count_adapter_parameters(
    config: Mapping[str, Any], r: int, saved_modules: int = 0, *, experts_adapted: bool = False
) -> int:
    """Count the parameters of a LoRA adapter on every linear layer, and of whole modules saved beside it.

    A linear layer of `a` inputs and `b` outputs gets r x (a + b). A mixture's experts are no linear layers; with
    `experts_adapted` every one is counted.
    """
    text = {**config, **(config.get("text_config") or {})}

    def number(name: str, default: int = 0) -> int:
        value = text.get(name)
        return value if isinstance(value, int) else default

    hidden, layers, heads = number("hidden_size"), number("num_hidden_layers"), number("num_attention_heads", 1)
    head_size = number("head_dim") or hidden // max(1, heads)
    queries, keys = heads * head_size, number("num_key_value_heads", heads) * head_size
    attention = 2 * (hidden + queries) + 2 * (hidden + keys)
    experts = number("num_experts") or number("num_local_experts") or number("n_routed_experts")
    width = (number("moe_intermediate_size") if experts else 0) or number("intermediate_size", 4 * hidden)
    feed_forward = 3 * (hidden + width) * (experts * experts_adapted if experts else 1)
    return layers * r * (attention + feed_forward) + saved_modules * number("vocab_size") * hidden


def estimate_cache_bytes(data_bytes: int) -> int:
    """Estimate the bytes in the datasets cache: reading, formatting and tokenizing each keep their result to the end."""
    return 4 * data_bytes + 256 * MIB
