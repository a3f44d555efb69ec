"""Copy the tensors of a checkpoint to host memory, so that training can change them while they are written."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from unsloth_ddp.utils.host_memory import available_bytes

# Host memory that stays free beside the copy: for what training itself takes meanwhile.
SPARE = 1 << 30


def tensor_bytes(value: Any) -> int:
    """Return the bytes of the tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(tensor_bytes, items))


def has_room_for(size: int) -> bool:
    """Return whether host memory can take a copy of `size` bytes; where the system does not tell, it is not tried."""
    available = available_bytes()
    return available is not None and size + SPARE <= available


class HostCopies:
    """Copies in host memory, which every save uses again; its pages are expensive to get."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._copied: dict[int, Tensor] = {}

    def of(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return `values` with copies of its tensors, which the next call overwrites.

        Args:
            values: nested dicts, lists and tuples; a tensor that they hold twice is copied once.
        """
        self._copied = {}
        try:
            return {name: self._copy(value, name) for name, value in values.items()}
        finally:
            self._copied = {}

    def _copy(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self._copied:
                self._copied[id(value)] = self._copy_tensor(value.detach(), name)
            return self._copied[id(value)]
        if isinstance(value, dict):
            return {key: self._copy(item, f"{name}/{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)([self._copy(item, f"{name}/{index}") for index, item in enumerate(value)])
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: Tensor, name: str) -> Tensor:
        if type(tensor) is not Tensor:
            # A quantized state that consists of several tensors.
            return tensor.to("cpu", copy=True)
        host = self._memory.get(name)
        if host is None or (host.shape, host.dtype, host.stride()) != (tensor.shape, tensor.dtype, tensor.stride()):
            host = self._memory[name] = torch.empty_like(tensor, device="cpu")
        return host.copy_(tensor)
