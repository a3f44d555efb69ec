"""Rows of every accepted shape, and the words in which any other is refused."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from unsloth_ddp.data.sources.formats import ACCEPTED, ANY_FIX, Example, to_example
from unsloth_ddp.data.sources.messages import SHAREGPT_ROLES
from unsloth_ddp.utils.errors import UserError

ASK = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello."}
CHAT = [ASK, ANSWER]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}


def refusal(row: Any) -> str:
    with pytest.raises(UserError) as refused:
        to_example(row)
    return str(refused.value)


@pytest.mark.parametrize(
    ("row", "example"),
    [
        ({"messages": CHAT}, Example(CHAT)),
        ({"messages": json.dumps(CHAT), "id": "7"}, Example(CHAT)),
        ({"messages": CHAT, "text": "not this", "tools": None}, Example(CHAT)),
        ({"messages": [{**ASK, "name": None}, ANSWER]}, Example(CHAT)),
        ({"messages": [{**ASK, "name": float("nan")}, ANSWER], "tools": float("nan")}, Example(CHAT)),
        ({"instruction": "Hi", "input": float("nan"), "output": "Hello."}, Example(CHAT)),
        ({"messages": [{"role": "developer", "content": "Be brief."}, *CHAT]},
         Example([{"role": "system", "content": "Be brief."}, *CHAT])),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
            ANSWER]},
         Example(CHAT)),
        ({"messages": [*CHAT, {**ANSWER, "reasoning_content": "Hm."}]},
         Example([*CHAT, {**ANSWER, "reasoning_content": "Hm."}])),
        ({"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]},
         Example(CHAT)),
        ({"conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello."}]}, Example(CHAT)),
        ({"conversations": CHAT}, Example(CHAT)),
        ({"messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}, Example(CHAT)),
        ({"text": "Once upon", "role": "doctor"}, Example(text="Once upon")),
        ({"conversations": [{"from": "system", "value": "Be brief."}, {"from": "gpt", "value": "Hello."}]},
         Example([{"role": "system", "content": "Be brief."}, ANSWER])),
        ({"system": "Be brief.", "conversations": [{"from": "gpt", "value": "Hello."}]},
         Example([{"role": "system", "content": "Be brief."}, ANSWER])),
        ({"instruction": "Hi", "output": "Hello."}, Example(CHAT)),
        ({"instruction": "Hi", "input": "", "output": "Hello.", "text": "not this"}, Example(CHAT)),
        ({"instruction": "Hi", "input": None, "output": "Hello.", "system": ""}, Example(CHAT)),
        ({"instruction": "Add", "input": "2, 3", "output": "5", "system": "Be brief."},
         Example([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add\n\n2, 3"},
                  {"role": "assistant", "content": "5"}])),
        ({"prompt": "Hi: ", "completion": "Hello."}, Example(text="Hi: Hello.", prompt_chars=4)),
        ({"prompt": [ASK], "completion": [ANSWER]}, Example(CHAT, prompt_messages=1)),
        ({"prompt": [*CHAT, ASK], "completion": [ANSWER]}, Example([*CHAT, *CHAT], prompt_messages=3)),
        ({"prompt": json.dumps([ASK]), "completion": json.dumps([ANSWER])}, Example(CHAT, prompt_messages=1)),
        ({"prompt": f" {json.dumps([ASK])}", "completion": [ANSWER]}, Example(CHAT, prompt_messages=1)),
        ({"prompt": "[INST] Hi: ", "completion": "Hello."}, Example(text="[INST] Hi: Hello.", prompt_chars=11)),
        ({"prompt": "[1, 2]", "completion": "[3]"}, Example(text="[1, 2][3]", prompt_chars=6)),
        ({"prompt": "Which list is empty? ", "completion": "[]"},
            Example(text="Which list is empty? []", prompt_chars=21)),
        ({"prompt": "Who? ", "completion": '[{"role": "CEO"}]'},
            Example(text='Who? [{"role": "CEO"}]', prompt_chars=5)),
        ({"prompt": "[]", "completion": json.dumps(CHAT)}, Example(CHAT)),
        ({"prompt": "[" * 9, "completion": "x"}, Example(text="[" * 9 + "x", prompt_chars=9)),
        ({"text": "Once upon"}, Example(text="Once upon")),
        ({"messages": None, "text": "Once upon"}, Example(text="Once upon")),
    ],
)  # fmt: skip
def test_every_accepted_shape(row: dict[str, Any], example: Example) -> None:
    assert to_example(row) == example


@pytest.mark.parametrize("speaker", sorted(set(SHAREGPT_ROLES) - {"function_call"}))
def test_every_sharegpt_speaker(speaker: str) -> None:
    row = {"conversations": [{"from": speaker, "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}
    assert to_example(row).messages[0] == {"role": SHAREGPT_ROLES[speaker], "content": "Hi"}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
@pytest.mark.parametrize(
    "spelled",
    [call({"a": 2}), call('{"a": 2}'), {"id": "1", "name": "add", "arguments": {"a": 2}},
        {**call({"a": 2}), "index": None}],
)  # fmt: skip
def test_tools_and_tool_calls_in_every_spelling(tools: Any, spelled: dict[str, Any]) -> None:
    turns = [ASK, {"role": "assistant", "tool_calls": [spelled]}, {"role": "tool", "content": "5"}, ANSWER]
    example = to_example({"messages": turns, "tools": tools})
    assert example.tools == [TOOL]
    assert example.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call({"a": 2})]}


@pytest.mark.parametrize("tools", [None, [], "[]", ""])
def test_no_tools_however_written_are_none(tools: Any) -> None:
    assert to_example({"messages": [ASK, {**ANSWER, "tool_calls": []}], "tools": tools}).tools is None


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (
            {"question": "a", "answer": "b"},
            f"unknown columns (question, answer); accepted columns: {ACCEPTED}; give --columns question=instruction "
            "answer=output.",
        ),
        ({"prompt": "a", "response": "b"}, "give --columns prompt=instruction response=output."),
        ({"instruction": "a", "Response": "b", "id": 1}, f"{ACCEPTED}; give --columns Response=output."),
        ({"instruction": "a", "input": "", "response": "b"}, f"{ACCEPTED}; give --columns response=output."),
        ({"question": "a", "answer": "b", "reply": "c"}, f"{ACCEPTED}{ANY_FIX}."),
        ({"instruction": "a", "context": "b", "response": "c", "kind": "d", "n": 1},
         "; give --columns response=output; of the others (context, kind) NAME=input adds what the question needs."),
        ({"input": "a", "output": "b", "id": "c"}, "; give --columns input=instruction; of the others (id) NAME=input"),
        ({"id": "1", "conversation": CHAT}, f"{ACCEPTED}; give --columns conversation=messages."),
        ({"id": "1", "chat": json.dumps(CHAT)}, f"{ACCEPTED}; give --columns chat=messages."),
        ({"input": [ASK], "output": "a"}, f"{ACCEPTED}; give --columns input=instruction."),
        ({"content": "a", "title": "b"}, f"{ACCEPTED}{ANY_FIX}."),
        (ASK, "the row is one message, and a row is a whole chat; put its messages into a list named messages."),
        ({"role": "assistant", "text": "a", "parent_id": "b"}, "the row is one message, "),
        ({"from": "gpt", "value": "a"}, "the row is one message, "),
        ({"instruction": "a"}, "unknown columns (instruction); accepted columns: messages; "),
        ({"completion": [{"role": "user"}], "label": 1}, f"{ANY_FIX}; with label it may be one for --task kto."),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "the row is a preference pair (chosen, rejected); give "
            "--task dpo"),
        ({"prompt": "a", "completion": None}, "completion is null; give it a value or remove the row."),
        ({"instruction": "a", "input": "b", "output": None}, "output is null; give it a value or remove the row."),
        ({"text": None}, "text is null; give it a value or remove the row."),
        ({"messages": None, "id": 3}, "messages is null; give it a value or remove the row."),
        ({"messages": str(CHAT)}, "messages is a list or object as Python or NumPy prints it, which is not JSON; "
            "write the table again"),
        ({}, "unknown columns (none); "),
        ({f"c{i}": 1 for i in range(99)}, "c18, c19 and 79 more); "),
        (CHAT, "the row is a list of objects; if each is a row, name the file .json instead of .jsonl."),
        ([CHAT], "the row is a list, not an object with columns; accepted columns: "),
        (None, "the row is missing, not an object"),
        ("Hi", "the row is text, not an object"),
        ({"messages": "Hi"}, "messages is text that is not JSON"),
        ({"messages": "{}"}, "messages is an object, not a list."),
        ({"messages": {}}, "messages is an object, not a list."),
        ({"messages": []}, "the conversation is empty; remove the row."),
        ({"messages": [ASK]}, "the conversation has no assistant turn to learn from"),
        ({"prompt": CHAT, "completion": [ASK]}, "the conversation has no assistant turn to learn from"),
        ({"prompt": "Hi", "completion": [ANSWER]}, "prompt is text and completion is a list of messages; make both "
            "text, or"),
        ({"prompt": [ASK], "completion": "Hello."}, "completion is text and prompt is a list of messages; make both "
            "text, or"),
        ({"prompt": "Hi", "completion": json.dumps([ANSWER])}, "prompt is text and completion is a list of messages "
            "as JSON "),
        ({"prompt": [ASK], "completion": 5}, "completion is a number, not a list."),
        ({"prompt": json.dumps([{"role": "bot", "content": ""}]), "completion": json.dumps(CHAT)}, "a message has "
            "'bot' as role"),
        ({"messages": ["Hi"]}, "a message is text, not an object with role and content."),
        ({"messages": [{"role": "bot", "content": "x"}]}, "a message has 'bot' as role; accepted: system, developer, "),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "a message has a list as role; accepted: "),
        ({"messages": [{"content": "x"}]}, "a message has no role; accepted: system, "),
        ({"messages": [{"role": "user"}, ANSWER]}, "a message of role user has no content; give it text or"),
        ({"messages": [{"role": "user", "content": 5}, ANSWER]}, "a message of role user has a number as content"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "a content part (of type 'video') that is "
            "neither {'type': 'text', 'text': ...} nor {'type': 'image', 'image': ...}; this kit trains on text and "
            "images only"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "has 'alien' as from; accepted: human, user, gpt, "),
        ({"conversations": [{"from": ["gpt"], "value": "x"}]}, "a turn of conversations has a list as from"),
        ({"conversations": [{"value": "x"}]}, "a turn of conversations has no from; accepted: human, user, gpt, "),
        ({"conversations": [{"from": "gpt", "value": 1}]}, "value of a turn is a number, not text; write it as text."),
        ({"conversations": ["Hi"]}, "a turn of conversations is text, not an object with from and value."),
        ({"instruction": "a", "output": 5}, "output is a number, not text; write it as text."),
        ({"instruction": "a", "output": float("nan")}, "output is null; give it a value or remove the row."),
        ({"messages": CHAT, "tools": [{"a": [float("nan")]}]}, "tools holds nan, which is not a JSON value; make it a "
            "finite"),
        ({"messages": [{**ANSWER, "tool_calls": [call('{"a": NaN}')]}]}, "a message holds nan, which is not a JSON "
            "value"),
        ({"messages": [{**ANSWER, "tool_calls": [call('{"a": 1, "a": 2}')]}]},
         "the value of a tool call's arguments is text that is not JSON ('a' is given twice); fix or remove it."),
        ({"messages": '[{"role": "user", "content": "a", "content": "b"}]'}, "messages is text that is not JSON "
            "('content' is"),
        ({"prompt": '[{"role": "user", "content": "a", "content": "b"}]', "completion": [ANSWER]},
         "prompt is text that is not JSON ('content' is given twice); fix or remove it."),
        ({"text": ["a"]}, "text is a list, not text; write it as text."),
        ({"text": True}, "text is a truth value, not text; write it as text."),
        ({"text": "half a pair \ud83d"}, "text holds broken Unicode (half a surrogate pair); fix or remove it."),
        ({"messages": [ASK, {**ANSWER, "at": datetime.date.min}]}, "a message holds a date, which is not a JSON value"),
        ({"messages": [ASK, {**ANSWER, "a\ud83d": 1}]}, "a message holds broken Unicode"),
        ({"messages": CHAT, "tools": "{"}, "tools is text that is not JSON; fix or remove it."),
        ({"messages": CHAT, "tools": {"a": 1}}, "tools is an object, not a list."),
        ({"messages": CHAT, "tools": ["add"]}, "a tool is text, not an object that describes a function."),
        ({"messages": CHAT, "tools": [{"a": b"x"}]}, "tools holds a bytes, which is not a JSON value"),
        ({"messages": [{**ANSWER, "tool_calls": ["add"]}]}, "a tool call is text, not an object."),
        ({"messages": [{**ANSWER, "tool_calls": [{"id": 1}]}]}, "a tool call names no function; write "),
        ({"messages": [{**ANSWER, "tool_calls": [call("{")]}]}, "the value of a tool call's arguments is text that is "
            "not"),
        ({"messages": [{**ANSWER, "tool_calls": 5}]}, "tool_calls is a number, not a list."),
    ],
)  # fmt: skip
def test_anything_else_is_refused_in_one_sentence(row: Any, sentence: str) -> None:
    message = refusal(row)
    assert sentence in message
    assert "\n" not in message
    assert len(message) < 500


def test_a_row_is_not_changed() -> None:
    row = {"messages": [{**ANSWER, "content": None, "tool_calls": [call("{}")]}], "tools": json.dumps([TOOL])}
    before = json.dumps(row)
    to_example(row)
    assert json.dumps(row) == before


def test_a_completion_that_is_the_whole_conversation_does_not_repeat_the_prompt() -> None:
    prompt = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    answer = {"role": "assistant", "content": "4"}
    example = to_example({"prompt": prompt, "completion": [*prompt, answer]})
    assert [message["content"] for message in example.messages] == ["1", "2", "3", "4"]
    assert example.prompt_messages == 3


def test_text_beside_an_image_in_one_part_is_refused() -> None:
    content = [{"type": "image", "image": "x.png", "text": "What is it?"}]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "Red"}]}
    with pytest.raises(UserError, match="has an image part with text beside it"):
        to_example(row)
