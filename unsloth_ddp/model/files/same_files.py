"""Refuse a model whose files differ between nodes or are incomplete: the ranks never compare the weights that they only read."""

from __future__ import annotations

from pathlib import Path

import xxhash

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.files.check import check_folder
from unsloth_ddp.model.files.find import model_folder, weight_files
from unsloth_ddp.utils.errors import UserError, os_reason

# Parts of a model's files that are compared between nodes, at least so many of each file, and their size. Each part takes
# a disk on the network some milliseconds.
PARTS, PARTS_OF_FILE, PART_BYTES = 512, 32, 4096


def check_same_files(settings: Settings, runtime: Runtime) -> None:
    """Refuse files that a node cannot read completely or that differ from those of rank 0; every rank calls this.

    The first process of each node reads them for the others.

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
    """Return size and checksum of config.json and of each weight file (see _describe).

    The result is empty if the files are not on this machine; loading raises the error then.

    Raises:
        UserError: a file is missing or truncated, or lacks a tensor that the index lists.
    """
    folder = model_folder(settings)
    if folder is None:
        return {}
    check_folder(folder, safetensors_only=settings.use_safetensors)
    found = {path.name: path for path in [folder / "config.json", *weight_files(folder)]}
    parts = max(PARTS_OF_FILE, PARTS // len(found))
    try:
        return {name: _describe(path, parts) for name, path in found.items()}
    except OSError as error:
        raise UserError(f"model {settings.model} cannot be read: {os_reason(error)}; check {folder}.") from None


def first_difference(ours: dict[str, str], theirs: dict[str, str]) -> str | None:
    """Return the name of the first file that differs; None if all are the same."""
    return next((name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)), None)


def _describe(path: Path, parts: int) -> str:
    """Return the file's size, and a checksum of its header and of parts of its content.

    Two fine-tunes of one model have the same header, and their files are too large to be read twice. They differ almost
    everywhere, so evenly spaced parts show it.
    """
    size = path.stat().st_size
    found = xxhash.xxh3_64()
    # A buffer would read a whole block for each part, which has megabytes on some file systems.
    with path.open("rb", buffering=0) as file:
        if path.suffix == ".safetensors":
            begin = file.read(8)
            found.update(begin)
            # A file that is not one of the model's may begin with anything.
            found.update(file.read(min(int.from_bytes(begin, "little"), size)))
        for start in _starts(size, parts):
            file.seek(start)
            found.update(file.read(PART_BYTES))
    return f"{size:,} bytes, xxh3 {found.hexdigest()}"


def _starts(size: int, parts: int) -> range:
    """Return where the compared parts of a file begin: the whole file if it is small, else `parts` of them."""
    return range(0, size, max(PART_BYTES, size // parts))
