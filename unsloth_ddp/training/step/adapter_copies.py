"""Multiply by copies of the adapters in the dtype of matrix products, all made at once.

Adapters are trained in float32. Autocast converts each of their matrices before its product, and autograd converts each
gradient and adds it, one after the other. These are hundreds of kernels that take longer to start than to run.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

# PEFT's name of a layer that holds a matrix of an adapter.
ADAPTER_LAYER = re.compile(r"\.lora_[AB]\.[^.]+$")


class AdapterCopies:
    """Hold copies of a model's trained LoRA matrices in another dtype; none of other weights or in the same dtype.

    Args:
        model: of PEFT; any other has no copies.
        dtype: that autocast converts the matrices to.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.layers = [
            layer
            for name, layer in model.named_modules()
            if ADAPTER_LAYER.search(name)
            and type(layer) is nn.Linear
            and layer.weight.requires_grad
            and layer.weight.dtype != dtype
        ]
        self.weights = [layer.weight for layer in self.layers]
        self.copies = [nn.Parameter(torch.empty_like(weight, dtype=dtype)) for weight in self.weights]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Use the copies in place of the weights inside the block, then add their gradients to those of the weights.

        Every weight must have a gradient to add to.
        """
        if not self.layers:
            yield
            return
        with torch.no_grad():
            torch._foreach_copy_([*self.copies], self.weights)
        for copy in self.copies:
            # Gradients that are not added to others are kept as they are, without a kernel.
            copy.grad = None
        try:
            self._set(self.copies)
            yield
        finally:
            self._set(self.weights)
        self._add_gradients()

    def _set(self, weights: Sequence[torch.Tensor]) -> None:
        for layer, weight in zip(self.layers, weights, strict=True):
            layer.weight = weight

    def _add_gradients(self) -> None:
        sums: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for weight, copy in zip(self.weights, self.copies, strict=True):
            if copy.grad is not None:
                assert weight.grad is not None, "there is nothing to add the gradient of an adapter to"
                sums.append(weight.grad)
                gradients.append(copy.grad)
                copy.grad = None
        if not sums:
            return
        # Adding tensors of two dtypes takes a kernel for each.
        converted = [torch.empty_like(gradient_sum) for gradient_sum in sums]
        torch._foreach_copy_(converted, gradients)
        torch._foreach_add_(sums, converted)
