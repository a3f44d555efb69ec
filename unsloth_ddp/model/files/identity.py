"""Identify the base model of a run by its files, so that a resumed run is refused if they changed.

A model from the Hub is identified by its commit (data/revisions.py), a local folder by checksums of its files. Up to
4 GiB of weights are read completely; of more, a tenth is sampled. Loading the model reads them again, mostly from the
page cache. Modification times are not compared, because they differ between copies on different nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.files.find import TOKENIZER, weight_files
from unsloth_ddp.utils.files.checksums import checksum, sampled_checksum
from unsloth_ddp.utils.units import GIB, counted

READ_COMPLETELY = 4 * GIB
# generation_config.json is left out: it changes what a model generates, not what it learns.
PARTS = {
    "model_config": ("config.json", "*.py"),
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
    files = sorted({path for path in paths if path.is_file()})
    sizes = [path.stat().st_size for path in files]
    read = checksum if sum(sizes) <= READ_COMPLETELY else sampled_checksum
    with ThreadPoolExecutor(max_workers=4) as pool:
        checksums = list(pool.map(read, files))
    digest = xxhash.xxh3_64()
    for path, size, one in zip(files, sizes, checksums, strict=True):
        digest.update(f"{path.relative_to(folder)}\0{size}\0{one}\0".encode())
    return f"{counted(len(files), 'file')}, {sum(sizes):,} bytes, xxh3 {digest.hexdigest()}"
