"""Count the bytes of a whole model, which Unsloth loads on every GPU before it is sharded."""

import contextlib
import math
from collections.abc import Iterable

from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.files.find import is_folder, model_folder, safetensors_files, stored_tensors
from unsloth_ddp.utils.memory_limits import BYTES_PACKED


def gpu_bytes() -> int:
    """Return the bytes of this process's GPU that it may use."""
    import torch

    return int(torch.cuda.get_per_process_memory_fraction() * torch.cuda.mem_get_info()[1])


def bytes_while_loading(settings: Settings, parts: int) -> int | None:
    """Return the peak bytes of loading the whole model on a GPU and then sharding it; None if its size is not known.

    Args:
        parts: number of processes that a replica of the model is sharded over.
    """
    tensors = read_tensors(settings)
    if not tensors:
        return None
    # accelerate keeps trained weights in fp32, and holds a shard in addition to the whole model while it shards.
    each = 4.0 if settings.method == "full" else 2.0
    return int(whole_bytes(tensors, each, packs=settings.method == "qlora") * (1 + 1 / parts))


def whole_bytes(tensors: Iterable[tuple[str, str, list[int]]], each: float, *, packs: bool) -> float:
    """Return the bytes of a loaded model.

    Args:
        tensors: (name, safetensors dtype, shape) of the tensors in its files.
        each: bytes per value after loading.
        packs: whether the weight matrices of layers are quantized to 4 bits.
    """

    def bytes_of(name: str, dtype: str, shape: list[int]) -> float:
        if dtype in ("U8", "I8"):
            return 1.0  # packed already
        embeds = "embed" in name or "lm_head" in name
        return BYTES_PACKED if packs and len(shape) > 1 and not embeds else each

    return sum(math.prod(shape) * bytes_of(name, dtype, shape) for name, dtype, shape in tensors)


def read_tensors(settings: Settings) -> list[tuple[str, str, list[int]]]:
    """Return (name, dtype, shape) of the tensors in safetensors files, local or on the Hub; empty if unknown."""
    from huggingface_hub import get_safetensors_metadata

    folder, model = model_folder(settings), str(settings.model)
    try:
        # A complete download needs no requests to the Hub.
        if not is_folder(settings) and not (folder and safetensors_files(folder)):
            with contextlib.suppress(Exception):  # no network: read the cache
                files = get_safetensors_metadata(model, revision=settings.model_revision).files_metadata.values()
                if tensors := [
                    (name, str(t.dtype), list(t.shape)) for file in files for name, t in file.tensors.items()
                ]:
                    return tensors
        # Beside the files of the index there may be the same weights in another format.
        paths = [] if folder is None else safetensors_files(folder) or sorted(folder.glob("*.safetensors"))
        return [(name, tensor.dtype, tensor.shape) for name, tensor in stored_tensors(paths).items()]
    except Exception:  # damaged files: loading raises the error
        return []
