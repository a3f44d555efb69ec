"""Load another model, or an adapter on its base, as the reference of a preference task, like the trained model."""

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.order.collate import Flatten
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.files.check import ADAPTER_FILE, ADAPTER_WEIGHTS, base_of_reference, of_reference
from unsloth_ddp.model.files.find import is_folder
from unsloth_ddp.model.files.identity import opened_files
from unsloth_ddp.model.loading.classes import read_config
from unsloth_ddp.model.loading.load import check_class, check_positions, load_model, load_tokenizer
from unsloth_ddp.model.packing.attention import choose_packing, flatten_for, prove_prompts_shared, prove_rows_apart
from unsloth_ddp.utils.errors import UserError


def check_reference_tokens(settings: Settings, runtime: Runtime, tokenizer: Any) -> None:
    """Refuse a reference model whose tokenizer has other tokens than that of the model; every rank calls this.

    Raises:
        UserError: on every rank.
    """

    def check() -> None:
        reference = base_of_reference(settings)
        if reference is None:
            return
        with of_reference(settings.of_reference, reference):
            check_class(reference)
            theirs = load_tokenizer(reference).get_vocab()
        ours = tokenizer.get_vocab()
        if ours != theirs:
            token = min(token for token, _ in ours.items() ^ theirs.items())
            raise UserError(
                f"reference_model {settings.reference_model} has other tokens than model {settings.model} "
                f"({len(theirs):,} and {len(ours):,}; {token!r} is {theirs.get(token)} and {ours.get(token)}), so "
                "their probabilities cannot be compared; give a model with the same tokenizer."
            )

    runtime.on_main(check)


def rows_of_reference(settings: Settings) -> int:
    """Return for how many tokens the reference model has weights, by its config.json."""
    base = base_of_reference(settings)
    assert base is not None
    return int(read_config(base).get_text_config().vocab_size)


def load_reference(
    settings: Settings, runtime: Runtime, longest: int, packed: np.ndarray | None, *, prompts_once: bool = False
) -> tuple[Any, Flatten]:
    """Return the model of --reference_model, and what collates packs for it; every rank calls this.

    Args:
        longest: tokens of the longest row.
        packed: int (n,), tokens of rows to try packs with; None if no rows are packed.
        prompts_once: whether to try packs in which the prompt of a pair is computed once.

    Raises:
        UserError: it cannot be loaded, cannot hold the rows, or mixes the rows of a pack.
    """
    print(f"Loading reference model {settings.reference_model} ...", flush=True)
    reference, adapter = _settings_of(settings, runtime)
    # Loading seeds the generators, on which the dropout of the trained model depends.
    with torch.random.fork_rng([torch.cuda.current_device()] if runtime.device_type == "cuda" else []):
        model, _ = load_model(reference, runtime, adapter)
    opened_files(settings, runtime)
    check_positions(reference, model, longest)
    if packed is not None:
        try:
            on = dataclasses.replace(reference, packing="on")
            choice = prove_rows_apart(on, runtime, model, packed, choose_packing(on, runtime, model))
        except UserError:
            raise UserError(
                f"reference_model {settings.reference_model} would mix the rows of a pack; give --packing off."
            ) from None
        if prompts_once:
            prompts_once = prove_prompts_shared(on, runtime, model, packed, choice).prompts_once
    return model.requires_grad_(requires_grad=False).eval(), dataclasses.replace(
        flatten_for(runtime, model), prompts_once=prompts_once
    )


@contextmanager
def reference_model(
    settings: Settings, runtime: Runtime, longest: int, packed: np.ndarray | None
) -> Iterator[tuple[Any, Flatten]]:
    """Load --reference_model for the block (see load_reference), and free it afterwards; every rank calls this."""
    loaded = load_reference(settings, runtime, longest, packed)
    try:
        yield loaded
    finally:
        del loaded
        gc.collect()
        if runtime.device_type == "cuda":
            torch.cuda.empty_cache()


def _settings_of(settings: Settings, runtime: Runtime) -> tuple[Settings, Path | None]:
    """Return the settings that load the reference, and the folder of its adapter, if it is one."""

    def find() -> tuple[str, str | None]:
        base = base_of_reference(settings)
        assert base is not None
        return str(base.model), base.model_revision

    reference = settings.of_reference
    assert reference is not None
    name, revision = runtime.broadcast_from_main(find)
    base = dataclasses.replace(reference, model=name, model_revision=revision)
    if base == reference:
        return reference, None
    if is_folder(reference):
        return base, Path(str(reference.model)).expanduser()
    from huggingface_hub import snapshot_download

    def download() -> str:
        return snapshot_download(
            str(reference.model), revision=reference.model_revision, allow_patterns=[ADAPTER_FILE, ADAPTER_WEIGHTS]
        )

    runtime.on_main(download, per_node=True)
    return base, Path(download())
