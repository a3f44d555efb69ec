"""Count the bytes of tensors on the CPU, in the place of torch.cuda's allocator."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unsloth_ddp.sizing.sharded_trial import DeviceMemory


class LiveBytes(DeviceMemory, TorchDispatchMode):
    """Count what is made inside the block and still alive; `room` is all that there is."""

    def __init__(self, room: int = 2**40) -> None:
        TorchDispatchMode.__init__(self)
        self.all, self.live, self.peak_bytes = room, 0, 0
        self.counted: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.counted or not size:
            return
        self.counted.add(key)
        self.live += size
        self.peak_bytes = max(self.peak_bytes, self.live)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.counted.discard(key)
        self.live -= size

    def room(self) -> int:
        return self.all

    def allocated(self) -> int:
        return self.live

    def reset_peak(self) -> None:
        self.peak_bytes = self.live

    def peak(self) -> int:
        return self.peak_bytes
