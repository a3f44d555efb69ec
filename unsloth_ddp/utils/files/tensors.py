"""Write safetensors files tensor by tensor, so that no process holds more than one tensor of a model.

`safetensors.torch.save_file` wants all tensors of a file at once.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import torch

# The names of the types in safetensors' header.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
LENGTH_BYTES = 8
# Header bytes of one tensor beside its name: type, shape, offsets.
ENTRY_BYTES = 160
# Transformers wrote files of up to 5 GB for years; tools and file systems are used to them.
FILE_BYTES = 5 * 10**9


def header_room(names: list[str]) -> int:
    """Return header bytes that are enough for tensors of these names and an offset in the metadata of each."""
    return 4096 + sum(3 * len(name) + 2 * ENTRY_BYTES for name in names)


class TensorFile:
    """One safetensors file, written tensor by tensor; the header is filled in when it is closed.

    The format wants the header first, and lets it be padded with spaces, so room is left for it.
    """

    def __init__(self, path: Path, room: int) -> None:
        self.path = path
        self.room = -(-room // 8) * 8
        self.bytes = 0
        self._entries: dict[str, object] = {}
        self._used = 0
        self._file = path.open("wb")
        self._file.seek(LENGTH_BYTES + self.room)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def has_room(self, name: str) -> bool:
        """Return whether the header has room for one more tensor of that name."""
        return self._used + len(name) + ENTRY_BYTES <= self.room

    def add(self, name: str, tensor: torch.Tensor) -> None:
        values = tensor.detach().to("cpu").contiguous()
        size = values.numel() * values.element_size()
        if size:
            self._file.write(values.reshape(-1).view(torch.uint8).numpy().data)
        self._entries[name] = {
            "dtype": DTYPES[values.dtype],
            "shape": list(values.shape),
            "data_offsets": [self.bytes, self.bytes + size],
        }
        self._used += len(name) + ENTRY_BYTES
        self.bytes += size

    def close(self, metadata: Mapping[str, str]) -> None:
        """Write the header and close the file.

        Raises:
            ValueError: the header needs more room than it was given.
        """
        header = json.dumps({"__metadata__": dict(metadata), **self._entries}, separators=(",", ":")).encode()
        if len(header) > self.room:
            raise ValueError(f"the header of {self.path.name} needs {len(header)} bytes and has room for {self.room}")
        self._file.seek(0)
        self._file.write(self.room.to_bytes(LENGTH_BYTES, "little") + header.ljust(self.room))
        self._file.close()


class ModelFiles:
    """Writes the weights of a model: one file, or several of up to `file_bytes` with an index, as save_pretrained does.

    As a context manager, it removes what was written unless it was closed.

    Args:
        folder: exists.
        names: of the tensors to come, as far as they are known; they decide how much room a header has.
        stem: file name without its ending.
        file_bytes: the largest size of a file with several tensors; None writes one file.
    """

    def __init__(
        self, folder: Path, names: list[str], stem: str = "model", file_bytes: int | None = FILE_BYTES
    ) -> None:
        self.folder = folder
        self.stem = stem
        self.file_bytes = file_bytes
        self._room = header_room(names)
        self._open: TensorFile | None = None
        self._written: list[tuple[Path, list[str]]] = []
        self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        current = self._open
        if current is not None and self.file_bytes is not None:
            full = bool(current.bytes) and current.bytes + size > self.file_bytes
            if full or not current.has_room(name):
                self._close_file()
        if self._open is None:
            self._open = TensorFile(self.folder / f"{self.stem}.part-{len(self._written) + 1}", self._room)
        self._open.add(name, tensor)
        self._total += size

    def close(self) -> None:
        """Name the files by their number, and write the index of several."""
        self._close_file()
        count = len(self._written)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._written, start=1):
            suffix = "" if count == 1 else f"-{number:05d}-of-{count:05d}"
            final = self.folder / f"{self.stem}{suffix}.safetensors"
            path.rename(final)
            weight_map |= dict.fromkeys(names, final.name)
        if count > 1:
            index: dict[str, object] = {
                "metadata": {"total_size": self._total},
                "weight_map": dict(sorted(weight_map.items())),
            }
            text = json.dumps(index, indent=2) + "\n"
            (self.folder / f"{self.stem}.safetensors.index.json").write_text(text, encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._open is not None:
            self._open.__exit__(*raised)
            self._open.path.unlink(missing_ok=True)
        for path, _ in self._written:
            path.unlink(missing_ok=True)

    def _close_file(self) -> None:
        if self._open is not None:
            self._open.close({"format": "pt"})
            self._written.append((self._open.path, self._open.names))
            self._open = None
