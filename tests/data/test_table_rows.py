"""The same rows from JSONL, Parquet and a Hub dataset give the same examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from unsloth_ddp.data.sources.formats import Example, to_example
from unsloth_ddp.data.sources.rows import read_rows
from unsloth_ddp.data.sources.table_nulls import without_filled_nulls
from unsloth_ddp.utils.errors import UserError


def tool(name: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": sorted(properties)}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


def chat(call: dict[str, Any], **columns: Any) -> dict[str, Any]:
    turns = [
        {"role": "user", "content": "Please."},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": "Done."},
        {"role": "assistant", "content": "Here.", "weight": 1},
    ]
    return {"messages": turns, **columns}


NUMBER, TEXT = {"type": "number"}, {"type": "string", "enum": ["Rome", "Oslo"]}
# As pydantic describes an optional argument, and as OpenAI's strict mode writes one that is required and may be null.
OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
STRICT = tool("convert", amount=NUMBER, unit={"anyOf": [{"type": "string"}, {"type": "null"}]})
LENIENT = tool("look", unit=OPTIONAL, place=TEXT)
LENIENT["function"]["parameters"]["required"] = ["place"]
NESTED = tool("book", seat={"type": "object", "properties": {"row": NUMBER, "side": NUMBER}, "required": ["row"]})
ROWS: list[dict[str, Any]] = [
    chat({"name": "convert", "arguments": {"amount": 3, "unit": None}}, tools=[STRICT, tool("now")]),
    chat({"name": "look", "arguments": {"place": "Rome"}}, tools=[LENIENT]),
    chat({"name": "look", "arguments": {"place": "Rome"}}, tools=[LENIENT, STRICT]),
    chat({"name": "book", "arguments": {"seat": {"row": None}}}, tools=[NESTED]),
    chat({"name": "add", "arguments": {"a": 2, "b": 3}}, tools=[tool("add", a=NUMBER, b=NUMBER)]),
    chat({"name": "weather", "arguments": {"city": "Rome"}}, tools=[tool("weather", city=TEXT), tool("now")]),
    chat({"name": "find", "arguments": {"where": {"near": "Rome"}, "tags": ["a"]}}, tools=[tool("find", where=TEXT)]),
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
]


def examples(source: str) -> list[Example]:
    return [to_example(row.columns) for row in read_rows(source, "train")]


@pytest.fixture
def expected(tmp_path: Path) -> list[Example]:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return examples(str(tmp_path / "rows.jsonl"))


def test_the_rows_have_what_they_say(expected: list[Example]) -> None:
    assert [example.tools for example in expected] == [row.get("tools") for row in ROWS]
    calls = [row["messages"][1]["tool_calls"][0]["function"] for row in ROWS if "tools" in row]
    read = [e.messages[1]["tool_calls"][0]["function"] for e in expected if e.tools]
    assert [call["arguments"] for call in read] == [call["arguments"] for call in calls]


@pytest.mark.parametrize("made_by", ["pyarrow", "datasets"])
def test_rows_of_parquet_have_no_nulls_that_nobody_wrote(tmp_path: Path, expected: list[Example], made_by: str) -> None:
    path = tmp_path / "rows.parquet"
    if made_by == "pyarrow":
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    else:
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    assert examples(str(path)) == expected


def test_a_table_that_was_written_as_json_is_read_as_the_table(tmp_path: Path, expected: list[Example]) -> None:
    table = pa.Table.from_pylist(ROWS[:-1]).to_pylist()
    assert table[0]["tools"][1]["function"]["parameters"]["properties"]["city"] is None
    (tmp_path / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    (tmp_path / "table.json").write_text(json.dumps(table))
    for name in ("table.jsonl", "table.json"):
        assert examples(str(tmp_path / name)) == expected[:-1]


def as_datasets_writes_it(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = str(tmp_path / "mixed.jsonl")
    table: Any = datasets.load_dataset("json", data_files=path, split="train", cache_dir=str(tmp_path / "cache"))
    assert "Json" in str(table.features)
    table.to_parquet(tmp_path / "mixed.parquet")
    return str(tmp_path / "mixed.parquet")


def test_messages_that_datasets_wrote_as_json_text_are_read(tmp_path: Path, expected: list[Example]) -> None:
    assert examples(as_datasets_writes_it(tmp_path, ROWS)) == expected


def test_content_that_datasets_wrote_as_json_text_has_no_quotation_marks(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Who?"}]
    rows = [{"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": 'The "one".'}]}]
    (example,) = examples(as_datasets_writes_it(tmp_path, rows))
    assert [message["content"] for message in example.messages] == ["Who?", 'The "one".']


def test_json_text_in_maps_and_whole_columns_is_read(tmp_path: Path) -> None:
    def column(*texts: str | None) -> pa.Array:
        return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts))

    maps = pa.MapArray.from_arrays([0, 1, 1], pa.array(["k"]), column('{"n": 1}'))
    table = pa.table({"text": column('"a"', None), "map": maps})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    found = [row.columns for row in read_rows(str(tmp_path / "rows.parquet"), "train")]
    assert found == [{"text": "a", "map": {"k": {"n": 1}}}, {"text": None, "map": {}}]


def test_broken_json_text_in_a_table_is_refused(tmp_path: Path) -> None:
    column = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['"good"', '{"a": 1, "a": 2}']))
    pyarrow.parquet.write_table(pa.table({"text": column}), tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=r"rows.parquet is not readable Parquet after row 2 \('a' is given twice\)"):
        examples(str(tmp_path / "rows.parquet"))


@pytest.mark.parametrize("kind", ["in memory", "streamed", "JSONL of the Hub"])
def test_rows_of_a_hub_dataset_have_no_nulls_that_nobody_wrote(
    tmp_path: Path, expected: list[Example], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "JSONL of the Hub":
        path = str(tmp_path / "rows.jsonl")
        table: Any = datasets.load_dataset("json", data_files=path, split="train", cache_dir=str(tmp_path / "cache"))
    else:
        table = datasets.Dataset.from_list(ROWS)
        table = table.to_iterable_dataset() if kind == "streamed" else table
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: table)
    assert examples("owner/calls") == expected


def test_arguments_in_a_map_column_are_an_object(tmp_path: Path) -> None:
    arguments = pa.map_(pa.string(), pa.string())
    function = pa.struct([("name", pa.string()), ("arguments", arguments)])
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(function))])
    turn = {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": [("city", "Rome")]}]}
    table = pa.table({"messages": pa.array([[turn]], type=pa.list_(message))})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (example,) = examples(str(tmp_path / "rows.parquet"))
    assert example.messages[0]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}


def test_a_null_argument_is_kept_if_the_tool_requires_it_also_where_tools_are_text() -> None:
    row = chat({"name": "convert", "arguments": {"amount": 3, "unit": None, "city": None}})
    for tools in ([STRICT], json.dumps([STRICT]), json.dumps([STRICT["function"]])):
        kept = without_filled_nulls({**row, "tools": tools})
        assert kept["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"amount": 3, "unit": None}
    without = without_filled_nulls(row)
    assert without["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"amount": 3}


def test_nulls_in_lists_and_of_whole_columns_stay() -> None:
    row = {"text": None, "tools": [{"enum": ["a", None], "default": None}]}
    assert without_filled_nulls(row) == {"text": None, "tools": [{"enum": ["a", None]}]}


def test_nulls_of_a_jsonl_row_are_the_users_own(tmp_path: Path) -> None:
    row = chat({"name": "add", "arguments": {"a": None}})
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    (example,) = examples(str(tmp_path / "rows.jsonl"))
    assert example.messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}


def test_a_table_without_tools_that_was_written_as_json_loses_its_nulls(tmp_path: Path) -> None:
    def row(name: str, **arguments: Any) -> dict[str, Any]:
        call = {"function": {"name": name, "arguments": arguments}}
        return {
            "messages": [
                {"role": "user", "content": "Q", "tool_calls": None},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
        }

    path = tmp_path / "rows.jsonl"
    # Written by hand: other keys in each message.
    by_hand = row("f", b=None)
    del by_hand["messages"][0]["tool_calls"]
    path.write_text("\n".join(map(json.dumps, (row("f", a=1.0, b=None), row("g", a=None, b=["x"]), by_hand))))
    calls = [to_example(r.columns).messages[1]["tool_calls"][0]["function"] for r in read_rows(str(path), "train")]
    assert [call["arguments"] for call in calls] == [{"a": 1.0}, {"b": ["x"]}, {"b": None}]


def test_a_header_within_the_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "joined.csv"
    path.write_text("instruction,output\n1,2\ninstruction,output\n3,4\n")
    with pytest.raises(UserError, match=r"joined\.csv:3 is the header again"):
        list(read_rows(str(path), "train"))
