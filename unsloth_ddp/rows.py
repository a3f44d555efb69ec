"""Rows of files and Hub datasets, each with the place it came from, so that a bad one can be named."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from unsloth_ddp.errors import UserError

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")


class Row(NamedTuple):
    """A row's columns and where it stands: file:line, or source row number."""

    place: str
    columns: Any


def is_file(source: str) -> bool:
    """Whether `source` means a local path rather than a dataset on the Hub ("name" or "owner/name")."""
    path = Path(source)
    return path.exists() or path.suffix in SUFFIXES or source.startswith((".", "/", "~")) or source.count("/") > 1


def check_source(source: str) -> None:
    """Refuse a local path that cannot be read as rows, before anything is loaded.

    Raises:
        UserError: there is no such file, or its suffix is not one of SUFFIXES.
    """
    if not is_file(source):
        return
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(f"dataset {source}: there is no such file.")
    if not path.is_file() or path.suffix not in SUFFIXES:
        raise UserError(f"dataset {source} is not a {', '.join(SUFFIXES)} file; name the files themselves.")


def read_rows(source: str, split: str, config: str | None = None) -> Iterator[Row]:
    """The rows of one file, or of one split of a Hub dataset.

    Raises:
        UserError: the source cannot be read, or a row is broken; the message names file and line.
    """
    if not is_file(source):
        yield from _hub_rows(source, split, config)
        return
    path = Path(source).expanduser()
    reader = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows, ".csv": _csv_rows}[path.suffix]
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); save it as UTF-8.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield Row(f"{path}:{number}", _parsed(line, f"{path}:{number}"))


def _json_rows(path: Path) -> Iterator[Row]:
    content = _parsed(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(content, list):
        raise UserError(f"{path} is not a JSON list of rows; for one object a line, name it .jsonl.")
    for number, columns in enumerate(content, 1):
        yield Row(f"{path} row {number}", columns)


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise UserError(
            f"{place} is not JSON ({error.msg} at {line}column {error.colno}); mend or remove it."
        ) from None
    except RecursionError:
        raise UserError(f"{place} is nested too deeply to read; mend or remove it.") from None


def _csv_rows(path: Path) -> Iterator[Row]:
    # A chat in one cell is longer than csv's default of 128 KiB.
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, strict=True)
        try:
            for columns in reader:
                place = f"{path}:{reader.line_num}"
                if None in columns or None in columns.values():
                    raise UserError(
                        f"{place} does not have the {len(reader.fieldnames or [])} cells of the header line."
                    )
                yield Row(place, columns)
        except csv.Error as error:
            raise UserError(f"{path}:{reader.line_num} is not CSV ({error}); mend or remove it.") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        with pyarrow.parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=1024):
                for columns in batch.to_pylist():
                    number += 1
                    yield Row(f"{path} row {number}", columns)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a readable Parquet file ({str(error).splitlines()[0]}).") from None


def _hub_rows(source: str, split: str, config: str | None) -> Iterator[Row]:
    import datasets

    try:
        table = datasets.load_dataset(source, config, split=split)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"dataset {source} is no local file and cannot be loaded from the Hub, split {split}: {reason}"
        ) from None
    for number, columns in enumerate(table, 1):
        yield Row(f"{source} {split} row {number}", columns)
