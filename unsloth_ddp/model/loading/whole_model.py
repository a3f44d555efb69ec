"""Switch to the backend that loads in shards if the whole model, which Unsloth would load first, does not fit on a GPU."""

import contextlib
import math
from collections.abc import Iterable

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.files.find import is_folder, model_folder, safetensors_files, stored_tensors
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.memory_limits import BYTES_PACKED, FILLED
from unsloth_ddp.utils.units import shown_bytes


def choose_backend_by_size(settings: Settings, runtime: Runtime) -> None:
    """With FSDP2, replace Unsloth by Transformers if the whole model does not fit on every GPU.

    Every rank calls this, before the backend is imported. A model of unknown size keeps Unsloth.

    Raises:
        UserError: the user asks for Unsloth.
    """
    if runtime.sharding != "fsdp2" or runtime.backend != "unsloth":
        return
    room = min(runtime.gather(gpu_bytes()))
    needed = runtime.broadcast_from_main(lambda: bytes_while_loading(settings, runtime.parts))
    if needed is None or needed <= FILLED * room:
        return
    why = f"Unsloth would load it whole, which takes {shown_bytes(needed)}, and a GPU has {shown_bytes(room)}"
    if settings.backend == "unsloth":
        raise UserError(f"model {settings.model}: {why}; give --backend transformers, which loads it in shards.")
    runtime.backend = "transformers"
    if runtime.ranks.is_main:
        print(f"Using backend transformers, which loads model {settings.model} in shards: {why}.", flush=True)


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
    """Return (name, dtype, shape) of the tensors in a model's safetensors files, local or on the Hub; empty if unknown."""
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
