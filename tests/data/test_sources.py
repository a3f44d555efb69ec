"""Rows of files, however they were written, and bad ones named by file and line."""

from __future__ import annotations

import bz2
import csv
import errno
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources.json_text import LFS_POINTER
from unsloth_ddp.data.sources.rows import check_source, is_file, left_out, read_rows, streamed_sources
from unsloth_ddp.utils.errors import UserError

BOM = b"\xef\xbb\xbf"


def rows(path: Path) -> list[tuple[str, Any]]:
    """What stands behind the path in each place, and the columns."""
    return [(place.removeprefix(str(path)), columns) for place, columns in read_rows(str(path), "train")]


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as refused:
        rows(path)
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def zstd(content: bytes) -> bytes:
    return bytes(pyarrow.Codec("zstd").compress(content, asbytes=True))


def write(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "places"),
    [
        ("a.jsonl", b'{"text": "a"}\n\n  \n{"text": "b"}', [":1", ":4"]),
        ("a.jsonl", BOM + b'{"text": "a"}\r\n{"text": "b"}\r\n', [":1", ":2"]),
        ("A.JSONL", b'{"text": "a"}\n{"text": "b"}\n', [":1", ":2"]),
        ("a.json", b'[{"text": "a"},{"text": "b"}]', [":1", ":1"]),
        ("a.json", BOM + b'\r\n [\r\n {"text":\r\n "a"},\r\n\r\n {"text": "b"}\r\n]\r\n', [":3", ":6"]),
        ("a.csv", b"text\na\nb\n", [":2", ":3"]),
        ("a.csv", BOM + b'text\r\n"a"\r\n\r\nb', [":2", ":4"]),
    ],
)
def test_rows_and_their_places(tmp_path: Path, name: str, content: bytes, places: list[str]) -> None:
    expected = [(places[0], {"text": "a"}), (places[1], {"text": "b"})]
    path = write(tmp_path, name, content)
    check_source(str(path))
    assert rows(path) == expected


def test_a_csv_cell_may_hold_lines_commas_quotes_and_long_json(tmp_path: Path) -> None:
    csv.field_size_limit(131_072)
    cells = ['say "hi",\r\nthen', json.dumps([{"role": "user", "content": "x" * 200_000}])]
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text", "messages"], cells, ["plain", ""]])
    first, second = rows(tmp_path / "a.csv")
    assert first == (":2", {"text": cells[0], "messages": cells[1]})
    assert second == (":4", {"text": "plain", "messages": ""})


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress, zstd, bytes])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", b'{"n": "1"}\n{"n": "2"}\n'), ("a.ndjson.zst", b'{"n": "1"}\n{"n": "2"}\n'),
            ("a.CSV.bz2", b"n\n1\n2\n"),
        ("a.json.xz", b'[{"n": "1"}, {"n": "2"}]'), ("a.jsonl", b'{"n": "1"}\n{"n": "2"}'),
            ("a.ndjson", b'{"n": "1"}\n{"n": "2"}'),
    ],
)  # fmt: skip
def test_compressed_text_is_read_by_its_content(
    tmp_path: Path, name: str, content: bytes, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / name
    path.write_bytes(compress(content))
    check_source(str(path))
    assert [row.columns for row in read_rows(str(path), "train")] == [{"n": "1"}, {"n": "2"}]


def test_a_folder_is_read_with_compressed_files_and_linked_folders(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "rows", tmp_path / "elsewhere"
    (folder / "real").mkdir(parents=True)
    elsewhere.mkdir()
    for path in (folder / "real" / "a.jsonl", folder / "b.ndjson.gz", elsewhere / "c.jsonl", folder / "d.zip"):
        path.write_text("")
    (folder / "linked").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(folder)
    assert streamed_sources([str(folder)]) == [
        str(folder / name) for name in ("b.ndjson.gz", "linked/c.jsonl", "real/a.jsonl")
    ]
    assert left_out([str(folder)]) == [str(folder / "d.zip")]


def test_parquet_rows_keep_lists_objects_and_nulls(tmp_path: Path) -> None:
    table = [{"messages": [{"role": "user", "content": "Hi"}], "n": None}, {"messages": None, "n": 5}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet") == [(" row 1", table[0]), (" row 2", table[1])]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
@pytest.mark.parametrize("content", [b"", BOM, b"\n", b" \r\n\r\n"])
def test_an_empty_file_has_no_rows(tmp_path: Path, name: str, content: bytes) -> None:
    if name == "a.csv" and content.startswith(b" "):
        content = b"text\r\n"
    assert rows(write(tmp_path, name, content)) == []


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": \n', ":2 is not JSON (Expecting value at column 9); fix or remove it."),
        ("a.jsonl", '{"a": "\0"}', ":1 is not JSON (Invalid control character at column 8); fix or remove it."),
        ("a.jsonl", '{"a": 1} {"b": 2}', ":1 is not JSON (Extra data at column 9); fix or remove it."),
        ("a.jsonl", "[" * 100_000, ":1 is not JSON (nested too deeply); fix or remove it."),
        ("a.jsonl", '{"a": ' + "1" * 5000 + "}", ":1 is not JSON (Exceeds the limit"),
        ("a.jsonl", '{"a": 1, "a": 2}', ":1 is not JSON ('a' is given twice); fix or remove it."),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', ":2 is not UTF-8 text (invalid start byte at byte 8 of the line); "),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), ":1 is not UTF-8 text (invalid start byte at byte 1 of the line"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 99, mtime=0)[:-9],
            " is damaged: Compressed file ended before the"),
        ("a.csv.xz", lzma.compress(b"a\n1")[:-9], " is damaged: Compressed file ended before the end-of-stream marker"),
        ("a.jsonl.zst", zstd(b'{"a": 1}\n' * 99)[:-9], " is damaged: "),
        ("a.jsonl.bz2", bz2.compress(b'{"a": 1}\n{"a":'), ":2 is not JSON (Expecting value at column 6)"),
        ("a.csv", b"PK\x03\x04rest", " is a zip archive or an Excel file, not text, despite its name; unpack it, or"),
        ("a.jsonl", b"ARROW1\0\0", " is Arrow, not text, despite its name; write it as Parquet."),
        ("a.jsonl", b"PAR1\x15\x04\n\xff", " is Parquet, not text, despite its name; name it .parquet."),
        ("a.jsonl", '[\n  {"a": 1}\n]', " is JSON over several lines; write one object per line, or name it .json if "
            "it is"),
        ("a.jsonl", '[{\n  "a": 1\n}]', " is JSON over several lines; write one object per line, or name it .json if "
            "it is"),
        ("a.jsonl", '{\n  "a": 1\n}', " is JSON over several lines; write one object per line, or name it .json if it "
            "is"),
        ("a.json", '[{"a": 1},\n {"a": }]', ":2 is not JSON (Expecting value at column 8); fix or remove it."),
        ("a.json", '[{"a": 1},\n {"a":\n }]', ":2 is not JSON (Expecting value at line 2 of the row, column 2); "),
        ("a.json", '[\n{"a": 1}\n{"a": 2}]', ":2 is not JSON (no , or ] follows the row that begins here); fix it."),
        ("a.json", '[{"a": 1}', ":1 is not JSON (no , or ] follows the row that begins here); fix it."),
        ("a.json", '[{"a": 1},]', ":1 is not JSON (Expecting value at column 11); fix or remove it."),
        ("a.json", "[", ":1 is not JSON (Expecting value at column 2); fix or remove it."),
        ("a.json", '[{"a": 1}] x', " has text after the end of its list of rows; fix it."),
        ("a.json", '{"a": 1}\n{"a": 2}', " is not a JSON list of rows; name it .jsonl if it has one object per line."),
        ("a.json", b'[\n"\xff"]', ":2 is not UTF-8 text"),
        ("a.csv", "a,b\n1,2\n3\n", ":3 has 1 cells where the header has 2; fix or remove it."),
        ("a.csv", "a,b\n1,2,3\n", ":2 has 3 cells where the header has 2; fix or remove it."),
        ("a.csv", "instruction;output\na;b\n", ":1 separates its columns by ';'; write the file with commas."),
        ("a.csv", "a,a\n1,2\n", ":1 names a column twice (a, a); rename one."),
        ("a.csv", 'a\n"b\nc\n', ":2 is not CSV (unexpected end of data); fix or remove it."),
        ("a.csv", b"a\nb\n\xe9\n", ":3 is not UTF-8 text"),
        ("a.jsonl", LFS_POINTER + b"/spec/v1\noid", " is a Git LFS pointer, not the file itself; run git lfs pull in "
            "its folder."),
        ("a.parquet", LFS_POINTER + b"/spec/v1\noid", " is a Git LFS pointer, not the file itself; "),
        ("a.parquet", "PAR1 no", " is not readable Parquet after row 0 ("),
        ("a.parquet", "", " is not readable Parquet after row 0 ("),
    ],
)  # fmt: skip
def test_a_broken_row_is_refused_by_file_and_line(
    tmp_path: Path, name: str, content: bytes | str, sentence: str
) -> None:
    assert refusal(write(tmp_path, name, content)).startswith(sentence)


def test_rows_before_a_broken_one_are_read(tmp_path: Path) -> None:
    reader = read_rows(str(write(tmp_path, "a.json", '[{"a": 1}, {"a": 2}, oops]')), "train")
    assert [next(reader).columns, next(reader).columns] == [{"a": 1}, {"a": 2}]
    with pytest.raises(UserError):
        next(reader)


@pytest.mark.parametrize(
    ("file", "row", "column"),
    [
        ("metadata.jsonl", {"file_name": "cats/1.PNG"}, "image"),
        ("metadata.csv", {"file_name": "1.jpeg"}, "image"),
        ("metadata.jsonl", {"file_name": "1.wav"}, "file_name"),
        ("metadata.jsonl", {"file_name": "1.png", "image": "2.png"}, "file_name"),
        ("rows.jsonl", {"file_name": "1.png"}, "file_name"),
    ],
)
def test_the_rows_of_an_image_folder_have_its_images(
    tmp_path: Path, file: str, row: dict[str, str], column: str
) -> None:
    text = json.dumps(row) if file.endswith(".jsonl") else "\n".join((",".join(row), ",".join(row.values())))
    found = next(iter(read_rows(str(write(tmp_path, file, text)), "train"))).columns
    assert found == {column if name == "file_name" else name: value for name, value in row.items()}


def test_parquet_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    broken = pyarrow.array([b"fine", b"\xff"], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    assert "is not readable Parquet after row 0" in refusal(tmp_path / "a.parquet")


def test_a_column_that_parquet_names_twice_is_refused(tmp_path: Path) -> None:
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    pyarrow.parquet.write_table(twice, tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet") == " names a column twice (text, text); rename one."


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    path = write(tmp_path, "a.jsonl", '{"text": "a"}')
    monkeypatch.setattr(Path, "open", refuse)
    assert refusal(path) == " cannot be read: Permission denied."


def test_a_cut_off_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [str(i) for i in range(5000)]}), path)
    path.write_bytes(path.read_bytes()[:-100])
    assert "is not readable Parquet" in refusal(path)


@pytest.mark.parametrize(
    ("source", "local"),
    [
        ("rows.jsonl", True), ("rows.CSV", True), ("./rows", True), ("~/rows", True), ("/rows", True),
        ("rows.jsonl.gz", True), ("rows.CSV.ZIP", True), ("owner/name.gz", False),
        ("a/b/c", True), ("my chats", True), ("owner/name:train", True), ("name", False), ("owner/name", False),
            ("owner/name-v1.5", False),
    ],
)  # fmt: skip
def test_paths_are_told_from_hub_ids(source: str, local: bool) -> None:
    assert is_file(source) is local


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{}/no.jsonl", "there is no such file; check the path, or give the id of a dataset on the Hub."),
        ("{}/dangling.jsonl", "there is no such file; check the path"),
        ("no.jsonl", "there is no such file in {cwd}; check the path"),
        ("{}/my_row.jsonl", "there is no such file; did you mean {}/my_rows.jsonl?"),
        (
            "https://huggingface.co/datasets/me/rows/tree/main",
            "is a URL; give the dataset's id on the Hub: me/rows.",
        ),
        ("{}/loop.jsonl", "there is no such file; check the path"),
        (
            "{}",
            "is a folder; name the files in it (.jsonl, .json, .parquet, .csv), or give --streaming, which takes "
            "folders.",
        ),
        ("{}/notes.txt", "is not a .jsonl, .json, .parquet, .csv file; convert it to one of these."),
        ("{}/a.gz", "is compressed, and its name does not say that it is one text file; unpack it"),
        ("{}/a.tar.gz", "is compressed, and its name does not say that it is one text file; unpack it"),
        ("{}/pipe.jsonl", "is not a .jsonl, .json, .parquet, .csv file; convert it to one of these."),
        ("{}/" + "x" * 300 + ".jsonl", "cannot be looked up: File name too long."),
        ("~nobody_here/rows.jsonl", "cannot be looked up: Could not determine home directory."),
        ("{}/a\0b.jsonl", "there is no such file; check the path"),
        ("", "is not a .jsonl, .json, .parquet, .csv file; convert it to one of these."),
    ],
)
def test_a_path_that_is_no_file_of_rows_is_refused(tmp_path: Path, source: str, sentence: str) -> None:
    write(tmp_path, "notes.txt", "hello")
    write(tmp_path, "my_rows.jsonl", "{}")
    for name in ("a.gz", "a.tar.gz"):
        write(tmp_path, name, "hello")
    (tmp_path / "dangling.jsonl").symlink_to(tmp_path / "gone.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError) as refused:
        check_source(source.format(tmp_path))
    assert sentence.format(tmp_path, cwd=Path.cwd()) in str(refused.value)


@pytest.mark.parametrize("option", ["dataset", "eval_dataset"])
def test_an_empty_file_among_others_is_refused_and_an_empty_shard_in_a_folder_is_not(
    tmp_path: Path, option: str
) -> None:
    from unsloth_ddp.data.sources.examples import read_examples

    runtime = cpu_runtime()
    (tmp_path / "shards").mkdir()
    good = str(write(tmp_path / "shards", "a.jsonl", '{"text": "a"}'))
    empty = str(write(tmp_path / "shards", "b.jsonl", ""))
    given = {"model": "m", "dataset": [good], option: [good, empty, good]}
    with pytest.raises(UserError, match=r"dataset .*b\.jsonl holds no rows; leave it out"):
        read_examples(Settings(**given), runtime, tmp_path)
    read_examples(Settings(model="m", dataset=[str(tmp_path / "shards")], streaming=True), runtime, tmp_path)


def test_empty_shards_of_a_folder_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from unsloth_ddp.data.sources.examples import read_examples

    for name, content in (("a", '{"text": "a"}\n'), ("b", ""), ("c", "\n")):
        write(tmp_path, f"{name}.jsonl", content)
    read_examples(Settings(model="m", dataset=[str(tmp_path)], streaming=True), cpu_runtime(), tmp_path)
    assert capsys.readouterr().out.startswith(f"{tmp_path}/b.jsonl and 1 more file hold no rows and add")


def test_a_hub_dataset_without_a_network_comes_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach 'my/rows' on the Hub (OfflineModeIsEnabled)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        UserError,
        match=r"Enabled\); download it where there is a network \(uv run hf download my/rows --repo-type dataset "
        r"--local-dir FOLDER\) and give the files",
    ):
        list(read_rows("my/rows", "train"))


@pytest.mark.parametrize("cell", ["nan", "NaN", "NULL", "null", "None", "<NA>"])
def test_cells_that_stand_for_a_missing_value_are_null(tmp_path: Path, cell: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"instruction,input,output\nHi,{cell},Hello.\n")
    (row,) = read_rows(str(path), "train")
    assert row.columns == {"instruction": "Hi", "input": None, "output": "Hello."}
    path.write_text(f"instruction,input,output\nHi,,{cell}\n")
    with pytest.raises(
        UserError, match=f"a.csv:2: output is {cell}, which in a CSV file may be a missing value or text"
    ):
        list(read_rows(str(path), "train"))
