"""Measure the bf16 matrix rate of a GPU, or compute the model work of a token.

    python -m benchmarks.speed.rates matmul
    python -m benchmarks.speed.rates flops qwen3_8b

matmul: floating-point operations a second of products of square bf16 matrices on the first visible GPU.
flops: model work of a token by method, for a shape of common/models.py or a model's folder, as unsloth_ddp.plan counts
it. Each prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

SIZE, TURNS, BLOCKS = 8192, 20, 15


def matmul() -> dict[str, float]:
    """Return median and best rate over blocks of products; on a CPU a small product, to try the script."""
    import torch

    cuda = torch.cuda.is_available()
    size = SIZE if cuda else 512
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda" if cuda else "cpu") for _ in range(2))
    rates = []
    for block in range(BLOCKS + 1):
        began = time.perf_counter()
        for _ in range(TURNS if cuda else 1):
            a @ b
        if cuda:
            torch.cuda.synchronize()
        if block:
            rates.append(2 * size**3 * (TURNS if cuda else 1) / (time.perf_counter() - began))
    return {"size": size, "flops_a_second": statistics.median(rates), "best": max(rates)}


def flops(shape: str) -> dict[str, float]:
    """Return the model work of a token by method; an adapter has rank 16 on all linear layers."""
    from benchmarks.common.models import OTHERS, SHAPES, make_config
    from unsloth_ddp.config.options import Settings
    from unsloth_ddp.sizing.count import read_model_shape

    with tempfile.TemporaryDirectory() as folder:
        if has_config := shape in SHAPES or shape in OTHERS:
            make_config(shape).save_pretrained(folder)
        counted = read_model_shape(Settings(model=folder if has_config else shape))
    return {method: counted.flops_a_token(method) for method in ("lora", "qlora", "full")}


def main() -> None:
    """Read the command line and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["matmul", "flops"])
    parser.add_argument("shape", nargs="?")
    options = parser.parse_args()
    print(json.dumps(matmul() if options.what == "matmul" else flops(options.shape)))


if __name__ == "__main__":
    main()
