"""Tiny mixtures of experts with random weights and the demo's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MIXTURES = ("qwen3_moe", "gpt_oss")


def make_mixture(kind: str, **changes: Any) -> Any:
    """Return a two-layer model; one expert of gpt_oss gets no token in any batch."""
    import torch
    from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = tokenizer_of_demo()
    shared = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "vocab_size": len(tokenizer), "initializer_range": 0.1, "num_experts_per_tok": 2,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "qwen3_moe":
        more = {"intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 8, "norm_topk_prob": True}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**shared, **more, **changes}))
    layers = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    more = {"intermediate_size": 16, "num_local_experts": 4, **layers}
    model = GptOssForCausalLM(GptOssConfig(**{**shared, **more, **changes}))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.bias[3] = -100
    return model


def save_mixture(kind: str, folder: Path, **changes: Any) -> Path:
    """Write such a model with its tokenizer; return the folder."""
    make_mixture(kind, **changes).save_pretrained(folder)
    tokenizer_of_demo().save_pretrained(folder)
    return folder


def tokenizer_of_demo() -> Any:
    """Return the tokenizer that ships with the demo."""
    from transformers import AutoTokenizer

    from tests.conftest import DEMO_MODEL

    return AutoTokenizer.from_pretrained(DEMO_MODEL)
