"""Identify a model by its files, so that a resumed run is refused if they changed, and a run whose nodes have different ones.

A model from the Hub is identified by its commit (data/sources/revisions.py), a local folder by checksums of its files. Up to
4 GiB of weights are read completely; of more, a tenth is sampled. Loading the model reads them again, mostly from the
page cache. Modification times are not compared, because they differ between copies on different nodes.
"""

import functools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.files.check import ADAPTER_FILE, check_folder
from unsloth_ddp.model.files.find import TOKENIZER, model_folder, weight_files
from unsloth_ddp.utils.errors import UserError, os_reason
from unsloth_ddp.utils.files.checksums import SAMPLE, STRIDE, checksum, sampled_checksum
from unsloth_ddp.utils.units import GIB, counted

READ_COMPLETELY = 4 * GIB
# What is compared between nodes, all of which read at once, perhaps from one disk on the network: samples, and their bytes.
SAMPLES_OF_NODE, SAMPLE_BYTES = 1000, 1 << 16
# generation_config.json is left out: it changes what a model generates, not what it learns.
PARTS = {
    "model_config": ("config.json", ADAPTER_FILE, "*.py"),
    "model_tokenizer": TOKENIZER,
}


def model_identity(settings: Settings) -> dict[str, str]:
    """Return descriptions with checksums of a local model's config, tokenizer and weights; empty for a Hub id.

    Raises:
        OSError: a file cannot be read.
    """
    folder = Path(str(settings.model)).expanduser()
    if not folder.is_dir():
        return {}
    found = {
        name: describe_files(folder, [path for pattern in patterns for path in folder.glob(pattern)])
        for name, patterns in PARTS.items()
    }
    weights = weights_identity(folder)
    return {**found, "model_weights": weights} if weights else found


def weights_identity(folder: Path) -> str | None:
    """Return a description with a checksum of a local model's weights; None if it has no weight files.

    Raises:
        OSError: a file cannot be read.
    """
    files = weight_files(folder)
    return describe_files(folder, files) if files else None


def describe_files(folder: Path, paths: Iterable[Path]) -> str:
    """Return number, bytes and checksum of the files among `paths`, such as "2 files, 1,204 bytes, xxh3 8c1f..."."""
    files = sizes_and_checksums(paths)
    digest = xxhash.xxh3_64()
    for path, (size, one) in files.items():
        digest.update(f"{path.relative_to(folder)}\0{size}\0{one}\0".encode())
    total = sum(size for size, _ in files.values())
    return f"{counted(len(files), 'file')}, {total:,} bytes, xxh3 {digest.hexdigest()}"


def sizes_and_checksums(
    paths: Iterable[Path], sample: int = SAMPLE, most: int | None = None
) -> dict[Path, tuple[int, str]]:
    """Return size and checksum of each file among `paths`, sorted by path.

    Args:
        sample: bytes of each sample that is read of many bytes.
        most: about how many samples are read; None reads one every 10 MiB.
    """
    files = sorted({path for path in paths if path.is_file()})
    sizes = [path.stat().st_size for path in files]
    stride = STRIDE if most is None else max(STRIDE, sum(sizes) // most)
    sampled = functools.partial(sampled_checksum, sample=sample, stride=stride)
    read = checksum if sum(sizes) <= READ_COMPLETELY else sampled
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(files, zip(sizes, pool.map(read, files), strict=True), strict=True))


def check_same_files(settings: Settings, runtime: Runtime) -> None:
    """Refuse files that a node cannot read completely or that differ from those of rank 0; every rank calls this.

    The ranks never compare the weights that they only read. The first process of each node reads the files for the others.

    Raises:
        UserError: on every rank, naming the file and the rank.
    """
    everyones = runtime.gather(runtime.broadcast_from_node_main(lambda: describe_model(settings)))
    for rank, files in enumerate(everyones):
        if difference := first_difference(everyones[0], files):
            raise UserError(
                f"model {settings.model}: {difference} on {runtime.locations[rank]} differs from that on "
                f"{runtime.locations[0]}; each rank reads the files of its node, so copy the same files to every node."
            )


def describe_model(settings: Settings) -> dict[str, str]:
    """Return size and checksum of config.json and of each weight file.

    The result is empty if the files are not on this machine; loading raises the error then.

    Raises:
        UserError: a file is missing or truncated, or lacks a tensor that the index lists.
    """
    folder = model_folder(settings)
    if folder is None:
        return {}
    check_folder(folder, safetensors_only=settings.use_safetensors)
    try:
        found = sizes_and_checksums([folder / "config.json", *weight_files(folder)], SAMPLE_BYTES, SAMPLES_OF_NODE)
    except OSError as error:
        raise UserError(f"model {settings.model} cannot be read: {os_reason(error)}; check {folder}.") from None
    return {path.name: f"{size:,} bytes, xxh3 {digest}" for path, (size, digest) in found.items()}


def first_difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """Return the name of the first file that differs; None if all are the same."""
    return next((name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)), None)
