"""Read text and JSON from files of any size, a row at a time, in memory for one row; an error names file and line."""

import bz2
import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from unsloth_ddp.utils.errors import UserError, one_line
from unsloth_ddp.utils.files.json import DECODER

# Bytes or characters of a row. Without a limit, a file without line ends (a disk image named .jsonl) or a quotation
# mark that is never closed would be read into memory as one row.
LONGEST_ROW = 1 << 27
CHUNK = 1 << 20
# A number that ends closer to the end of what was read may go on after it.
MARGIN = 8
LFS_POINTER = b"version https://git-lfs"
# The first bytes of files that are often named as text by mistake.
MAGIC = {
    b"PK\x03\x04": ("a zip archive or an Excel file", "unpack it, or save the table as CSV"),
    b"PAR1": ("Parquet", "name it .parquet"),
    b"ARROW1\0\0": ("Arrow", "write it as Parquet"),
}


def _open_zstd(file: BinaryIO) -> BinaryIO:
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


# The first bytes of compressed files, and what opens them.
COMPRESSED: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open, b"\x28\xb5\x2f\xfd": _open_zstd,
}  # fmt: skip
SPACE = re.compile(r"[ \t\r\n]*")


@contextmanager
def uncompressed(path: Path) -> Iterator[BinaryIO]:
    """Open a file, and read what a compressed one holds.

    Raises:
        UserError: the compressed file is damaged.
    """
    with path.open("rb") as file:
        begin = file.peek(max(map(len, COMPRESSED)))
        opens = next((opens for magic, opens in COMPRESSED.items() if begin.startswith(magic)), None)
        if opens is None:
            yield file
            return
        try:
            with opens(file) as inside:
                yield inside
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno:
                raise
            raise UserError(f"{path} is damaged: {one_line(error, 200).rstrip('.')}; compress it again.") from None


def text_pieces(path: Path, limit: int) -> Iterator[tuple[int, str]]:
    """Yield the number of each line of a UTF-8 file and its text, without a byte order mark; long lines in parts.

    Args:
        limit: bytes of a part.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with uncompressed(path) as file:
        _refuse_other_content(path, file.peek(max(map(len, MAGIC))))  # type: ignore[attr-defined]
        number, bytes_before = 1, 0
        while True:
            part = file.readline(limit)
            undecoded = len(decoder.getstate()[0])
            try:
                text = decoder.decode(part, final=not part)
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path}:{number} is not UTF-8 text ({error.reason} at byte "
                    f"{bytes_before - undecoded + error.start + 1} of "
                    "the line); save the file as UTF-8."
                ) from None
            if text:
                yield number, text
            if not part:
                return
            ends = part.endswith(b"\n")
            number, bytes_before = number + ends, 0 if ends else bytes_before + len(part)


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file with their line ends; refuse lines over LONGEST_ROW bytes."""
    unended = ""
    for number, text in text_pieces(path, LONGEST_ROW):
        if unended:
            raise UserError(
                f"{path}:{number} is longer than {LONGEST_ROW:,} bytes, which is not a row of text; put each row on a "
                "line."
            )
        if text.endswith("\n"):
            yield text
        else:
            unended = text
    if unended:
        yield unended


def _refuse_other_content(path: Path, begin: bytes) -> None:
    for magic, (kind, fix) in MAGIC.items():
        if begin.startswith(magic):
            raise UserError(f"{path} is {kind}, not text, despite its name; {fix}.")


class _Window:
    """The part of a file that is being parsed, from `position` on; what is before it is dropped when more is read.

    `line` is that of `position`; `cut` is the number of characters of the first line that were dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pieces = text_pieces(path, CHUNK)
        self.text, self.position, self.line, self.cut, self.ended = "", 0, 1, 0, False

    def grow(self) -> None:
        """Read about as much as is left, so that parsing it again and again costs little."""
        last = self.text.rfind("\n", 0, self.position)
        self.cut = self.position - last - 1 + (self.cut if last < 0 else 0)
        parts, size = [self.text[self.position :]], 0
        self.position, enough = 0, max(len(parts[0]), CHUNK)
        while size < enough and not self.ended:
            piece = next(self._pieces, None)
            self.ended = piece is None
            if piece is not None:
                parts.append(piece[1])
                size += len(piece[1])
        self.text = "".join(parts)

    def move(self, end: int) -> None:
        """Go on at `end`."""
        self.line += self.text.count("\n", self.position, end)
        self.position = end

    def skip_space(self) -> str:
        """Go on at the next character that is no white space and return it; "" at the end of the file."""
        while True:
            match = SPACE.match(self.text, self.position)
            self.move(match.end() if match else self.position)
            if self.position < len(self.text) or self.ended:
                return self.text[self.position : self.position + 1]
            self.grow()

    def take(self) -> tuple[str, Any]:
        """Parse the value that begins here and go on after it; return its location and the value."""
        location = f"{self.path}:{self.line}"
        while True:
            try:
                value, end = parse_json(self.text, location, self.position, self.cut, whole=False)
                if self.ended or end < len(self.text) - MARGIN:
                    break
            except UserError:
                if self.ended:
                    raise
            if len(self.text) - self.position > LONGEST_ROW:
                raise UserError(
                    f"{location} begins a row that is longer than {LONGEST_ROW:,} characters, or not JSON; fix or "
                    "remove it."
                )
            self.grow()
        self.move(end)
        return location, value


def json_list_items(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the location and value of each item of a file that holds one JSON list.

    Raises:
        UserError: it holds anything else.
    """
    window = _Window(path)
    begin = window.skip_space()
    if not begin:
        return
    if begin != "[":
        raise UserError(f"{path} is not a JSON list of rows; name it .jsonl if it has one object per line.")
    separator = "["
    while True:
        window.move(window.position + 1)
        if window.skip_space() == "]" and separator == "[":
            break
        location, value = window.take()
        yield location, value
        separator = window.skip_space()
        if separator == "]":
            break
        if separator != ",":
            raise UserError(f"{location} is not JSON (no , or ] follows the row that begins here); fix it.")
    window.move(window.position + 1)
    if window.skip_space():
        raise UserError(f"{path} has text after the end of its list of rows; fix it.")


def parse_json(text: str, location: str, start: int = 0, cut: int = 0, *, whole: bool = True) -> tuple[Any, int]:
    """Return the JSON value that begins at `start`, and its end.

    Args:
        cut: characters of the first line before `text`.
        whole: the value must reach to the end of `text`.

    Raises:
        UserError: it is not JSON.
    """
    try:
        value, end = DECODER.raw_decode(text, start)
        if whole and end != len(text):
            raise json.JSONDecodeError("Extra data", text, end)
        return value, end
    except json.JSONDecodeError as error:
        line = error.lineno - text.count("\n", 0, start)
        column = error.colno + (cut if error.lineno == 1 else 0)
        where = f"line {line} of the row, column {column}" if line > 1 else f"column {column}"
        # Some of json's messages end with "at" themselves.
        cause = f"{error.msg.removesuffix(' at')} at {where}"
    except RecursionError:
        cause = "nested too deeply"
    except ValueError as error:
        cause = str(error)
    raise UserError(f"{location} is not JSON ({cause}); fix or remove it.")
