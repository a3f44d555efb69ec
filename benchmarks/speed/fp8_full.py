"""Time layers whose weights are trained with products in FP8 beside bf16, and compare their gradients: an experiment.

    python -m benchmarks.speed.fp8_full --shape qwen3_8b --json FILE

Weights stay in bf16 and are rounded to FP8 in every pass, with one scale for each row, as inputs and gradients are. The
kinds of training are bf16, FP8 for all three products of a layer, and FP8 except for the gradient of the weight. Layers
are compiled one by one, as the kit does, and see packs of one row. Gradients are compared with those in fp32 of the
same bf16 weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common.models import make_config
from benchmarks.common.runs import write_results
from unsloth_ddp.model.forward.compile_options import layer_options
from unsloth_ddp.model.forward.fp8 import fp8_product, quantize_rows
from unsloth_ddp.utils.versions import versions

KINDS = ("bf16", "fp8", "fp8_but_weight_gradient")
ROUNDS, PASSES = 5, 4


class Product(torch.autograd.Function):
    """Multiply by a trained weight, and the gradients of input and weight too, in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, all_three: bool) -> Tensor:
        """Return x @ weight.T; x has shape (tokens, in), weight (out, in)."""
        ctx.save_for_backward(x, weight)
        ctx.all_three = all_three
        return fp8_product(*quantize_rows(x), *quantize_rows(weight), x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and weight."""
        (x, weight), gradient = ctx.saved_tensors, gradients[0]
        of_x = fp8_product(*quantize_rows(gradient), *quantize_rows(weight.t().contiguous()), x.dtype)
        if not ctx.all_three:
            return of_x, gradient.t() @ x, None
        columns = quantize_rows(gradient.t().contiguous()), quantize_rows(x.t().contiguous())
        return of_x, fp8_product(*columns[0], *columns[1], x.dtype), None


class TrainedLinear(nn.Linear):
    """Replace a linear layer without bias."""

    all_three = True

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T; x has shape (1, tokens, in)."""
        return Product.apply(x.reshape(-1, self.in_features), self.weight, self.all_three).view(*x.shape[:-1], -1)


def make_layers(shape: str, count: int, device: str) -> Any:
    """Return a model of `count` layers of a shape with random weights in fp32."""
    from transformers import AutoModel

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModel.from_config(make_config(shape, count), dtype=torch.float32, attn_implementation="sdpa")


def one_pass(model: Any, x: Tensor, towards: Tensor) -> None:
    """Compute the gradients of a pass."""
    model.zero_grad(set_to_none=True)
    (model(inputs_embeds=x, use_cache=False)[0] * towards).sum().backward()


def measure(model: Any, x: Tensor, towards: Tensor, layers: int) -> list[float]:
    """Return the milliseconds of a layer's forward and backward pass, of each round."""
    for layer in model.layers:
        layer.compile(dynamic=False, options=layer_options())
    for _ in range(3):
        one_pass(model, x, towards)
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize() if x.is_cuda else None
        began = time.perf_counter()
        for _ in range(PASSES):
            one_pass(model, x, towards)
        torch.cuda.synchronize() if x.is_cuda else None
        rounds.append(1000 * (time.perf_counter() - began) / PASSES / layers)
    return rounds


def gradients(model: Any) -> Tensor:
    """Return the gradients of a model's matrices as one vector, in fp32."""
    return torch.cat([p.grad.float().flatten() for p in model.layers.parameters() if p.dim() == 2])


def main() -> None:
    """Read the command line; measure, and write the results after each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3_8b", help="of common/models.py")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--row", type=int, default=2048, help="tokens of each sequence")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_layers(options.shape, options.layers, device)
    size = model.config.hidden_size
    x = torch.randn(options.tokens // options.row, options.row, size, device=device)
    towards = torch.randn_like(x)
    # fp32 products of the values that the other kinds compute with.
    model.to(torch.bfloat16).float()
    x, towards = x.bfloat16().float(), towards.bfloat16().float()
    one_pass(model, x, towards)
    exact = gradients(model)
    model, x, towards = model.bfloat16(), x.bfloat16(), towards.bfloat16()
    results: list[dict[str, Any]] = []
    for kind in KINDS:
        torch._dynamo.reset()
        for module in model.layers.modules():
            if isinstance(module, nn.Linear) and kind != "bf16":
                module.__class__ = TrainedLinear
                module.all_three = kind == "fp8"
        rounds = measure(model, x, towards, options.layers)
        computed = gradients(model)
        off = ((computed - exact).norm() / exact.norm()).item()
        result = {"kind": kind, "milliseconds_a_layer": statistics.median(rounds), "rounds": rounds}
        results.append(result | {"difference_of_weight_gradients": off})
        print(f"{kind:25} {result['milliseconds_a_layer']:8.3f} ms a layer, gradients differ by {off:.1e}", flush=True)
        write_results(
            options.json,
            shape=options.shape,
            layers=options.layers,
            tokens=options.tokens,
            row=options.row,
            device=torch.cuda.get_device_name() if device == "cuda" else "CPU",
            versions=versions(),
            kinds=results,
        )


if __name__ == "__main__":
    main()
