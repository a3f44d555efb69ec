"""Compare the trainable weights of all ranks bit by bit: after the first step, every few steps, and in every save.

Data parallel ranks start from the same weights and take the same steps, so their weights stay identical. A broken GPU,
a bad cable or a rank that skipped a gradient makes them drift apart, which no loss curve shows. Each trainable tensor
is reduced to one 64-bit checksum on its device. The ranks exchange one number that combines them, and all checksums
only if that number differs. Of several copies of a sharded model the ranks that hold the same part are compared.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import RunError

# Elements processed at a time, so that a tensor of any size needs only tens of megabytes of scratch memory.
CHUNK = 1 << 22
# Never 64 bits wide: an even number of flipped highest bits would cancel out modulo 2^64.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
# Shardings under which every rank holds the whole weights.
REPLICATED = ("none", "zero2")


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """Return a checksum of each tensor, (tensors,) int64, on the device of the first one, without waiting for it.

    It is the sum, modulo 2^64, of each element's raw bits times a pseudo-random odd number that belongs to its
    position. Equal weights give equal checksums; one changed bit or two exchanged elements give another one.
    """
    sums: list[Tensor] = []
    positions: Tensor | None = None
    for tensor in tensors:
        needed = min(CHUNK, tensor.numel() * (2 if tensor.element_size() >= 8 else 1))
        if positions is None or positions.device != tensor.device or len(positions) < needed:
            positions = position_weights(needed, tensor.device)
        sums.append(_checksum(tensor, positions))
    if not sums:
        return torch.zeros(0, dtype=torch.int64)
    return torch.stack([checksum.to(sums[0].device) for checksum in sums])


def position_weights(count: int, device: torch.device | str) -> Tensor:
    """Return pseudo-random odd numbers, (count,) int64, by multiplying and shifting as hash functions do."""
    number = torch.arange(1, count + 1, dtype=torch.int64, device=device)
    number = number * -7046029254386353131
    number = number ^ (number >> 29)
    return (number * -4658895280553007687) | 1


def _checksum(tensor: Tensor, positions: Tensor) -> Tensor:
    data = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    bits = data.reshape(-1).view(INTEGERS[data.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, part in enumerate(bits.split(CHUNK)):
        # The odd factor differs between chunks, so that two exchanged chunks change the sum.
        total += (part.to(torch.int64) * positions[: len(part)]).sum() * (2 * number + 1)
    return total


def combine(numbers: Tensor) -> int:
    weights = position_weights(len(numbers), numbers.device)
    return int((numbers * weights).sum())


def find_outliers(values: list[Any]) -> tuple[list[int], int]:
    """Return the ranks whose value differs from the most frequent one (rank 0's if tied), and a rank that has it."""
    usual = Counter(values).most_common(1)[0][0]
    return [rank for rank, value in enumerate(values) if value != usual], values.index(usual)


class DriftCheck:
    """Compare the trainable weights of `model` over the ranks; every rank calls `check` at the same steps."""

    def __init__(self, model: torch.nn.Module, runtime: Runtime, every: int) -> None:
        self.runtime = runtime
        self.model = model
        sharding, copies = runtime.sharding, runtime.copies
        replicated = sharding in REPLICATED or copies > 1
        # Every so many ranks hold the same.
        self.parts = runtime.ranks.world_size // copies if copies > 1 else 1
        self.every = every if runtime.ranks.world_size > 1 and replicated else 0
        self.skipped = sharding if every and runtime.ranks.world_size > 1 and not replicated else None
        self.named: list[tuple[str, Tensor]] = []
        self.compared = False

    def due(self, step: int) -> bool:
        """Return whether to compare the weights after this step; the first shows what was loaded differently."""
        return bool(self.every) and (step % self.every == 0 or not self.compared)

    def check(self, step: int) -> None:
        """Compare the weights of all ranks, if they hold the same.

        Raises:
            RunError: on every rank; it names the ranks whose weights differ.
        """
        if not self.every:
            return
        if not self.named:
            # Only now: a model that was loaded whole is split after this object is made.
            weights = [(name, weight) for name, weight in self.model.named_parameters() if weight.requires_grad]
            self.named = [(name, w.to_local() if isinstance(w, DTensor) else w) for name, w in weights]
        numbers = checksums(weight for _, weight in self.named)
        values = self.runtime.gather(combine(numbers))
        differ = [part for part in range(self.parts) if len(set(values[part :: self.parts])) > 1]
        if differ:
            raise RunError(self._describe(step, differ[0], values, self.runtime.gather(numbers.tolist())))
        self.compared = True

    def _describe(self, step: int, part: int, values: list[int], numbers: list[list[int]]) -> str:
        outlying, usual = find_outliers(values[part :: self.parts])
        outliers, usual = [part + self.parts * rank for rank in outlying], part + self.parts * usual
        names = [name for name, _ in self.named]
        first = next(i for i in range(len(names)) if numbers[outliers[0]][i] != numbers[usual][i])
        differing = sum(a != b for a, b in zip(numbers[outliers[0]], numbers[usual], strict=True))
        who = ", ".join(str(self.runtime.locations[rank]) for rank in outliers)
        return (
            f"{who} {'has' if len(outliers) == 1 else 'have'} other weights than rank {usual} after step {step}, first "
            f"in {names[first]} ({differing:,} of {len(names):,} trainable tensors differ), although data parallel "
            "ranks take the same steps; look for GPU errors on that host (nvidia-smi -q -d ECC, Xid lines in dmesg) "
            "and for different packages (the preflight compares them). The weights are compared before each save, so "
            "the last checkpoint is from before."
        )
