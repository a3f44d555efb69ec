"""How many bytes a run will write, estimated from the model's config and the settings: pure arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.utils.units import GIB, MIB

# Tokenizer, trainer state, random states, logs.
BESIDE_WEIGHTS = 64 * MIB
# Where nothing is known of the model (a Hub id that is not in the cache).
UNKNOWN_MODEL = {"full": 64 * GIB, "lora": 4 * GIB, "qlora": 4 * GIB}
# save_total_limit none and no max_steps: nobody knows how many, so a few.
CHECKPOINTS_IF_UNLIMITED = 5
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}


def run_bytes(settings: Settings, config: Mapping[str, Any] | None, weight_bytes: int) -> int:
    """What the output folder has to take: the checkpoints kept, one being written, and the final weights.

    A checkpoint holds the trained weights and two states of Adam beside each; optimizers with less leave room.

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
        trained, width = adapter_parameters(config, settings.lora_r, len(settings.lora_modules_to_save)), 4
    final = trained * width + BESIDE_WEIGHTS + (parameters * 2 if settings.merge else 0)
    return kept_checkpoints(settings) * (3 * trained * width + BESIDE_WEIGHTS) + final


def kept_checkpoints(settings: Settings) -> int:
    """The most checkpoints on disk at one time: those kept and the one that replaces the oldest."""
    if settings.save_strategy == "no":
        return 0
    if settings.save_total_limit is not None:
        return settings.save_total_limit + 1
    if settings.max_steps > 0 and settings.save_strategy == "steps":
        return max(1, settings.max_steps // settings.save_steps)
    return CHECKPOINTS_IF_UNLIMITED


def adapter_parameters(config: Mapping[str, Any], r: int, saved_modules: int = 0) -> int:
    """Parameters of a LoRA adapter on every linear layer, and of whole modules saved beside it.

    A linear layer of `a` inputs and `b` outputs gets r x (a + b). Mixtures of experts count every expert.
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
    feed_forward = 3 * (hidden + width) * max(1, experts)
    return layers * r * (attention + feed_forward) + saved_modules * number("vocab_size") * hidden


def cache_bytes(data_bytes: int) -> int:
    """What the datasets cache has to take while rows are read and tokenized: each stage is kept until the end."""
    return 4 * data_bytes + 256 * MIB
