"""Check a model before it is loaded: JSON files, index, headers of weight files, and whether it can be trained.

The libraries below fail on a damaged folder with unclear errors, or train weights that were never loaded. Nothing in
the folder is executed, and of the weights only the headers are read.
"""

import dataclasses
import importlib.util
import json
import shlex
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.rows import HUB_ID
from unsloth_ddp.distributed.sharding import Sharding
from unsloth_ddp.model.files.architecture import check_architecture
from unsloth_ddp.model.files.find import is_folder
from unsloth_ddp.utils.errors import UserError, one_line, os_reason
from unsloth_ddp.utils.files.safe import stays_inside
from unsloth_ddp.utils.units import counted

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_FILE = "adapter_config.json"
# Quantizations of a base model on which adapters can be trained, by Transformers' names.
TRAINABLE = {"unsloth": ("bitsandbytes", "mxfp4", "fp8"), "transformers": ("bitsandbytes",)}
LARGEST_JSON = 1 << 28
# A config with more is compared with the weight files.
MOST_LAYERS, MOST_WORDS, MOST_TOKENS = 1000, 1_000_000, 10_000_000
LFS_POINTER = b"version https://git-lfs.github.com/spec"
ZIP = b"PK"
# The weights in a checkpoint of full training with FSDP2 (checkpoints/shards.py).
SHARDS = "weights/shard-*.safetensors"
SAFE, PICKLED = "model.safetensors", "pytorch_model.bin"
# Files that hold one JSON object each, checked if they exist.
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


def check_local_model(model: str, *, safetensors_only: bool) -> None:
    """Refuse a local model folder that is incomplete; Hub ids are not checked."""
    path = Path(model).expanduser()
    if not path.exists() and HUB_ID.fullmatch(model):
        return
    if "://" in model:
        name = "/".join(urlsplit(model).path.split("/")[1:3])
        raise UserError(f"model {model} is a URL; give the model's id on the Hub{f': {name}' if name else ''}.")
    if (path / ADAPTER_FILE).is_file():
        check_no_adapter(model, read_model_file(model, ADAPTER_FILE) or {})
    if not path.exists():
        raise UserError(f"model {model}: there is no such folder; give the folder of a saved model, or a Hub id.")
    if not (path / "config.json").is_file():
        inner = next(iter(sorted(path.glob("*/config.json"))), None)
        fix = f"did you mean {inner.parent}?" if inner else "give a Hub id or a saved model."
        raise UserError(f"model {model} is not a model folder: it has no config.json; {fix}")
    check_architecture(model, _read_json(path, "config.json"))
    check_folder(path, safetensors_only=safetensors_only)


def check_folder(folder: Path, *, safetensors_only: bool) -> None:
    """Refuse a folder that cannot be loaded completely."""
    for name in JSON_FILES:
        if (folder / name).is_file():
            content = _read_json(folder, name)
            if name == "tokenizer.json":
                _refuse_impossible_tokens(folder, content)
    weights = _weight_files(folder, SAFE)
    if weights is None and any(folder.glob(SHARDS)):
        raise UserError(
            f"model {folder} is a checkpoint of full training with FSDP2, whose weights are in shards; make a model of "
            f"them with `python -m unsloth_ddp.export {shlex.quote(str(folder))} --to merged` and give that as "
            "--model, or go on with the run by its --run_name."
        )
    if weights is None:
        pickled = _weight_files(folder, PICKLED)
        if pickled is None:
            raise UserError(f"model {folder} holds no weights ({SAFE} or {SAFE}.index.json); download it again.")
        if safetensors_only:
            raise UserError(
                f"model {folder} has its weights in pickle files, which are not read by default because a pickle can "
                "carry code; save it with safetensors, or give --no_use_safetensors if you trust its source."
            )
        for name in pickled:
            _refuse_pointer(folder, name)
            _refuse_truncated(folder, name)
        return
    stored: dict[str, list[int]] = {}
    for name, listed in weights.items():
        shapes = _stored_shapes(folder, name)
        stored |= shapes
        if missing := sorted(listed - shapes.keys()):
            raise UserError(
                f"model {folder}: {SAFE}.index.json lists {missing[0]} in {name}, which does not contain it; "
                "download the model again."
            )
    if (folder / "config.json").is_file():
        _refuse_impossible_sizes(folder, _read_json(folder, "config.json"), stored)


def _refuse_impossible_sizes(folder: Path, config: dict[str, Any], stored: dict[str, list[int]]) -> None:
    """Refuse far more layers or words than the files hold: building the model would take minutes or all memory."""
    longest = max((size for shape in stored.values() for size in shape), default=0)
    for name, value in config.items():
        if isinstance(value, dict):
            _refuse_impossible_sizes(folder, value, stored)
        elif type(value) is int and (
            (name.endswith(("layer", "layers")) and value > max(len(stored), MOST_LAYERS))
            or (name == "vocab_size" and value > max(longest, MOST_WORDS))
        ):
            raise UserError(
                f"model {folder}: config.json has {name} {value:,}, but the weight files hold only "
                f"{counted(len(stored), 'tensor')}, none longer than {longest:,}; download the model again."
            )


def check_no_hub_kernel(model: str, config: Any) -> None:
    """Refuse a config.json that names a kernel on the Hub: with `kernels` installed, loading would run its code.

    Args:
        config: its content, or that of a part of it.
    """
    for name, value in config.items() if isinstance(config, dict) else ():
        if name.endswith("_implementation") and "/" in (text := json.dumps(value)):
            raise UserError(
                f"model {model}: its config.json names code on the Hub ({name} {text[:100]}), which would run; remove "
                "that entry, or give --trust_remote_code if you trust its source."
            )
        check_no_hub_kernel(model, value)


def _refuse_impossible_tokens(folder: Path, tokenizer: dict[str, Any]) -> None:
    """Refuse ids for which the tokenizer's library would reserve all memory, and end the process."""
    model = tokenizer.get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    for word, token in words.items() if isinstance(words, dict) else ():
        if type(token) is not int or not 0 <= token < MOST_TOKENS:
            raise UserError(
                f"model {folder}: tokenizer.json gives {word[:50]!r} the id {str(token)[:50]}, but an id is a whole "
                f"number below {MOST_TOKENS:,}; download the model again."
            )


def check_adapter_file(folder: Path) -> None:
    """Refuse an adapter whose file cannot be read or is shorter than its header says."""
    from safetensors import SafetensorError, safe_open

    path = folder / ADAPTER_WEIGHTS
    try:
        with safe_open(path, framework="numpy"):
            return
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"The adapter in {folder} is damaged: {ADAPTER_WEIGHTS} cannot be read ({one_line(error)}); copy it again, "
            "or give a checkpoint of the run, such as RUN/checkpoint-100."
        ) from None


def check_complete(folder: str, missing: list[str], mismatched: list[Any]) -> None:
    """Refuse a model if some of its weights are not in its files, because they would be random."""
    absent = sorted(missing) or [str(item[0] if isinstance(item, tuple) else item) for item in mismatched]
    if absent:
        raise UserError(
            f"model {folder}: its files lack {counted(len(absent), 'weight')} (the first: {absent[0]}), which would be "
            "random; download it again, or correct config.json if its sizes are wrong."
        )


def _weight_files(folder: Path, single: str) -> dict[str, set[str]] | None:
    """Return the weight files of one format with the weights that the index lists for each; None if there are none."""
    if (folder / single).is_file():
        return {single: set()}
    index = f"{single}.index.json"
    if not (folder / index).is_file():
        return None
    placed = _read_json(folder, index).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(name, str) for name in placed.values()):
        raise UserError(f"model {folder}: {index} has no weight_map of names; download the model again.")
    files: dict[str, set[str]] = {}
    for weight, name in placed.items():
        files.setdefault(name, set()).add(weight)
    for name in files:
        if not stays_inside(name):
            raise UserError(
                f"model {folder}: {index} names {name[:100]!r}, which is not a file of this folder; do not use this "
                "model."
            )
        if not _is_file(folder / name):
            raise UserError(
                f"model {folder}: {name[:100]} is missing, which {index} lists as one of {len(files)} weight files; "
                "download the model again."
            )
    return files


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long
        return False


def _stored_shapes(folder: Path, name: str) -> dict[str, list[int]]:
    """Return the shape of each weight in a safetensors file; opening it also checks the length against the header."""
    from safetensors import SafetensorError, safe_open

    _refuse_pointer(folder, name)
    try:
        with safe_open(folder / name, framework="numpy") as file:
            weights = file.keys()
            return {weight: file.get_slice(weight).get_shape() for weight in weights}
    except (SafetensorError, OSError) as error:
        raise UserError(f"model {folder}: {name} is damaged ({one_line(error)}); download it again.") from None


def _refuse_pointer(folder: Path, name: str) -> None:
    """Refuse a Git LFS pointer, which git leaves in place of a large file if Git LFS is not set up."""
    try:
        with (folder / name).open("rb") as file:
            begin = file.read(len(LFS_POINTER))
    except OSError:
        return  # the read that follows reports it
    if begin == LFS_POINTER:
        raise UserError(
            f"model {folder}: {name} is a Git LFS pointer, not the file itself; run git lfs pull in that folder, or "
            "download the model with uv run hf download NAME."
        )


def _refuse_truncated(folder: Path, name: str) -> None:
    """Refuse a truncated file of torch.save: a zip archive, whose directory is at its end. Nothing is unpickled."""
    try:
        with (folder / name).open("rb") as file:
            # Files of torch before 1.6 are plain pickles, whose end cannot be told.
            whole = file.read(len(ZIP)) not in (ZIP, b"") or zipfile.is_zipfile(file)
    except OSError as error:
        raise UserError(f"model {folder}: {name} cannot be read ({os_reason(error)}); download it again.") from None
    if not whole:
        raise UserError(f"model {folder}: {name} is truncated; download it again.")


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    _refuse_pointer(folder, name)
    path = folder / name
    if path.stat().st_size > LARGEST_JSON:
        raise UserError(f"model {folder}: {name} has over {LARGEST_JSON:,} bytes; download the model again.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"model {folder}: {name} is not JSON ({one_line(error)}); download the model again.") from None
    if not isinstance(content, dict):
        raise UserError(f"model {folder}: {name} is not a JSON object; download the model again.")
    return content


# ---- adapters and quantized models, in a folder or on the Hub ----


def check_no_adapter(model: str, adapter: dict[str, Any] | None) -> None:
    """Refuse an adapter as --model, and say how to train on from it.

    Args:
        adapter: content of its adapter_config.json; None for a model that is not an adapter.
    """
    if adapter is None:
        return
    base = str(adapter.get("base_model_name_or_path") or "").strip()
    named = f"the base model {base}" if base else "a base model that its adapter_config.json does not name"
    option = f"--model {shlex.quote(base)}" if base else "that base as --model"
    raise UserError(
        f"model {model} is an adapter for {named}; give {option} to train a new adapter, with --resume to go on with "
        "its run, or the merged model (`python -m unsloth_ddp.export RUN --to merged`, or PEFT's merge_and_unload) to "
        "train on from it."
    )


def check_quantization(
    settings: Settings, backend: str | None, config: dict[str, Any] | None, sharding: Sharding = "none"
) -> None:
    """Refuse a quantization that the backend or the sharding cannot train, or that contradicts --method.

    Args:
        backend: None while rows may decide it, which they do for a model in 16 bit only (model/backend.py).
        config: content of the model's config.json; None if it cannot be read yet.
    """
    quantization = (config or {}).get("quantization_config")
    if not isinstance(quantization, dict):
        return
    assert backend is not None
    method = str(quantization.get("quant_method") or "bitsandbytes").lower()
    if method not in TRAINABLE[backend]:
        raise UserError(
            f"model {settings.model} is quantized already ({method}), which this kit does not train with backend "
            f"{backend}; give the 16-bit model that it was made from (its model card names it), with --method qlora to "
            "load that in 4 bits."
        )
    # Unsloth loads the 16-bit repository instead of the 4-bit one if it knows both.
    replaceable = backend == "unsloth" and not is_folder(settings)
    if method == "bitsandbytes" and settings.method != "qlora" and not replaceable:
        raise UserError(
            f"model {settings.model} is quantized already (bitsandbytes), and method {settings.method} is for 16-bit "
            "weights; give --method qlora, or the 16-bit model that it was made from."
        )
    if sharding == "fsdp2" and quantization.get("load_in_8bit"):
        # bitsandbytes keeps scales beside 8-bit weights, which would be sharded away from them.
        raise UserError(
            f"model {settings.model} is quantized to 8 bits (bitsandbytes), which FSDP2 cannot shard; give the 16-bit "
            "model that it was made from, which --method qlora loads in 4 bits, or a 4-bit one."
        )


def check_source(settings: Settings, backend: str | None, sharding: Sharding = "none") -> None:
    """Refuse an adapter or a model quantized in a way that cannot be trained, in a folder or on the Hub."""
    model, revision = str(settings.model), settings.model_revision
    check_no_adapter(model, read_model_file(model, ADAPTER_FILE, revision))
    config = read_model_file(model, "config.json", revision)
    check_architecture(model, config)
    check_quantization(settings, backend, config, sharding)


def read_model_file(model: str, name: str, revision: str | None = None) -> dict[str, Any] | None:
    """Return a JSON object of a model; None if its file is missing, unreachable or no object (loading raises then)."""
    try:
        content = json.loads(read_model_text(model, name, revision) or "null")
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def read_model_text(model: str, name: str, revision: str | None = None) -> str | None:
    """Return the text of a model's file; None if it is missing or unreachable."""
    path = Path(model).expanduser() / name
    try:
        if not path.parent.is_dir():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(model, name, revision=revision))
        return path.read_text(encoding="utf-8")
    except Exception:  # the Hub's errors and those of its HTTP client have no common class
        return None


def is_padded_by_unsloth(config: Mapping[str, Any]) -> bool:
    """Return whether Unsloth would pad the rows of a model with this config.json, which Transformers packs.

    Unsloth computes attention that torch's sdpa does not have, such as that with sinks, by code that takes no
    boundaries of rows. The classes say which they have. They are read as text: Unsloth must be imported first.
    """
    text = config.get("text_config")
    kind = str((text if isinstance(text, dict) else config).get("model_type")).replace("-", "_")
    package = importlib.util.find_spec("transformers")
    assert package is not None and package.origin is not None
    source = Path(package.origin).parent / "models" / kind / f"modeling_{kind}.py"
    if "quantization_config" in config or not kind.isidentifier() or not source.is_file():
        return False
    classes = source.read_text(encoding="utf-8")
    return "_supports_sdpa = False" in classes and "_supports_flash_attn = True" in classes


def base_of_reference(settings: Settings) -> Settings | None:
    """Return the settings that load --reference_model, or the base model of that adapter; None without one.

    Raises:
        UserError: the adapter does not name its base model.
    """
    reference = settings.of_reference
    if reference is None:
        return None
    adapter = read_model_file(str(reference.model), ADAPTER_FILE, reference.model_revision)
    if adapter is None:
        return reference
    base = str(adapter.get("base_model_name_or_path") or "").strip()
    if not base:
        raise UserError(
            f"reference_model {reference.model} is an adapter whose {ADAPTER_FILE} does not name its base model; write "
            "the model's name or folder there as base_model_name_or_path."
        )
    revision = settings.model_revision if base == settings.model else adapter.get("revision")
    return dataclasses.replace(reference, model=base, model_revision=revision)


def check_reference(settings: Settings, backend: str | None = None) -> None:
    """Refuse a reference model that is incomplete or cannot be loaded, by its small files.

    Args:
        backend: None before it is chosen, when only folders are checked.

    Raises:
        UserError: naming the model.
    """
    reference = settings.of_reference
    if reference is None or (backend is None and HUB_ID.fullmatch(str(reference.model)) and not is_folder(reference)):
        return
    base = base_of_reference(settings)
    assert base is not None
    with of_reference(reference, base):
        check_local_model(str(base.model), safetensors_only=base.use_safetensors)
        if backend is not None:
            check_quantization(base, backend, read_model_file(str(base.model), "config.json", base.model_revision))
    if base != reference and is_folder(reference):
        check_adapter_file(Path(str(reference.model)).expanduser())


@contextmanager
def of_reference(reference: Settings | None, base: Settings) -> Iterator[None]:
    """Say in an error of the block, which names a model only, that it is that of --reference_model."""
    try:
        yield
    except UserError as error:
        of = "" if reference in (None, base) else f"the base of {reference.model}, "
        raise UserError(f"reference_model: {of}{error}") from None
