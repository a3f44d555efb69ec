"""Read rows from files and Hub datasets, each with its location, so that an error can name the row."""

import csv
import functools
import mimetypes
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.selection import mixed, read_slice, sliced
from unsloth_ddp.data.sources import json_text
from unsloth_ddp.data.sources.json_text import LFS_POINTER, json_list_items, parse_json, text_lines
from unsloth_ddp.data.sources.table_nulls import is_of_table, without_filled_nulls
from unsloth_ddp.utils.errors import UserError, one_line, os_reason
from unsloth_ddp.utils.files.json import DECODER
from unsloth_ddp.utils.files.missing import looked_in, similar_file
from unsloth_ddp.utils.files.sources import HUB_ID, Source, read_source
from unsloth_ddp.utils.known_errors import find_known_error

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
STREAMED_SUFFIXES = (".jsonl", ".parquet", ".csv")
# Suffixes of compressed files, which text is read from; an archive may hold several.
COMPRESSED_SUFFIXES, ARCHIVES = (".gz", ".zst", ".bz2", ".xz"), (".zip", ".tar", ".tgz")
# The stem of the file whose rows name the images of a folder (Datasets' ImageFolder).
IMAGE_FOLDER = "metadata"
# Matches files of other splits as Hub datasets name them: test-00000-of-00001.parquet, validation/0.jsonl.
OTHER_SPLIT = re.compile(r"(?<![a-z])(?:test|testing|valid|validation|val|dev|eval|evaluation|held_?out)(?![a-z])")
# What Python, pandas and databases write into a CSV cell for a missing value.
NULL_CELLS = {"nan", "NaN", "null", "NULL", "None", "<NA>"}
HUB_ADDRESS = re.compile(r"https?://huggingface\.co/datasets/([^/]+(?:/[^/]+)?)")


class SourceRow(NamedTuple):
    """The columns of a row, and its location for messages: "file:line", or "source row number"."""

    location: str
    columns: Any


def is_file(source: str) -> bool:
    """Return whether `source` is a local path rather than a dataset on the Hub ("name" or "owner/name")."""
    path = Path(source)
    looks_local = not HUB_ID.fullmatch(source)
    packed = path.suffix.lower() in ARCHIVES and row_suffix(path.with_suffix("")) in SUFFIXES
    return looks_local or packed or row_suffix(path) in SUFFIXES or path.exists()


def row_suffix(path: Path) -> str:
    """Return the suffix that says how a file of rows is read: .jsonl for a.ndjson.gz; one of SUFFIXES, or another."""
    *_, inner, outer = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    # Parquet is compressed inside.
    suffix = inner if outer in COMPRESSED_SUFFIXES and inner in (".jsonl", ".ndjson", ".json", ".csv") else outer
    return ".jsonl" if suffix == ".ndjson" else suffix


def check_source(source: str) -> None:
    """Refuse a local path that cannot be read as rows, before anything is loaded.

    Raises:
        UserError: there is no such file, or its suffix is not one of SUFFIXES.
    """
    try:
        if not is_file(source):
            return
        if match := HUB_ADDRESS.match(source):
            raise UserError(f"dataset {source} is a URL; give the dataset's id on the Hub: {match[1]}.")
        path = Path(source).expanduser()
        if not path.exists():
            if "," in source:
                raise UserError(
                    f"dataset {source}: there is no such file; separate datasets by spaces: --dataset "
                    f"{' '.join(source.split(','))}."
                )
            near = similar_file(path, SUFFIXES)
            fix = f"did you mean {near}?" if near else "check the path, or give the id of a dataset on the Hub."
            raise UserError(f"dataset {source}: there is no such file{'' if near else looked_in(path)}; {fix}")
        if path.is_dir() and source:
            raise UserError(
                f"dataset {source} is a folder; name the files in it ({', '.join(SUFFIXES)}), or give --streaming, "
                "which takes folders."
            )
        if path.suffix.lower() in (*COMPRESSED_SUFFIXES, *ARCHIVES) and row_suffix(path) not in SUFFIXES:
            raise UserError(
                f"dataset {source} is compressed, and its name does not say that it is one text file; unpack it and "
                f"give the {', '.join(SUFFIXES)} file in it, or name it .jsonl.gz (.csv.zst, ...) if it is one."
            )
        if not path.is_file() or row_suffix(path) not in SUFFIXES:
            raise UserError(f"dataset {source} is not a {', '.join(SUFFIXES)} file; convert it to one of these.")
    except (OSError, RuntimeError) as error:
        # The name may be too long for the file system, or contain ~ with an unknown user.
        cause = str(getattr(error, "strerror", error)).rstrip(".")
        raise UserError(f"dataset {source[:200]} cannot be looked up: {cause}.") from None


def checked_files(texts: list[str], *, streaming: bool = False) -> list[tuple[Source, list[str]]]:
    """Return each dataset that `texts` name, with its files or its Hub id, which are checked by `check_source`.

    Raises:
        UserError: see streamed_sources, check_source and read_slice.
    """
    checked = []
    for source in map(read_source, texts):
        files = streamed_sources([source.name]) if streaming else [source.name]
        for file in files:
            check_source(file)
        if files != [source.name] and source.split:
            raise UserError(f"dataset {source}: a folder has no slices; name one of its files, or leave [...] out.")
        if is_file(source.name) and source.subset:
            raise UserError(f"dataset {source}: a file has no subset; leave @{source.subset} out.")
        if is_file(source.name) or streaming:
            read_slice(source.name, source.split_of("train"), of_file=is_file(source.name), streaming=streaming)
        checked.append((source, files))
    return checked


def streamed_sources(sources: list[str]) -> list[str]:
    """Replace every folder in `sources` by the row files in it and in its subfolders, sorted by name.

    The .json files of a folder do not count as row files (see left_out).

    Raises:
        UserError: a folder holds no row file.
    """
    files_of_sources: list[str] = []
    for source in sources:
        files = _files_in(Path(source).expanduser(), STREAMED_SUFFIXES) if is_file(source) else None
        if files == []:
            raise UserError(
                f"dataset {source} is a folder without a {', '.join(STREAMED_SUFFIXES)} file; name another."
            )
        files_of_sources += [source] if files is None else files
    return files_of_sources


def left_out(sources: list[str]) -> list[str]:
    """Return the files in the folders among `sources` that may hold rows but are not read.

    These are .json files (mostly metadata), archives and Arrow files.
    """
    folders = [Path(source).expanduser() for source in sources if is_file(source)]
    others = (".json", ".arrow", *COMPRESSED_SUFFIXES, *ARCHIVES)
    return [path for folder in folders for path in _files_in(folder, others) or []]


def of_other_splits(sources: list[str]) -> list[str]:
    """Return the row files in the folders among `sources` whose path names a split that is not for training."""
    folders = [Path(source).expanduser() for source in sources if is_file(source)]
    files = [(folder, path) for folder in folders for path in _files_in(folder, STREAMED_SUFFIXES) or []]
    return [path for folder, path in files if OTHER_SPLIT.search(str(Path(path).relative_to(folder)).lower())]


def _files_in(folder: Path, suffixes: tuple[str, ...]) -> list[str] | None:
    """Return the files in a folder that have one of the suffixes, without hidden ones; None if it is not a folder.

    Links to folders are followed, to each folder once.
    """
    inside: list[Path] = []
    visited: set[str] = set()
    try:
        if not folder.is_dir():
            return None
        for path, folders, names in os.walk(folder, followlinks=True, onerror=_raise):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            if (real := os.path.realpath(path)) in visited:
                folders.clear()
            else:
                visited.add(real)
                inside += [Path(path, name).relative_to(folder) for name in names if not name.startswith(".")]
    except OSError as error:
        raise UserError(f"dataset {folder} cannot be listed: {os_reason(error)}.") from None
    return [str(folder / path) for path in sorted(inside) if row_suffix(path) in suffixes]


def _raise(error: OSError) -> None:
    raise error


def read_rows(
    source: str, split: str, config: str | None = None, revision: str | None = None, *, streaming: bool = False
) -> Iterator[SourceRow]:
    """Yield the rows of one file that `check_source` accepted, or of one split of a Hub dataset, or of a slice of them.

    With `streaming`, nothing of a Hub dataset is kept on disk; files are always read row by row.

    Raises:
        UserError: the source cannot be read, or a row is broken; the message names file and line.
    """
    if not is_file(source):
        if streaming:
            # Datasets slices no streams.
            name = read_slice(source, split, of_file=False, streaming=True)[0]
            hub_rows = functools.partial(_hub_rows, source, name, config, revision, streaming)
            yield from sliced(source, split, hub_rows, of_file=False, streaming=True)
        else:
            yield from _hub_rows(source, split, config, revision, streaming)
        return
    path = Path(source).expanduser()
    try:
        with path.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise UserError(f"{path} is a Git LFS pointer, not the file itself; run git lfs pull in its folder.")
        yield from sliced(source, split, functools.partial(_file_rows, path), of_file=True, streaming=streaming)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {os_reason(error)}.") from None


def training_rows(settings: Settings, revisions: Mapping[str, str], *, streaming: bool) -> Iterator[SourceRow]:
    """Yield the training rows of a run in the order of its datasets, mixed where these have weights.

    Raises:
        UserError: see checked_files and read_rows.
    """

    def rows(source: Source, files: list[str]) -> Iterator[SourceRow]:
        for file in files:
            split = source.split_of("train" if is_file(file) else settings.dataset_split)
            config = source.subset or settings.dataset_config
            yield from read_rows(file, split, config, revisions.get(file), streaming=streaming)

    checked = checked_files(settings.dataset, streaming=settings.streaming)
    yield from mixed([rows(*dataset) for dataset in checked], [source.weight for source, _ in checked])


def _file_rows(path: Path) -> Iterator[SourceRow]:
    readers = {".jsonl": _jsonl_rows, ".json": json_list_items, ".parquet": _parquet_rows, ".csv": _csv_rows}
    for location, columns in readers[row_suffix(path)](path):
        columns = without_filled_nulls(columns) if is_of_table(columns) else columns
        yield SourceRow(location, _with_image(columns) if path.stem == IMAGE_FOLDER else columns)


def _with_image(columns: Any) -> Any:
    """Return a row of an image folder with its image, as Datasets reads it; other files, such as sounds, stay."""
    named = columns.get("file_name") if isinstance(columns, dict) and not {"image", "images"} & columns.keys() else None
    if not str(mimetypes.guess_type(str(named))[0]).startswith("image/"):
        return columns
    return {"image" if name == "file_name" else name: value for name, value in columns.items()}


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(text_lines(path), 1):
        if number == 1 and line.strip() in ("[", "[{", "{"):
            raise UserError(
                f"{path} is JSON over several lines; write one object per line, or name it .json if it is one list."
            )
        if line.strip():
            yield f"{path}:{number}", parse_json(line.strip(), f"{path}:{number}")[0]


def _csv_rows(path: Path) -> Iterator[tuple[str, Any]]:
    # A chat in one cell may be longer than csv's default limit of 128 KiB.
    csv.field_size_limit(json_text.LONGEST_ROW)
    first, size = 1, 0

    def lines() -> Iterator[str]:
        nonlocal size
        for line in text_lines(path):
            size += len(line)
            if size > json_text.LONGEST_ROW:
                raise UserError(
                    f"{path}:{first} begins a row of over {json_text.LONGEST_ROW:,} characters; close the quotation "
                    "mark that makes the lines after it a part of one cell."
                )
            yield line

    reader = csv.reader(lines(), strict=True)
    header: list[str] = []
    try:
        for cells in reader:
            location, first, size = f"{path}:{first}", reader.line_num + 1, 0
            if not cells:
                continue
            if not header:
                header = cells
                if len(header) == 1 and (mark := next((mark for mark in ";\t|" if mark in header[0]), "")):
                    raise UserError(f"{location} separates its columns by {mark!r}; write the file with commas.")
                if len(set(header)) != len(header):
                    raise UserError(f"{location} names a column twice ({', '.join(header)[:200]}); rename one.")
                continue
            if cells == header:
                raise UserError(f"{location} is the header again, as in files that were joined; remove it.")
            if len(cells) != len(header):
                raise UserError(
                    f"{location} has {len(cells)} cells where the header has {len(header)}; fix or remove it."
                )
            yield location, _without_nulls(dict(zip(header, cells, strict=True)), location)
    except csv.Error as error:
        raise UserError(f"{path}:{first} is not CSV ({error}); fix or remove it.") from None


def _without_nulls(columns: dict[str, str], location: str) -> dict[str, str | None]:
    """Return the cells of a row with null where a library wrote a missing value as text.

    Raises:
        UserError: such a cell stands where an answer belongs, which may be meant as text.
    """
    for name in ("output", "completion", "text"):
        if columns.get(name) in NULL_CELLS:
            raise UserError(
                f"{location}: {name} is {columns[name]}, which in a CSV file may be a missing value or text; remove "
                "the row, or write the table as JSONL if it is text."
            )
    return {name: None if cell in NULL_CELLS else cell for name, cell in columns.items()}


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if len(set(names)) != len(names):
                raise UserError(f"{path} names a column twice ({', '.join(names)[:200]}); rename one.")
            in_json = {field.name: field.type for field in table.schema_arrow if _holds_json(field.type)}
            for batch in table.iter_batches(batch_size=1024):
                for columns in batch.to_pylist(maps_as_pydicts="strict"):
                    number += 1
                    columns |= {name: _without_json(columns[name], kind) for name, kind in in_json.items()}
                    yield f"{path} row {number}", without_filled_nulls(columns)
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, KeyError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # pyarrow raises the same class, without a number, for bytes that it cannot decode
        cause = one_line(error, 200).rstrip(".") or type(error).__name__
        raise UserError(f"{path} is not readable Parquet after row {number} ({cause}); write it again.") from None


def _holds_json(kind: Any) -> bool:
    """Return whether an Arrow type is JSON text or contains it."""
    import pyarrow

    return isinstance(kind, pyarrow.JsonType) or any(_holds_json(kind.field(i).type) for i in range(kind.num_fields))


def _without_json(value: Any, kind: Any) -> Any:
    """Parse the JSON text in a value of a Parquet column.

    Datasets writes objects whose fields differ in type as JSON text, even whole messages. Without parsing, content
    would be trained with quotation marks around it.

    Raises:
        ValueError, RecursionError: the text is not JSON.
    """
    import pyarrow

    if value is None or not _holds_json(kind):
        return value
    if isinstance(kind, pyarrow.JsonType):
        return DECODER.decode(value)
    if pyarrow.types.is_struct(kind):
        return {field.name: _without_json(value[field.name], field.type) for field in kind}
    if pyarrow.types.is_map(kind):
        return {name: _without_json(item, kind.item_type) for name, item in value.items()}
    return [_without_json(item, kind.value_type) for item in value]


def _undecoded(kind: Any) -> Any:
    """Return a feature of Datasets whose images stay bytes or paths."""
    import datasets

    if isinstance(kind, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(kind, dict):
        return {name: _undecoded(item) for name, item in kind.items()}
    if isinstance(kind, list):
        return [_undecoded(item) for item in kind]
    if isinstance(kind, (datasets.List, datasets.LargeList)):
        return type(kind)(_undecoded(kind.feature))
    return kind


def _hub_rows(
    source: str, split: str, config: str | None, revision: str | None, streaming: bool
) -> Iterator[SourceRow]:
    import datasets

    try:
        table = datasets.load_dataset(source, config, split=split, revision=revision, streaming=streaming)
        table_features = getattr(table, "features", None) or {}
        features = datasets.Features({name: _undecoded(kind) for name, kind in table_features.items()})
        if features != table_features:
            # Images are checked before they are decoded.
            table = table.cast(features)
    except Exception as error:
        cause = one_line(error, 1000)
        row = find_known_error(f"{type(error).__name__}: {cause}")
        advice = (
            f"; download it where there is a network (uv run hf download {source} --repo-type dataset --local-dir "
            "FOLDER) and give the files as --dataset; HF_HUB_OFFLINE=0 tries the network again."
        )
        raise UserError(
            f"dataset {source} is not a local file and cannot be loaded from the Hub, split {split}: {cause}"
            f"{advice if row and row.name == 'no network' else ''}"
        ) from None
    number = 0
    try:
        for number, columns in enumerate(table, 1):
            yield SourceRow(f"{source} {split} row {number}", without_filled_nulls(columns))
    except Exception as error:
        cause = one_line(error, 200).rstrip(".")
        network = "if the network failed, the same command resumes from the newest checkpoint; " if streaming else ""
        raise UserError(
            f"dataset {source}, split {split}, cannot be read after row {number} ({cause}); {network}an audio or "
            "video column needs its own decoder, and this kit trains on text and images only."
        ) from None
