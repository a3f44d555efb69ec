"""Compute the difference between the weight updates of two finished runs from their saved weights."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unsloth_ddp.utils.errors import UserError


def update_difference(reference: Path, other: Path, initial: Path | None, steps: int) -> tuple[float, float]:
    """Return (|update - reference update| / |reference update|, rounding floor of that figure), over all tensors.

    Args:
        reference, other: folders of finished runs.
        initial: folder of the model before training; None for adapters, whose B starts at zero, so that B is the
            update.

    The floor is 0 for adapters. A full weight w is rounded to relative precision u after each step, so two runs with
    equal steps differ by up to u |w| per step; over `steps` steps of two runs that adds up to
    sqrt(2 steps) u |w| / |update|. Tensors are read one at a time.
    """
    import torch

    distance = length = weights = 0.0
    coarsest = 0.0
    with _tensors(reference) as theirs, _tensors(other) as mine, _tensors(initial or reference) as first:
        if theirs.keys() != mine.keys():
            return math.inf, 0.0
        names = [n for n in theirs if "lora_B" in n] if initial is None else [n for n in theirs if n in first]
        if not names:
            raise UserError(
                f"{reference} holds no weights to compare; give --method lora, qlora or full as the run had it."
            )
        for name in names:
            a, b = theirs[name].get_tensor(name), mine[name].get_tensor(name)
            if not a.is_floating_point():
                continue  # a count of batches, say
            coarsest = max(coarsest, torch.finfo(a.dtype).eps / 2)
            a, b = a.double(), b.double()
            start = torch.zeros_like(a) if initial is None else first[name].get_tensor(name).double()
            distance += (a - b).square().sum().item()
            length += (a - start).square().sum().item()
            weights += a.square().sum().item()
    if not length:
        raise UserError(
            "The weights did not change, so there is nothing to compare; give rows that hold an answer to train on."
        )
    floor = 0.0 if initial is None else math.sqrt(2 * steps * weights / length) * coarsest
    return math.sqrt(distance / length), floor


@contextlib.contextmanager
def _tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the name of every tensor in a folder's safetensors files with the open file that holds it."""
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in sorted(folder.glob("*.safetensors"))]
        yield {name: file for file in files for name in file.keys()}  # noqa: SIM118
