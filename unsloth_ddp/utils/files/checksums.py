"""Compute checksums of files: of all bytes, or of evenly spread samples where files are large."""

import hashlib
from pathlib import Path

import xxhash

# Of a sampled file, the first MiB of every 10 MiB is read: a tenth, and a part of every tensor over 10 MiB.
SAMPLE, STRIDE = 1 << 20, 10 << 20


def checksum(path: Path) -> str:
    """Return the xxh3_128 of a file, which is read into one small buffer."""
    with path.open("rb", buffering=0) as file:
        return str(hashlib.file_digest(file, xxhash.xxh3_128).hexdigest())


def sampled_checksum(path: Path, sample: int = SAMPLE, stride: int = STRIDE) -> str:
    """Return the xxh3_128 of samples of a file: its start (the header of safetensors), and one every `stride` bytes."""
    digest = xxhash.xxh3_128()
    # The buffer of most file systems has a block, which has megabytes on some.
    with path.open("rb", buffering=4096) as file:
        for start in range(0, path.stat().st_size, stride):
            file.seek(start)
            digest.update(file.read(sample))
    return str(digest.hexdigest())
