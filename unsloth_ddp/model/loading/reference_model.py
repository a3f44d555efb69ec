"""Load another model as the reference of a preference task, in the way in which the trained model is loaded."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.files.check import ADAPTER_FILE, check_local_model, check_quantization, read_model_file
from unsloth_ddp.model.forward.attention import choose_packing, prove_rows_apart
from unsloth_ddp.model.loading.load import check_class, check_positions, load_model, load_tokenizer
from unsloth_ddp.utils.errors import UserError


def check_reference_files(settings: Settings, runtime: Runtime) -> None:
    """Refuse a reference model that is an adapter, is incomplete, or cannot be loaded, by its small files; every rank calls this.

    Raises:
        UserError: on every rank, naming the model.
    """
    reference = settings.of_reference
    if reference is None:
        return
    name, revision = str(reference.model), reference.model_revision

    def check() -> None:
        if read_model_file(name, ADAPTER_FILE, revision) is not None:
            raise UserError(
                f"reference_model {name} is an adapter; merge it into its base (python -m unsloth_ddp.export RUN --to merged) and "
                "give the merged model."
            )
        check_local_model(name, safetensors_only=reference.use_safetensors)
        check_quantization(reference, runtime.backend, read_model_file(name, "config.json", revision))

    runtime.on_main(check)


def check_reference_tokens(settings: Settings, runtime: Runtime, tokenizer: Any) -> None:
    """Refuse a reference model whose tokenizer has other tokens than that of the model; every rank calls this.

    Raises:
        UserError: on every rank.
    """
    reference = settings.of_reference
    if reference is None:
        return

    def check() -> None:
        check_class(reference)
        ours, theirs = tokenizer.get_vocab(), load_tokenizer(reference).get_vocab()
        if ours != theirs:
            token = min(token for token, _ in ours.items() ^ theirs.items())
            raise UserError(
                f"reference_model {reference.model} has other tokens than model {settings.model} ({len(theirs):,} and {len(ours):,}; "
                f"{token!r} is {theirs.get(token)} and {ours.get(token)}), so their probabilities cannot be compared; give a model "
                "with the same tokenizer."
            )

    runtime.on_main(check)


@contextmanager
def reference_model(
    settings: Settings, runtime: Runtime, device: torch.device, longest: int, packed: np.ndarray | None
) -> Iterator[Any]:
    """Load --reference_model for the block, and free it afterwards; every rank calls this.

    Args:
        longest: tokens of the longest row.
        packed: int (n,), tokens of rows to try packs with; None if no rows are packed.

    Raises:
        UserError: it cannot be loaded, cannot hold the rows, or mixes the rows of a pack.
    """
    reference = settings.of_reference
    assert reference is not None
    print(f"Loading reference model {reference.model} ...", flush=True)
    # Loading seeds the generators, on which the dropout of the trained model depends.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        model, _ = load_model(reference, runtime)
    check_positions(reference, model, longest)
    if packed is not None:
        try:
            on = dataclasses.replace(reference, packing="on")
            prove_rows_apart(on, runtime, model, packed, choose_packing(on, runtime, model))
        except UserError:
            raise UserError(
                f"reference_model {reference.model} would mix the rows of a pack; give --packing off."
            ) from None
    try:
        yield model
    finally:
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
