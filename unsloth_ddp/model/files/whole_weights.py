"""Write the weights of a sharded model as ordinary safetensors files, layer by layer.

Every rank takes part in gathering, one weight at a time; only the writing rank keeps it, until its layer is written.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from unsloth_ddp.utils.files.tensors import FILE_BYTES, ModelFiles

# The name of PEFT's adapter file, without its suffix.
ADAPTER = "adapter_model"
# Weight files that save_pretrained writes even for an empty state dict.
WITHOUT_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# Runs a write; returns False if it failed.
Attempt = Callable[[Callable[[], Any]], Any]


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole of a sharded tensor; every rank calls this."""
    if not isinstance(tensor, DTensor):
        return tensor
    device = tensor.device_mesh.device_type
    if tensor.to_local().device.type != device:
        # Move weights that are offloaded to host memory to the device on which the ranks communicate.
        tensor = DTensor.from_local(
            tensor.to_local().to(device),
            tensor.device_mesh,
            tensor.placements,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    return tensor.full_tensor()


def by_layer(names: Iterable[str]) -> Iterator[list[str]]:
    """Yield the names of each layer together, and names outside of layers one by one."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layer = re.match(r".*?\.\d+\.", name)
        layers.setdefault(layer[0] if layer else name, []).append(name)
    yield from layers.values()


def saved_tensors(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that save_pretrained would write: no duplicates of tied weights, no keys to ignore on save."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()
    names_by_id: dict[int, str] = {}
    for name, tensor in tensors.items():
        if name in left_out:
            continue
        other_name = names_by_id.get(id(tensor))
        if other_name is None or (other_name in tied and name not in tied):
            names_by_id[id(tensor)] = name
    names = set(names_by_id.values())
    return {name: tensor for name, tensor in tensors.items() if name in names}


def describe_without_weights(save: Callable[[dict[str, Tensor]], Any], folder: Path) -> None:
    """Write a model without its weights to `folder`, by calling `save` with an empty state dict."""
    save({})
    for name in WITHOUT_WEIGHTS:
        (folder / name).unlink(missing_ok=True)


def write_model(
    model: Any,
    names: list[str],
    fetch: Callable[[str], Tensor],
    folder: Path | None,
    attempt: Attempt,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write the weights of a whole model under the names of its checkpoint on the Hub.

    Args:
        model: Transformers' model, whose conversion of weights on loading is undone.
        names: of the tensors to write, as the model names them.
        fetch: returns a whole tensor; called on every rank, in the same order.
        folder: where this rank writes; None if another one does.
        attempt: runs a write; returns False if it failed, which it records while the ranks continue.
        file_bytes: the largest size of a file.
    """
    # Unsloth has to be imported before Transformers.
    from transformers.core_model_loading import revert_weight_conversion

    files = ModelFiles(folder, names, file_bytes=file_bytes) if folder else None
    _write(files, by_layer(names), fetch, functools.partial(revert_weight_conversion, model), attempt)


def write_adapter(
    names: Mapping[str, str], fetch: Callable[[str], Tensor], folder: Path | None, attempt: Attempt
) -> None:
    """Write an adapter as PEFT does, to one file; `names` maps the model's names to PEFT's (see write_model)."""
    files = ModelFiles(folder, list(names.values()), stem=ADAPTER, file_bytes=None) if folder else None
    _write(
        files,
        ([name] for name in names),
        fetch,
        lambda layer: {names[name]: tensor for name, tensor in layer.items()},
        attempt,
    )


def _write(
    files: ModelFiles | None,
    layers: Iterable[list[str]],
    fetch: Callable[[str], Tensor],
    rename: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    attempt: Attempt,
) -> None:
    # A rank whose write failed continues to gather with the others.
    failed = False

    def add(layer: dict[str, Tensor]) -> None:
        assert files is not None
        for name, tensor in rename(layer).items():
            files.add(name, tensor)

    with files or contextlib.nullcontext():
        for layer in layers:
            whole = {}
            for name in layer:
                tensor = fetch(name)
                if files is not None and not failed:
                    whole[name] = tensor.detach().to("cpu")
                del tensor
            if files is not None and not failed:
                failed = attempt(functools.partial(add, whole)) is False
        if files is not None and not failed:
            attempt(files.close)
