"""Keys of OpenAI's, ShareGPT's and Alpaca's formats: read, refused, or named as not read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.data.test_formats import ANSWER, ASK, refusal
from unsloth_ddp.data.formats import Example, to_example

SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}


@pytest.mark.parametrize("none", [[], "[]", "", {}])
def test_an_empty_list_of_tool_calls_is_none(none: Any) -> None:
    """Llama 3.1's and DeepSeek's templates ask whether a message has the key."""
    assert to_example({"messages": [{**ASK, "tool_calls": none}, {**ANSWER, "tool_calls": none}]}).messages == [
        ASK,
        ANSWER,
    ]


@pytest.mark.parametrize("flag", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}])
def test_an_assistant_turn_of_weight_0_is_left_out_of_the_loss(flag: dict[str, Any]) -> None:
    rows = [
        {"messages": [ASK, {**ANSWER, **flag}, ASK, {**ANSWER, "weight": 1}]},
        {
            "conversations": [
                {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello.", **flag},
                {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."},
            ]
        },
    ]  # fmt: skip
    for row in rows:
        assert to_example(row) == Example([ASK, ANSWER, ASK, ANSWER], left_out=[1])
    prompted = to_example({"prompt": [ASK], "completion": [{**ANSWER, **flag}, ASK, ANSWER], "system": "Be brief."})
    assert prompted == Example([SYSTEM, ASK, ANSWER, ASK, ANSWER], prompt_messages=2, left_out=[2])


@pytest.mark.parametrize(
    ("row", "example"),
    [
        ({"messages": [ASK, ANSWER], "system": "Be brief."}, Example([SYSTEM, ASK, ANSWER])),
        ({"messages": [ASK, ANSWER], "system_prompt": "Be brief."}, Example([SYSTEM, ASK, ANSWER])),
        ({"messages": [SYSTEM, ASK, ANSWER], "system": "Be brief."}, Example([SYSTEM, ASK, ANSWER])),
        ({"messages": [ASK, ANSWER], "system": ""}, Example([ASK, ANSWER])),
        ({"prompt": [ASK], "completion": [ANSWER], "system": "Be brief."},
         Example([SYSTEM, ASK, ANSWER], prompt_messages=2)),
        ({"prompt": "Hi ", "completion": "Hello.", "system": "Be brief."},
         Example(text="Be brief.\n\nHi Hello.", prompt_chars=14)),
        ({"instruction": "Hi", "output": "Hello.", "history": [["Q", "A"]], "system": "Be brief."},
         Example([SYSTEM, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}, ASK, ANSWER])),
        ({"instruction": "Hi", "output": "Hello.", "history": "[]"}, Example([ASK, ANSWER])),
        ({"instruction": "Hi", "output": "Hello.", "history": json.dumps([["Hi", "Hello."]])},
         Example([ASK, ANSWER, ASK, ANSWER])),
        ({"messages": [ASK, {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 2}'}},
                       {"role": "function", "name": "add", "content": "5"}, ANSWER], "functions": [{"name": "add"}]},
         Example([ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]},
                  {"role": "tool", "name": "add", "content": "5"}, ANSWER],
                 [{"type": "function", "function": {"name": "add"}}])),
        ({"conversations": [{"from": "human", "value": "Hi"},
                            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                            {"from": "observation", "value": "5"}, {"from": "gpt", "value": "Hello."}]},
         Example([ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "5"}, ANSWER])),
        ({"messages": [ASK, {**ANSWER, "refusal": None, "audio": None, "annotations": []}]},
         Example([ASK, {**ANSWER, "annotations": []}])),
    ],
)  # fmt: skip
def test_keys_that_are_read(row: dict[str, Any], example: Example) -> None:
    assert to_example(row) == example


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"messages": [ASK, {**ANSWER, "weight": 0.5}]}, "a message has weight 0.5; only 0 (or false) and 1 (or true)"),
        ({"messages": [ASK, {**ANSWER, "train": "no"}]}, "a message has train no; only 0 (or false) and 1"),
        ({"messages": [ASK, {**ANSWER, "train": True, "weight": 0}]}, "has weight and train, which disagree; keep one"),
        ({"messages": [ASK, {**ANSWER, "weight": 0}]}, "the conversation has only assistant turns of weight 0; add one"),
        ({"messages": [ASK, {**ANSWER, "train_detail": [{"train": False}]}]}, "a message has train_detail, which is not"),
        ({"messages": [ASK, {"role": "assistant", "content": None, "refusal": "No."}]}, "a message has refusal, which is"),
        ({"messages": [ASK, {"role": "assistant", "content": None, "audio": {"id": "a"}}]}, "a message has audio, which is"),
        ({"messages": [{**ASK, "images": ["a.png"]}, ANSWER]}, "a message has images, which is not trained; this kit"),
        ({"messages": [ASK, ANSWER], "images": ["a.png"]}, "the row has a column images; this kit trains on text only."),
        ({"image": {"bytes": "x"}, "conversations": [ASK, ANSWER]}, "the row has a column image; this kit trains on text"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": [CALL], "function_call": {"name": "add"}}]}, "the older function_call"),
        ({"messages": [{**ASK, "tool_calls": [CALL]}, ANSWER]}, "a message of role user has tool_calls; only assistant"),
        ({"messages": [ASK, ANSWER], "system": "a", "system_prompt": "b"}, "two different system prompts, in system and"),
        ({"messages": [ASK, ANSWER], "system": ["a"]}, "system is a list, not text; write it as text."),
        ({"messages": [ASK, ANSWER], "tools": [CALL], "functions": [{}]}, "the row has tools and the older functions; keep"),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, "history is not a list of [question, answer] pairs"),
        ({"prompt": [ASK], "chosen": [ANSWER], "rejected": [ANSWER]}, "the row is a preference pair (chosen, rejected)"),
        ({"prompt": "a", "completion": "b", "label": False}, "the row has label false, which in KTO's format marks an answer not to learn"),
        ({"prompt": "a", "completion": "b", "label": "False"}, "the row has label false"),
        ({"conversations": [{"from": "function_call", "value": "add(2)"}]}, "the value of a function_call turn is text that"),
    ],
)  # fmt: skip
def test_keys_that_are_refused(row: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(row)


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        ({"messages": [ASK, ANSWER], "tools": [], "id": 3, "source": "x", "empty": None}, ["id", "source"]),
        ({"messages": [ASK, ANSWER], "prompt": "Hi", "parallel_tool_calls": True}, ["prompt", "parallel_tool_calls"]),
        ({"prompt": "a", "completion": "b", "tools": [CALL]}, ["tools"]),
        ({"text": "a", "system": "b"}, ["system"]),
        ({"instruction": "Hi", "output": "Hello.", "tools": [CALL], "category": "qa"}, ["category"]),
        ({"messages": [{**ASK, "weight": 1}, ANSWER]}, ["weight, train or loss of user messages"]),
        ({"messages": [{**ASK, "weight": 0}, ANSWER]}, []),
        # The message stands, as rows of OpenHermes have it.
        ({"messages": [SYSTEM, ASK, ANSWER], "system_prompt": "Be long."}, ["system beside another system message"]),
        ({"messages": [SYSTEM, ASK, ANSWER], "system_prompt": "Be brief."}, []),
    ],
)
def test_columns_that_are_not_read_are_named(row: dict[str, Any], unread: list[str]) -> None:
    assert to_example(row).unread == unread
