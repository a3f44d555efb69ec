"""Make tiny random models of Transformers' architectures, as a user downloads them.

The sizes of an architecture's own config are shrunk by the names of its fields, so a new architecture needs no entry
here. The class of the checkpoint, its processor files and weights that Transformers does not model belong to it.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common.models import scale_query_norms

# Fields of configs with sizes, and their small values.
SIZES: dict[str, Any] = {
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim": 64, "embed_dim": 64, "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 128, "ffn_dim": 128, "d_ff": 128, "n_inner": 128, "ffn_hidden_size": 128,
    "dense_intermediate_size": 128,
    "moe_intermediate_size": 32, "moe_latent_size": None, "shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 128,
    "moe_shared_expert_intermediate_size": 32, "expert_ffn_hidden_size": 32, "shared_intermediate_size": 32,
    "decoder_ffn_dim": 128, "encoder_ffn_dim": 128,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "depth": 2, "decoder_layers": 2,
    "encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2, "num_global_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
    "attention_head_dim": 16,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "qk_head_dim": 24,
    "v_head_dim": 16,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 64, "o_lora_rank": 16, "o_groups": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_k": 2, "top_k_experts": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1, "zero_expert_num": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_d_head": 16, "mamba_d_ssm": 128,
    "mamba_d_state": 8,
    "mamba_n_groups": 1, "ssm_state_size": 8, "state_size": 8, "n_groups": 1, "mamba_expand": 2, "time_step_rank": 4,
    "mamba_dt_rank": 4, "n_mamba_heads": 1,
    "mamba_chunk_size": 16, "chunk_size": 16, "conv_dim": 64, "lru_width": 64, "block_size": 16,
    "attention_chunk_size": 32,
    "vocab_size_per_layer_input": None, "hidden_size_per_layer_input": 8, "max_position_embeddings": 512,
    "n_positions": 512, "n_ctx": 512,
    "sliding_window": 16, "attention_window_size": 16, "window_size": 16, "local_window_size": 16,
    "out_hidden_size": 64, "projection_dim": 64, "projector_hidden_size": 64, "vision_feature_layer": -1,
    "image_size": 28, "patch_size": 14, "num_channels": 3, "max_image_size": None, "laurel_rank": 8,
    "num_kv_shared_layers": 0, "altup_num_inputs": 2,
}  # fmt: skip

# Fields whose length is the number of layers.
PER_LAYER = (
    "layer_types", "mlp_layer_types", "layers_block_type", "hybrid_layer_pattern", "block_types", "indexer_types",
    "compress_ratios",
    "num_attention_heads_per_layer", "intermediate_size", "activation_sparsity_pattern",
)  # fmt: skip
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
# Rotary positions in sections, for heads of 16.
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}
# Sizes that have to match others, which the fields' names do not say.
OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8},
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "num_dense_layers": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp", "moe"]},
    # The sections of their rotary positions are those of heads of 128.
    "qwen2_vl_text": {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen2_5_vl_text": {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1},
    "qwen2_vl_vision": {"hidden_size": 256},
    "qwen2_5_vl_vision": {"out_hidden_size": 256},
    "gemma4_vision": {"use_clipped_linears": True}, "gemma4_audio": {"use_clipped_linears": True},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "cohere_compass_text": {"rope_parameters": {"full_attention": SECTIONS["rope_parameters"]}},
    **dict.fromkeys(("glm4v_text", "glm_ocr_text", "paddleocr_vl_text", "qwen2_5_omni_text"), SECTIONS),
    "glm4v_moe_text": {"rope_parameters": {**SECTIONS["rope_parameters"], "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1]}},
    "mistral4": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 512}},
    "hunyuan_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
        "mrope_section": [2, 2, 2, 2]}},
    # Its latent attention has no rotary positions, and its indexer pools groups of keys.
    "glm5_next_text": {
        "qk_rope_head_dim": 0, "qk_head_dim": 16, "head_dim": 0, "index_kpool": 4, "linear_head_dim": 16,
        "linear_num_heads": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "glm5_next_vision": {"projection_intermediate_size": 64},
    # An indexer, and embeddings of n-grams in the first layer, which released models have.
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "qwen_sparse_attention"] * 2, "hc_lowrank": 16, "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "heads_per_ngram": 2, "ngram_vocab_size_base": 64, "split_ngram_parts": 4, "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4, "eos_token_id": 1,
        "number_of_conv_states": 3,
    },
    # Layers with a window have more heads than the others.
    "step3p5": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "sliding_window": 16, "num_sliding_attention_heads": 8, "share_expert_dim": 32,
        "per_layer_config": {1: {"num_attention_heads": 8}, 3: {"num_attention_heads": 8}},
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
}  # fmt: skip


def tiny_config(model_type: str, vocabulary: int = 256, sizes: dict[str, int] | None = None) -> Any:
    """Return a small config of an architecture, by its model_type.

    Args:
        sizes: values of fields that replace those of SIZES.
    """
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    # Towers that an empty config leaves out, and every checkpoint has (Gemma 4).
    absent = {name: part() for name, part in kind.sub_configs.items() if getattr(kind(), name, None) is None}
    fields = _shrunk(kind(**absent).to_dict(), vocabulary, SIZES | (sizes or {}))
    fields.pop("transformers_version", None)
    return kind.from_dict(fields)


def _shrunk(fields: dict[str, Any], vocabulary: int, small: dict[str, Any]) -> dict[str, Any]:
    for name, value in list(fields.items()):
        if isinstance(value, dict) and "model_type" in value:
            _shrunk(value, vocabulary, small)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            # Without what is random in training.
            if "drop" in name or name.endswith("jitter_noise"):
                fields[name] = 0.0
            elif name.startswith("vocab_size"):
                fields[name] = vocabulary
            elif name.endswith("token_id"):
                special = ("bos_token_id", "eos_token_id", "pad_token_id")
                fields[name] = min(int(value), 2) if name in special else vocabulary - 1 - len(name) % 8
            elif small.get(name) is not None:
                fields[name] = small[name]
    _match_heads(fields, small)
    layers = next((fields[name] for name in LAYERS if isinstance(fields.get(name), int)), 0)
    for name in PER_LAYER:
        if isinstance(value := fields.get(name), (list, tuple)):
            kinds = list(dict.fromkeys(value))
            each = {"num_attention_heads_per_layer": 4, "intermediate_size": 128}
            fields[name] = [each.get(name, kinds[index % len(kinds)]) for index in range(layers)]
    if differing := fields.get("per_layer_config"):
        first = dict(next(iter(differing.values())))
        first |= {name: small[name] * 2 for name in first if name == "head_dim"}
        first |= {name: small[name] for name in first if name == "num_key_value_heads"}
        wide = [index for index, kind in enumerate(fields["layer_types"]) if kind == "full_attention"]
        fields["per_layer_config"] = dict.fromkeys(wide, first)
    fields |= OWN.get(str(fields.get("model_type")), {})
    return fields


def _match_heads(fields: dict[str, Any], small: dict[str, Any]) -> None:
    """Set sizes of heads that follow from others, and the sections of rotary positions."""
    heads = next((fields[name] for name in ("num_attention_heads", "n_head", "n_heads") if name in fields), 4)
    if isinstance(fields.get("qk_rope_head_dim"), int):
        rotated = fields["qk_rope_head_dim"]
        fields |= {"qk_head_dim": rotated + fields.get("qk_nope_head_dim", 0), "num_key_value_heads": heads}
        fields |= {"head_dim": rotated} if "head_dim" in fields else {}
    elif "head_dim" in fields:
        fields["head_dim"] = small["head_dim"]
    if "num_key_value_heads" in fields and fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = small["num_key_value_heads"]
    if isinstance(fields.get("rotary_dim"), int):
        fields["rotary_dim"] = 8
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.get(name)
        for part in [rope, *rope.values()] if isinstance(rope, dict) else []:
            if isinstance(part, dict) and "mrope_section" in part:
                head = fields.get("head_dim") or fields["hidden_size"] // heads
                share = part.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1
                half, count = int(head * share) // 2, len(part["mrope_section"])
                part["mrope_section"] = [half - half // count * (count - 1), *[half // count] * (count - 1)]


def model_types(images: bool) -> dict[str, str]:
    """Return the architectures of Transformers with the class of their checkpoints: causal, or of images and text."""
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    both = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if images:
        return dict(both)
    return {name: kind for name, kind in causal.items() if name not in both}


def tiny_model(
    model_type: str,
    class_name: str,
    vocabulary: int = 256,
    tokenizer: Any = None,
    sizes: dict[str, int] | None = None,
    config: Any = None,
) -> Any:
    """Return a random model of the class, with weights that are large enough for a mistake to show in the logits."""
    import transformers

    kind = getattr(transformers, class_name)
    config = config or tiny_config(model_type, vocabulary, sizes)
    if kind.config_class is not type(config):
        config = config.get_text_config()
    for part in {id(one): one for one in (config, config.get_text_config())}.values() if tokenizer else ():
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(part, name, getattr(tokenizer, name))
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A scale that begins at 0 would keep what it scales from being trained.
            scale = parameter.ndim == 1 and "bias" not in name and not parameter.any()
            if scale or (parameter.ndim > 1 and "conv" not in name):
                parameter.normal_(std=0.08)
    scale_query_norms(model)
    model.generation_config.eos_token_id = getattr(config.get_text_config(), "eos_token_id", 1)
    return model.eval()


def save_tiny(
    model_type: str,
    class_name: str,
    folder: Path,
    unmodelled: dict[str, torch.Tensor] | None = None,
    sizes: dict[str, int] | None = None,
) -> Any:
    """Write such a model as a user downloads it, with the demo's tokenizer; return the model.

    Args:
        unmodelled: further weights of the checkpoint, such as those of MTP.
        sizes: see tiny_config.
    """
    from safetensors.torch import load_file, save_file

    from tests.mixtures import tokenizer_of_demo

    tokenizer = tokenizer_of_demo()
    model = tiny_model(model_type, class_name, len(tokenizer), tokenizer, sizes)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if unmodelled:
        path = folder / "model.safetensors"
        save_file({**load_file(path), **unmodelled}, path, {"format": "pt"})
    if "vision_config" in json.loads((folder / "config.json").read_text()):
        (folder / "preprocessor_config.json").write_text(
            json.dumps({"do_resize": True, "size": {"height": 28, "width": 28}})
        )
    return model


def model_of_layers(layers: list[torch.nn.Module]) -> Any:
    """Return what the kit asks of a model whose text decoder has these layers: decoder, embedding and no head."""
    decoder = torch.nn.Module()
    decoder.embed_tokens = torch.nn.Embedding(1, 1, device="meta")
    decoder.layers = torch.nn.ModuleList(layers)
    return SimpleNamespace(
        base_model=decoder,
        modules=decoder.modules,
        named_modules=decoder.named_modules,
        get_decoder=lambda: decoder,
        get_input_embeddings=lambda: decoder.embed_tokens,
        get_output_embeddings=lambda: None,
    )
