"""Drive Unsloth's GPU code on a CPU, for its wiring with the kit: `python -m tests.unsloth_on_cpu FAMILY...`.

Unsloth takes the machine for one with a GPU, its Triton kernels are interpreted, nothing is compiled, and what asks for
the device "cuda" gets the CPU. Speed, memory and compiled code are not covered: those need a GPU.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Read when Triton, torch and Unsloth are imported.
    os.environ |= {
        "UNSLOTH_ALLOW_CPU": "1",
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "UNSLOTH_COMPILE_DISABLE": "1",
        # Flex attention has no backward pass on a CPU.
        "UNSLOTH_ENABLE_FLEX_ATTENTION": "0",
        "UNSLOTH_DISABLE_STATISTICS": "1",
        "HF_HUB_OFFLINE": "1",
    }

import gc
import json
import re
import tempfile
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch.overrides import TorchFunctionMode
from triton.language.extra import libdevice

GIB = 2**30
PROPERTIES = SimpleNamespace(
    name="a CPU that stands in for a GPU", total_memory=16 * GIB, major=8, minor=0, multi_processor_count=8,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32,
    shared_memory_per_block_optin=2**17, gcnArchName="", L2_cache_size=2**20,
)  # fmt: skip
ANSWERS: dict[str, Any] = {
    "get_device_properties": PROPERTIES, "get_device_capability": (8, 0), "get_device_name": PROPERTIES.name,
    "is_available": True, "device_count": 1, "current_device": 0, "mem_get_info": (8 * GIB, 16 * GIB),
    "memory_allocated": 0,
    "memory_reserved": 0, "max_memory_allocated": 0, "max_memory_reserved": 0, "is_bf16_supported": True,
    "synchronize": None, "empty_cache": None, "set_device": None, "reset_peak_memory_stats": None,
    "get_rng_state": torch.get_rng_state(),
}  # fmt: skip


class CudaIsCpu(TorchFunctionMode):
    """Replace the device "cuda" by "cpu" in every call of a torch function."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A number as a device is a GPU's.
        kwargs = {n: on_cpu("cuda" if n == "device" and isinstance(v, int) else v) for n, v in (kwargs or {}).items()}
        return function(*map(on_cpu, args), **kwargs)


def on_cpu(value: Any) -> Any:
    """Return the CPU for a GPU, and anything else as it is."""
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


def stand_in() -> None:
    """Answer what Unsloth asks torch.cuda for its properties, and send tensors to the CPU."""
    for name, value in ANSWERS.items():
        setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    torch._C._cuda_getCurrentRawStream = lambda *_: 0
    # Functions of CUDA's library return nothing there.
    libdevice.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
    CudaIsCpu().__enter__()


def families() -> list[str]:
    """Return the model types of language models whose classes Unsloth's source names, without importing it."""
    from tests.tiny_models import model_types

    named = set()
    for package in ("unsloth", "unsloth_zoo"):
        for place in find_spec(package).submodule_search_locations or ():
            for path in Path(place).rglob("*.py"):
                named |= set(re.findall(r"transformers\.models\.(\w+)", path.read_text(encoding="utf-8")))
    trained = (model_types(images=False) | model_types(images=True)).keys()
    # The vision tower of Gemma 3n needs timm.
    return sorted({"gemma3n": "gemma3n_text"}.get(name, name) for name in named & trained)


def drive(family: str, folder: Path) -> dict[str, Any]:
    """Load a tiny model as the kit does, compute passes with each kind of gradient checkpointing, save it and load it.

    Returns:
        the methods that Unsloth has put on the model (`wrapped`), the loss and the norm of the gradients of each pass
        (`passes`), why rows are not packed (`padded`), and the losses before saving and after loading (`saved`); or why
        the kit does not load it (`refused`).
    """
    from unsloth_ddp.config.parse import parse_settings
    from unsloth_ddp.data.arrow_rows import join_rows
    from unsloth_ddp.data.order.collate import PadRight
    from unsloth_ddp.distributed.ranks import Ranks
    from unsloth_ddp.distributed.runtime import Runtime
    from unsloth_ddp.model.forward.gradient_checkpointing import KINDS, GradientCheckpointing
    from unsloth_ddp.model.loading.load import load_model
    from unsloth_ddp.model.loading.trained import load_trained
    from unsloth_ddp.model.packing import row_check
    from unsloth_ddp.model.packing.attention import choose_packing, flatten_for, prove_rows_apart
    from unsloth_ddp.utils.errors import UserError

    save_small(family, folder / "model")
    # Interpreted kernels compute bf16 wrongly: gradients of Unsloth's norm are NaN.
    options = [
        "--model",
        str(folder / "model"),
        "--dataset",
        "rows.jsonl",
        "--backend",
        "unsloth",
        "--precision",
        "fp16",
    ]
    settings = parse_settings([*options, "--max_length", "64", "--packing", "on"])
    runtime = Runtime(Ranks(), "unsloth", "cpu", "fp16", "cpu")
    try:
        model, tokenizer = load_model(settings, runtime)
    except UserError as refusal:
        return {"refused": str(refusal)}
    lengths = row_check.TOKENS_AHEAD, row_check.ROW = 5, 3
    rows = [{"input_ids": ids, "labels": ids} for ids in np.split(np.arange(9, 9 + sum(lengths)), lengths[:1])]
    result: dict[str, Any] = {"wrapped": wrapped(model), "passes": {}, "padded": None}
    batches = {"padded": PadRight(tokenizer.pad_token_id)(rows)}
    try:
        prove_rows_apart(settings, runtime, model, np.arange(5, 100), choose_packing(settings, runtime, model))
    except UserError as refusal:
        result["padded"] = str(refusal)
    else:
        batches["packed"] = flatten_for(runtime, model)([join_rows(rows)])
    checkpointing = GradientCheckpointing(model, runtime, settings)
    model.train()
    for kind in KINDS:
        checkpointing.use(kind)
        result["passes"][kind] = {name: one_pass(model, batch) for name, batch in batches.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02)
        model.save_pretrained(save_directory=folder / "trained")
        again = load_trained(settings, folder / "trained", runtime)
        result["saved"] = [float(one.eval()(**batches["padded"], use_cache=False).loss) for one in (model, again)]
    return result


def save_small(family: str, folder: Path) -> None:
    """Write a model of two layers, or of four where its config lists them."""
    from huggingface_hub.errors import StrictDataclassError

    from tests.tiny_models import model_types, save_tiny

    names = model_types(images=False) | model_types(images=True)
    try:
        save_tiny(family, names[family], folder, sizes={"num_hidden_layers": 2})
    except (ValueError, StrictDataclassError):
        save_tiny(family, names[family], folder)


def wrapped(model: Any) -> list[str]:
    """Return the names of the methods that Unsloth has put on a model or its classes, also in place of others."""
    names, parts = set(), [model, model.base_model, model.base_model.model]
    for part in parts:
        names |= {name for name, value in vars(part).items() if callable(value) and not isinstance(value, type)}
        for name in dir(type(part)):
            owner = getattr(getattr(type(part), name, None), "__globals__", {}).get("__name__", "")
            names |= {name} if owner.startswith("unsloth") else set()
    return sorted(name for name in names if not name.startswith("_"))


def one_pass(model: Any, batch: dict[str, Any]) -> tuple[float, float]:
    """Return the loss of a batch and the norm of the gradients."""
    model.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(**batch, use_cache=False).loss
    loss.backward()
    gradients = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    return float(loss), float(torch.stack(gradients).norm())


def main() -> None:
    """Print a line of JSON for each family: its name, and what `drive` returned or the traceback that it ended with.

    Each family has a process of its own, because Unsloth changes classes for one family that another one uses.
    """
    stand_in()
    import unsloth  # noqa: F401

    gc.collect()
    # Unsloth collects garbage often, and walks all that is imported.
    gc.freeze()
    for family in sys.argv[1:]:
        sys.stdout.flush()
        if not (child := os.fork()):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    outcome = drive(family, Path(folder))
                except Exception:
                    outcome = {"error": traceback.format_exc()}
            print("\n" + json.dumps({"family": family, **outcome}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
