"""Files of rubbish as rows: read, checked and stored as a run does, or refused by file and line."""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz import few, refusal, result_or_sentence
from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.sources import json_text
from unsloth_ddp.data.sources.examples import held_out_examples, read_examples
from unsloth_ddp.data.sources.formats import Example, to_example
from unsloth_ddp.data.sources.rows import read_rows

BOM = b"\xef\xbb\xbf"
ASK, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}
# One row of every accepted shape.
GOOD: list[dict[str, Any]] = [
    {"messages": [ASK, ANSWER]},
    {"messages": [ASK, ANSWER], "tools": [{"type": "function", "function": {"name": "add"}}]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
    {"instruction": "Hi", "input": "", "output": "Hello."},
    {"prompt": "Hi: ", "completion": "Hello."},
    {"prompt": [ASK], "completion": [ANSWER]},
    {"text": "Once upon"},
]


def read(path: Path) -> list[Example]:
    """The examples of a file, as a run reads them: through its Arrow file in a folder of the node."""
    folder = Path(tempfile.mkdtemp(dir=path.parent))
    read_examples(Settings(dataset=[str(path)], eval_dataset=[str(path)]), cpu_runtime(), folder)
    return held_out_examples(folder, 10**9)


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def lines(made: list[Any], end: bytes = b"\n") -> bytes:
    return b"".join(json.dumps(row).encode() + end for row in made)


TEXTS = st.text(max_size=20) | st.sampled_from(["", "\0", "a\nb", "\x1b[2J", "\u2028", "\ufeff", "\ud83d", "NaN"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
JSON = st.recursive(LEAVES, lambda i: st.lists(i, max_size=3) | st.dictionaries(TEXTS, i, max_size=3), max_leaves=5)
COLUMNS = st.sampled_from(sorted({name for row in GOOD for name in row} | {"system", "role"})) | TEXTS


@st.composite
def nearly_good(draw: st.DrawFn) -> Any:
    """A good row of some shape with one thing wrong, or not even that."""
    row = dict(draw(st.sampled_from(GOOD)))
    name = draw(st.sampled_from(sorted(row)) | COLUMNS)
    fault = draw(st.sampled_from(["none", "missing", "null", "other", "inner"]))
    if fault == "missing":
        row.pop(name, None)
    elif fault == "null":
        row[name] = None
    elif fault == "other":
        row[name] = draw(JSON)
    elif fault == "inner" and isinstance(row.get(name), list) and row[name]:
        turn = dict(row[name][-1])
        turn[draw(st.sampled_from([*turn, "tool_calls", "name"]))] = draw(JSON)
        row[name] = [*row[name][:-1], turn]
    return row


MADE = st.lists(nearly_good() | JSON, min_size=1, max_size=4)


@few
@given(MADE, st.sampled_from([b"\n", b"\r\n"]), st.booleans())
def test_rows_of_mixed_shapes_and_faults_are_examples_or_one_sentence(
    tmp_path: Path, made: list[Any], end: bytes, marked: bool
) -> None:
    path = write(tmp_path, "a.jsonl", (BOM if marked else b"") + lines(made, end))
    examples = result_or_sentence(lambda: read(path))
    expected = result_or_sentence(lambda: [to_example(json.loads(json.dumps(row))) for row in made])
    assert repr(examples) == repr(expected)
    listed = write(
        tmp_path, "a.json", (BOM if marked else b"") + json.dumps(made, indent=1).replace("\n", end.decode()).encode()
    )
    assert repr(result_or_sentence(lambda: read(listed))) == repr(expected)


@few
@given(
    st.lists(st.lists(TEXTS.filter(lambda t: "\ud83d" not in t), min_size=2, max_size=2), max_size=3),
    st.sampled_from(["\n", "\r\n", "\r"]),
)
def test_any_table_of_csv_is_examples_or_one_sentence(tmp_path: Path, cells: list[list[str]], end: str) -> None:
    text = io.StringIO()
    # Python's writer does not quote a carriage return in front of its own line end, where it reads as a part of that.
    quoting = csv.QUOTE_ALL if any("\r" in cell for row in cells for cell in row) else csv.QUOTE_MINIMAL
    csv.writer(text, lineterminator=end, quoting=quoting).writerows([["prompt", "completion"], *cells])
    path = write(tmp_path, "a.csv", text.getvalue().encode())
    examples = result_or_sentence(lambda: read(path))
    if examples is not None:
        assert [example.text for example in examples] == ["".join(row) for row in cells]


ARROW = st.sampled_from(
    [
        (pyarrow.string(), ["x"]), (pyarrow.string(), [None]), (pyarrow.large_string(), ["x"]),
            (pyarrow.binary(), [b"\xff"]),
        (pyarrow.float64(), [float("nan")]), (pyarrow.int64(), [2**62]), (pyarrow.bool_(), [True]),
            (pyarrow.date32(), [1]),
        (pyarrow.timestamp("us"), [2**62]), (pyarrow.timestamp("ns", tz="No/Where"), [1]),
            (pyarrow.duration("s"), [2**62]),
        (pyarrow.decimal128(5, 2), [None]), (pyarrow.null(), [None]), (pyarrow.list_(pyarrow.string()), [["x"]]),
        (pyarrow.map_(pyarrow.string(), pyarrow.string()), [[("role", "user")]]),
        (pyarrow.struct([("role", pyarrow.string())]), [{"role": None}]),
        (pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])), [[ASK, ANSWER]]),
    ]
)  # fmt: skip


@few
@given(st.lists(st.tuples(COLUMNS.filter(lambda t: "\ud83d" not in t), ARROW), max_size=4))
@example([("text", (pyarrow.string(), ["a"])), ("text", (pyarrow.string(), ["b"]))])
def test_any_parquet_columns_are_examples_or_one_sentence(tmp_path: Path, columns: list[tuple[str, Any]]) -> None:
    arrays = [pyarrow.array(values, kind) for _, (kind, values) in columns]
    table = pyarrow.Table.from_arrays(arrays, names=[name for name, _ in columns])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    examples = result_or_sentence(lambda: read(tmp_path / "a.parquet"))
    assert examples is None or len({name for name, _ in columns}) == len(columns)


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small good file."""
    path = tmp_path_factory.mktemp("parquet") / "a.parquet"
    table = pyarrow.Table.from_pylist([{"messages": [ASK, ANSWER], "id": str(number)} for number in range(40)])
    pyarrow.parquet.write_table(table, path)
    return path.read_bytes()


@few
@given(
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=3), st.floats(0, 1)
)
def test_a_parquet_file_with_bytes_changed_or_cut_off_is_rows_or_one_sentence(
    tmp_path: Path, parquet: bytes, changes: list[tuple[float, int]], kept: float
) -> None:
    broken = bytearray(parquet)
    for place, value in changes:
        broken[int(place * len(broken))] = value
    path = write(tmp_path, "a.parquet", bytes(broken[: int(kept * len(broken))] if kept < 0.5 else broken))
    result_or_sentence(lambda: list(read_rows(str(path), "train")))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
@pytest.mark.parametrize("content", [b"", BOM, b"\0" * 5000, b"\xff\xfe", b"[]", b"[[]]", b"null", b"\x80\x04N."])
def test_files_without_a_row_are_refused(tmp_path: Path, name: str, content: bytes) -> None:
    message = refusal(lambda: read(write(tmp_path, name, content)))
    assert f"{tmp_path}/{name}" in message


def test_names_that_would_move_the_cursor_are_written_out(tmp_path: Path) -> None:
    path = write(tmp_path, "a\n\x1b[2J.jsonl", lines([{"a\x1b[31m\nb": 1}]))
    message = refusal(lambda: read(path))
    assert "a \\x1b[2J.jsonl:1: unknown columns (a\\x1b[31m b); accepted columns: " in message


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "LONGEST_ROW", 1000)
    for name in ("a.jsonl", "a.csv"):
        path = write(tmp_path, name, b"text\n" if name == "a.csv" else b'{"text": "a"}\n')
        with path.open("ab") as file:
            file.truncate(1 << 40)  # takes no room on the disk
        assert refusal(lambda path=path: list(read_rows(str(path), "train"))) == (
            f"{path}:2 is longer than 1,000 bytes, which is not a row of text; put each row on a line."
        )


def test_a_row_that_does_not_end_is_not_read_to_the_end_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_text, "LONGEST_ROW", 1000)
    monkeypatch.setattr(json_text, "CHUNK", 100)
    for name, begin, line, said in (
        (
            "a.csv",
            b'text\na\n"one\n',
            b"more\n",
            "3 begins a row of over 1,000 characters; close the quotation mark that",
        ),
        ("b.csv", b'x,y\n"1","\n', b'","\n', "2 begins a row of over 1,000 characters; close the quotation mark that"),
        (
            "a.json",
            b'[{"text": "a"},\n{"text": "',
            b"more\\n",
            "2 begins a row that is longer than 1,000 characters, or not",
        ),
        ("b.json", b'[{"text": "a"},\n[', b"1,\n", "2 begins a row that is longer than 1,000 characters, or not JSON;"),
    ):
        path = write(tmp_path, name, begin + line * 10_000)
        reader = read_rows(str(path), "train")
        # The last line of the file is never reached.
        with path.open("ab") as file:
            file.write(b"\xff")
        assert f"{path}:{said}" in refusal(lambda reader=reader: list(reader))


def test_a_huge_row_is_read(tmp_path: Path) -> None:
    (only,) = read(write(tmp_path, "a.jsonl", lines([{"text": "x" * 20_000_000}])))
    assert len(str(only.text)) == 20_000_000


@pytest.mark.parametrize("depth", [60, 900, 20_000])
def test_deep_nesting_is_refused_wherever_it_stands(tmp_path: Path, depth: int) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    chat = '{"role": "assistant", "content": "x"'
    call = '{"function": {"name": "f", "arguments": '
    for row in (
        '{"messages": ' + deep + "}",
        '{"messages": [' + chat + ', "tool_calls": [' + call + deep + "}}]}]}",
        '{"messages": [' + chat + ', "tool_calls": [' + call + json.dumps(deep) + "}}]}]}",
        '{"messages": [' + chat + '}], "tools": [' + deep + "]}",
        '{"messages": ' + json.dumps("[" * depth) + "}",
    ):
        refusal(lambda row=row: read(write(tmp_path, "a.jsonl", row.encode())))


def test_rows_behind_links_are_read_and_links_to_nowhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    write(tmp_path / "far", "rows.jsonl", lines(GOOD))
    (tmp_path / "folder").symlink_to("far")
    (tmp_path / "link.jsonl").symlink_to("folder/rows.jsonl")
    assert len(read(tmp_path / "link.jsonl")) == len(GOOD)
    (tmp_path / "circle.jsonl").symlink_to("circle.jsonl")
    (tmp_path / "device.jsonl").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("circle.jsonl", "device.jsonl", "pipe.jsonl"):
        assert name in refusal(lambda name=name: read(tmp_path / name))


def test_nothing_in_a_row_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "!!python/object/apply:os.system ['touch ran']",
        "$(touch ran)",
    ]
    made = [{"text": text} for text in texts]
    assert [example.text for example in read(write(tmp_path, "a.jsonl", lines(made)))] == texts
    assert not (tmp_path / "ran").exists()
