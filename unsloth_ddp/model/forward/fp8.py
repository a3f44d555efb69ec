"""Multiply by the frozen base weights of a LoRA or QLoRA run in FP8, forward and backward.

A weight is rounded to float8_e4m3fn twice when the model is loaded: once with one scale for each row, for the forward
pass, and once with one scale for each column, for the gradient of the input. The two take the memory of one 16-bit
weight. With QLoRA its values are those that 4 bits hold. Inputs and gradients get one scale for each token when they
arrive. Adapters, output head, embeddings, norms and attention stay in 16 bit. Scales and products follow PyTorch's
rowwise `_scaled_mm`, in which a scale multiplies a whole row of either factor.
"""

import sys
from typing import Any

import torch
from accelerate.utils import patch_environment
from torch import Tensor, nn

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import UserError

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
# Compute capability of the first GPUs that multiply FP8 (Ada: RTX 4090, L4, L40; then Hopper).
ADA = (8, 9)
# `_scaled_mm` requires that both sizes of a weight are multiples of this.
MULTIPLE = 16


def check_fp8(settings: Settings, runtime: Runtime) -> None:
    """Refuse --fp8 where FP8 products are not possible or not implemented.

    Raises:
        UserError: the method, precision or sharding is not supported, or the GPU has no FP8.
    """
    if not settings.fp8:
        return
    capable = runtime.device_type == "cuda" and torch.cuda.get_device_capability() >= ADA
    needs = {
        "method lora or qlora, whose base weights are frozen": settings.method != "full",
        "a GPU of compute capability 8.9 or later": capable,
        "precision bf16": runtime.precision == "bf16",
        "whole weights (accelerate_configs/ddp.yaml)": runtime.sharding == "none",
    }
    for need, is_met in needs.items():
        if not is_met:
            raise UserError(
                f"fp8 needs {need}, and this run has method {settings.method}, precision {runtime.precision} and "
                f"sharding {runtime.sharding} on {runtime.device_type}; change that, or leave --fp8 out."
            )


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix to FP8 with one scale per row.

    Args:
        values: of shape (rows, columns).

    Returns:
        FP8 values of the same shape, and fp32 factors of shape (rows, 1).
    """
    # The minimum avoids a division by 0 in rows of zeros.
    factors = values.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    return (values.float() / factors).to(FP8), factors


def fp8_product(rows: Tensor, row_factors: Tensor, weight: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows @ weight.T in `dtype`, both in FP8 with one factor for each row."""
    # use_fast_accum accumulates with fewer bits between promotions to fp32. Without it FP8 products are slow on Hopper
    # GPUs, and rounding the inputs to e4m3 costs far more precision.
    return torch._scaled_mm(
        rows, weight.t(), scale_a=row_factors, scale_b=factors.t(), out_dtype=dtype, use_fast_accum=True
    )


class _FrozenProduct(torch.autograd.Function):
    """Multiply a matrix by a frozen weight, and the gradient by its transpose, both in FP8."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, factors: Tensor, transposed: Tensor, transposed_factors: Tensor, dtype: Any
    ) -> Tensor:
        ctx.save_for_backward(transposed, transposed_factors)
        ctx.dtypes = x.dtype, dtype
        rows, row_factors = quantize_rows(x)
        return fp8_product(rows, row_factors, weight, factors, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        transposed, factors = ctx.saved_tensors
        of_input, dtype = ctx.dtypes
        rows, row_factors = quantize_rows(gradients[0])
        product = fp8_product(rows, row_factors, transposed, factors, dtype)
        return product.to(of_input), None, None, None, None, None


class FrozenFP8Linear(nn.Module):
    """Replace a frozen nn.Linear; the gradient reaches its input and not its weight.

    Args:
        linear: without a trainable parameter; its weight has shape (out_features, in_features), multiples of 16.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        weight, factors = quantize_rows(linear.weight.detach())
        transposed, transposed_factors = quantize_rows(linear.weight.detach().t().contiguous())
        # A parameter, so that the model's parameter count stays the same.
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("factors", factors, persistent=False)
        self.register_buffer("transposed", transposed, persistent=False)
        self.register_buffer("transposed_factors", transposed_factors, persistent=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias; x has shape (..., in_features), the result (..., out_features)."""
        dtype = torch.bfloat16 if x.is_cuda else self.dtype
        product = _FrozenProduct.apply(
            x.reshape(-1, self.in_features), self.weight, self.factors, self.transposed, self.transposed_factors, dtype
        )
        if self.bias is not None:
            product = product + self.bias.to(dtype)
        return product.view(*x.shape[:-1], self.out_features)


def _split_fused_adapters(model: Any) -> None:
    """Let PEFT compute the adapters of Unsloth's model: Unsloth's kernels for adapters read 16-bit weights."""
    unsloth = sys.modules.get("unsloth.models.llama")
    if unsloth is None:
        return
    # The function is Unsloth's for FSDP. Its message names FSDP, and the variable makes it do nothing.
    was_disabled, unsloth.logger.disabled = unsloth.logger.disabled, True
    try:
        with patch_environment(UNSLOTH_FORCE_FUSED_LORA="0"):
            unsloth._decline_fused_lora_for_fsdp(model)
    finally:
        unsloth.logger.disabled = was_disabled


def use_fp8(model: Any) -> int:
    """Replace every frozen linear layer except the output head; return the number of replaced layers.

    Layers whose sizes are not multiples of 16 and layers of other classes, such as MoE experts, are not replaced.

    Raises:
        UserError: no layer can be replaced.
    """
    _split_fused_adapters(model)
    head = model.get_output_embeddings()
    head_modules = set() if head is None else set(head.modules())
    replaced = []
    for parent_name, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child in head_modules or child.weight.requires_grad:
                continue
            if child.in_features % MULTIPLE or child.out_features % MULTIPLE:
                continue
            setattr(parent, name, FrozenFP8Linear(child))
            replaced.append(f"{parent_name}.{name}".lstrip("."))
    if not replaced:
        raise UserError(
            "fp8 finds no linear layer to replace: it needs frozen layers outside the output head whose sizes are "
            f"multiples of {MULTIPLE}; leave --fp8 out."
        )
    # Every rank has quantized the same weights, and not every communication backend supports FP8.
    buffers = [
        f"{layer}.{name}" for layer in replaced for name in ("weight", "factors", "transposed", "transposed_factors")
    ]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
    return len(replaced)
