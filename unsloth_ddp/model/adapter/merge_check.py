"""Check a merged model against its base with the adapter, on a few rows."""

import gc
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.adapter.merge import load_adapted
from unsloth_ddp.model.files.find import in_folder, weight_bytes
from unsloth_ddp.model.files.stored_weights import load_on_cpu
from unsloth_ddp.model.modules import without_kernels
from unsloth_ddp.utils.errors import UserError, one_line
from unsloth_ddp.utils.units import shown_bytes

# Rows that are compared, and tokens of each.
ROWS, TOKENS = 3, 64
# One model is in memory at a time, with room for the activations.
ROOM = 1.3
# Distance of the merged model's logits from the adapter's, at the median token: as a share of their size that rounding
# explains, and as a share of what the adapter changes. Rounding sends some tokens of a mixture to other experts.
ROUNDING, LOST = 0.03, 0.75


def check_merged(settings: Settings, adapter: Path, merged: Path, rows: Sequence[Sequence[int]]) -> None:
    """Compare the logits of the merged model with those of the base model with the adapter, on the CPU.

    They are computed in fp32, or in bf16 if memory is short. A model that does not fit into host memory, or that a CPU
    cannot compute, is not compared, which is printed.

    Args:
        rows: token ids; the first ROWS rows are compared, up to TOKENS tokens of each.

    Raises:
        UserError: the adapter's change is not in the merged model.
    """
    first = [list(row[:TOKENS]) for row in rows[:ROWS] if len(row)]
    if "unsloth" not in sys.modules:
        _check(settings, adapter, merged, first)
        return
    # Unsloth replaces functions of Transformers by kernels that run on GPUs only.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as without_unsloth:
        without_unsloth.submit(_check, settings, adapter, merged, first).result()


def _check(settings: Settings, adapter: Path, merged: Path, rows: list[list[int]]) -> None:
    needed, free = int(ROOM * weight_bytes(merged)), psutil.virtual_memory().available
    if needed > free:
        print(
            f"The merged model was not compared with the adapter on rows, which takes {shown_bytes(needed)} of host "
            f"memory, and {shown_bytes(free)} are free.",
            flush=True,
        )
        return
    dtype = torch.float32 if 2 * needed <= free else torch.bfloat16
    try:
        with without_kernels():
            lost, change = _compare(settings, adapter, merged, [torch.tensor([row]) for row in rows], dtype)
    except UserError:
        raise
    except Exception as error:  # of a model's own code, say, that needs a GPU
        print(f"The merged model was not compared with the adapter on rows: {one_line(error)}.", flush=True)
        return
    if lost > ROUNDING and lost > LOST * change:
        raise UserError(
            f"The merged model differs from {settings.model} with the adapter in {adapter}: its logits are {lost:.1%} "
            f"away, and the adapter changes them by {change:.1%}. It is not kept; the adapter is whole. Please report "
            "this with the model's name."
        )


def _compare(
    settings: Settings, adapter: Path, merged: Path, rows: list[Tensor], dtype: torch.dtype
) -> tuple[float, float]:
    """Return how far the merged model's logits are from the adapter's, and how far the adapter changes them."""
    model = load_adapted(settings, adapter, dtype)
    expected = _logits(model, rows)
    with model.disable_adapter():
        without_adapter = _logits(model, rows)
    del model
    gc.collect()
    merged_logits = _logits(load_on_cpu(in_folder(settings, merged), dtype), rows)
    return _distance(merged_logits, expected), _distance(without_adapter, expected)


def _logits(model: Any, rows: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(input_ids=row, use_cache=False).logits[0].float() for row in rows])


def _distance(logits: Tensor, other: Tensor) -> float:
    """Return the distance of the median token's logits, (tokens, vocabulary), relative to their size in the second."""
    return float(((logits - other).norm(dim=-1) / other.norm(dim=-1)).median())
