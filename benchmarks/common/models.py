"""Random-weight models of real architectures, for machines that cannot reach the Hub.

Speed and memory do not depend on the weights' values. The tokenizer is the demo's, with its vocabulary padded.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from benchmarks.common.runs import REPO

SHAPES = {
    # name: (hidden, layers, heads, key-value heads, feed-forward, vocabulary), as published in the models' config.json
    "qwen3_0.6b": (1024, 28, 16, 8, 3072, 151936),
    "qwen3_1.7b": (2048, 28, 16, 8, 6144, 151936),
    "qwen3_4b": (2560, 36, 32, 8, 9728, 151936),
    "qwen3_8b": (4096, 36, 32, 8, 12288, 151936),
    "qwen3_14b": (5120, 40, 40, 8, 17408, 151936),
    "qwen3_32b": (5120, 64, 64, 8, 25600, 151936),
}
# Small models share the embedding and the output head.
TIED = ("qwen3_0.6b", "qwen3_1.7b", "qwen3_4b")


# Models of other kinds, by the values of their published config.json.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen25_72b": ("Qwen2Config", {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "intermediate_size": 29568, "vocab_size": 152064, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
    }),
    "qwen3_30b_a3b": ("Qwen3MoeConfig", {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "vocab_size": 151936, "max_position_embeddings": 40960,
    }),
    # maxtext (AI-Hypercomputer), configs/models/qwen3.5-27b.yml and gemma4-26b.yml; the towers are Transformers' own.
    "qwen3.5_27b": ("Qwen3_5Config", {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {
            "model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24,
            "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 17408, "vocab_size": 248320,
            "linear_num_value_heads": 48,
        },
        "vision_config": {"model_type": "qwen3_5_vision", "out_hidden_size": 5120},
    }),
    "gemma_4_26b_a4b": ("Gemma4Config", {
        "architectures": ["Gemma4ForConditionalGeneration"], "tie_word_embeddings": True,
        "vision_config": {"model_type": "gemma4_vision"}, "audio_config": None,
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": 2816, "num_hidden_layers": 30, "intermediate_size": 2112,
            "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
            "sliding_window": 1024, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
        },
    }),
    # The values that Transformers has without a config.json.
    "qwen3.5_9b": ("Qwen3_5Config", {"architectures": ["Qwen3_5ForConditionalGeneration"]}),
    "ministral_3_8b_instruct_2512": ("Mistral3Config", {
        "architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "ministral3"},
    }),
    "gpt_oss_20b_bf16": ("GptOssConfig", {
        "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 24, "num_local_experts": 32,
    }),
    "lfm2_1.2b": ("Lfm2Config", {
        "architectures": ["Lfm2ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "tie_word_embeddings": True,
    }),
    # Text decoders of 1 to 2B with the layers of today's families; layers and sizes are chosen here.
    "gemma4_2b": ("Gemma4TextConfig", {
        "architectures": ["Gemma4ForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 151936, "vocab_size_per_layer_input": 151936,
        "hidden_size_per_layer_input": 0, "tie_word_embeddings": True,
    }),
    "gemma3_1b": ("Gemma3TextConfig", {
        "architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 151936,
        "tie_word_embeddings": True,
    }),
    "qwen3.5_2b": ("Qwen3_5TextConfig", {
        "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "vocab_size": 151936, "tie_word_embeddings": True,
    }),
    "gpt_oss_1b": ("GptOssConfig", {
        "architectures": ["GptOssForCausalLM"], "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 12,
        "num_attention_heads": 16, "num_key_value_heads": 4, "num_local_experts": 16, "vocab_size": 151936,
    }),
    # docs.nvidia.com/nemo/megatron-bridge, Gemma 4 recipes; the towers are those of Transformers.
    "gemma_4_e4b_it": ("Gemma4Config", {
        "architectures": ["Gemma4ForConditionalGeneration"], "tie_word_embeddings": True,
        "vision_config": {"model_type": "gemma4_vision"}, "audio_config": {"model_type": "gemma4_audio"},
        "text_config": {
            "model_type": "gemma4_text", "hidden_size": 2560, "num_hidden_layers": 42, "intermediate_size": 10240,
            "num_attention_heads": 8, "num_key_value_heads": 2, "num_kv_shared_layers": 18,
            "hidden_size_per_layer_input": 256, "sliding_window": 512,
        },
    }),
}  # fmt: skip


def make_config(shape: str, layers: int | None = None) -> Any:
    """Return the config of this shape, with fewer layers if `layers` is given."""
    import transformers
    from transformers import Qwen3Config

    if shape in OTHERS:
        kind, values = OTHERS[shape]
        values = values | ({"num_hidden_layers": layers} if layers else {})
        return getattr(transformers, kind)(**({"tie_word_embeddings": False, "dtype": "bfloat16"} | values))
    hidden, all_layers, heads, kv_heads, intermediate, vocabulary = SHAPES[shape]
    return Qwen3Config(
        hidden_size=hidden,
        num_hidden_layers=layers or all_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        max_position_embeddings=40960,
        tie_word_embeddings=shape in TIED,
        dtype="bfloat16",
    )


# Weights of a sparse file, in bytes: less than what one file of the Hub holds.
FILE_BYTES = 5 * 10**9


def write_sparse(config: Any, folder: Path) -> None:
    """Write safetensors files of bf16 zeros without blocks on the disk: sizes and reads are those of a real model.

    The tensors are those of a model on the Hub, where every expert of a mixture has its own.
    """
    import json
    import math

    import torch
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    files: list[dict[str, list[int]]] = [{}]
    filled = 0
    for name, tensor in revert_weight_conversion(model, model.state_dict()).items():
        size = math.prod(tensor.shape) * 2
        if filled and filled + size > FILE_BYTES:
            files.append({})
            filled = 0
        files[-1][name] = list(tensor.shape)
        filled += size
    names = {}
    for number, tensors in enumerate(files, 1):
        path = folder / f"model-{number:05}-of-{len(files):05}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in tensors.items():
            begin, end = end, end + math.prod(shape) * 2
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
            names[name] = path.name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)


def scale_query_norms(model: Any) -> None:
    """Scale the query norms of attention that leaves its scores unscaled (Gemma 4) as trained weights do.

    With a weight of 1 scores grow with the head size, one key takes each query, and roundings decide which.
    """
    for module in model.modules():
        if getattr(module, "scaling", None) == 1 and hasattr(module, "q_norm"):
            module.q_norm.weight.data.fill_(module.head_dim**-0.5)


def write_model(config: Any, folder: Path, *, sparse: bool = False) -> None:
    """Write a model of random weights (or sparse files of zeros) in its config's dtype, and the demo's tokenizer."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REPO / "demo/model")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if sparse:
        write_sparse(config, folder)
    else:
        torch.manual_seed(0)
        named = (config.architectures or [""])[0]
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            # Of a model with towers, the class that its config names has them.
            model_class = getattr(transformers, named) if named else AutoModelForCausalLM
            make = model_class._from_config if named else model_class.from_config
            model = make(config, dtype=config.dtype)
        scale_query_norms(model)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=[*SHAPES, *OTHERS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sparse", action="store_true", help="files of zeros that take no room on the disk")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    options = parser.parse_args()
    write_model(make_config(options.shape, options.layers), options.folder, sparse=options.sparse)
