"""Compare the gradients of a small Gemma 4, whose last layers take keys and values of earlier ones, when recomputed.

    python -m benchmarks.correctness.shared_keys --json benchmarks/results/correctness/shared_keys.json

Unsloth makes checkpointing of Gemma 4 and Gemma 3n reentrant (unsloth/models/vision.py); Transformers' is not.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from benchmarks.common.runs import write_results
from unsloth_ddp.utils.versions import versions


def main() -> None:
    """Print and write the largest and the median relative difference of a weight's gradient."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    config = Gemma4TextConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, global_head_dim=32, vocab_size=128, vocab_size_per_layer_input=128, hidden_size_per_layer_input=16,
        num_kv_shared_layers=3, sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(config).train()
    ids = torch.randint(0, config.vocab_size, (2, 24))

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    whole, results = gradients(), []
    model.enable_input_require_grads()
    for reentrant in (False, True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        recomputed = gradients()
        off = sorted(
            ((recomputed[name] - gradient).norm() / gradient.norm()).item() for name, gradient in whole.items()
        )
        results.append({"reentrant": reentrant, "largest": off[-1], "median": off[len(off) // 2], "weights": len(off)})
        print(results[-1], flush=True)
    write_results(options.json, results=results, versions=versions())


if __name__ == "__main__":
    main()
