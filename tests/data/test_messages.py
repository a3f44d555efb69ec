"""Keys of OpenAI's, ShareGPT's and Alpaca's formats: read, refused, or named as not read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.data.test_formats import ANSWER, ASK, refusal
from unsloth_ddp.data.sources.formats import Example, to_example

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
        ({"messages": [ASK, {"role": "assistant", "content": None,
            "function_call": {"name": "add", "arguments": '{"a": 2}'}},
                       {"role": "function", "name": "add", "content": "5"}, ANSWER], "functions": [{"name": "add"}]},
         Example([ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]},
                  {"role": "tool", "name": "add", "content": "5"}, ANSWER],
                 [{"type": "function", "function": {"name": "add"}}])),
        ({"conversations": [{"from": "human", "value": "Hi"},
                            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
                            {"from": "observation", "value": "5"}, {"from": "gpt", "value": "Hello."}]},
         Example([ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "5"},
             ANSWER])),
        ({"messages": [ASK, {**ANSWER, "channel": "final"}]}, Example([ASK, {**ANSWER, "channel": "final"}])),
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
        ({"messages": [ASK, {**ANSWER, "train": "no"}]}, "a message has train 'no'; only 0 (or false) and 1"),
        ({"messages": [ASK, {**ANSWER, "train": True, "weight": 0}]}, "has weight and train, which disagree; keep one"),
        ({"messages": [ASK, {**ANSWER, "weight": 0}]},
            "the conversation has only assistant turns of weight 0; add one"),
        ({"messages": [ASK, {**ANSWER, "train_detail": [{"train": False}]}]}, "a message has train_detail, which is "
            "not"),
        ({"messages": [ASK, {"role": "assistant", "content": None, "refusal": "No."}]}, "a message has refusal, which "
            "is"),
        ({"messages": [ASK, {"role": "assistant", "content": None, "audio": {"id": "a"}}]}, "a message has audio, "
            "which is"),
        ({"messages": [ASK, {"role": "assistant", "channel": "analysis", "content": "Hm."}, ANSWER]},
         "it is reasoning, and would be trained as an answer; move its text into thinking of the assistant message "
         "after it"),
        ({"messages": [ASK, ANSWER], "videos": ["a.mp4"]}, "the row has a column videos; this kit trains on text and "
            "images only."),
        ({"messages": [ASK, {**ANSWER, "tool_calls": [CALL], "function_call": {"name": "add"}}]}, "the older "
            "function_call"),
        ({"messages": [{**ASK, "tool_calls": [CALL]}, ANSWER]},
            "a message of role user has tool_calls; only assistant"),
        ({"messages": [ASK, ANSWER], "system": "a", "system_prompt": "b"}, "two different system prompts, in system "
            "and"),
        ({"messages": [ASK, ANSWER], "system": ["a"]}, "system is a list, not text; write it as text."),
        ({"messages": [ASK, ANSWER], "tools": [CALL], "functions": [{}]}, "the row has tools and the older functions; "
            "keep"),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, "history is not a list of [question, answer] pairs"),
        ({"prompt": [ASK], "chosen": [ANSWER], "rejected": [ANSWER]},
            "the row is a preference pair (chosen, rejected)"),
        ({"prompt": "a", "completion": "b", "label": False}, "the row has label false, which in KTO's format marks an "
            "answer not to learn"),
        ({"prompt": "a", "completion": "b", "label": "False"}, "the row has label false"),
        ({"messages": [ASK, {**ANSWER, "weight": "0"}]}, "a message has weight '0'; only 0 (or false) and 1 (or true)"),
        ({"messages": [ASK, {**ANSWER, "reasoning_content": ["Hm."]}]}, "a list as reasoning_content, not text; write "
            "it as"),
        ({"conversations": [{"from": "human", "value": "a", "content": "b"}]}, "has value and content, which differ; "
            "keep one"),
        ({"conversations": [{"from": "function_call", "value": "add(2)"}]}, "the value of a function_call turn is "
            "text that"),
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


@pytest.mark.parametrize("key", ["arguments", "parameters", "input", "args", "kwargs"])
@pytest.mark.parametrize("given", [{"a": 2}, '{"a": 2}'])
def test_arguments_are_read_under_every_known_key(key: str, given: Any) -> None:
    flat, nested = {"name": "add", key: given}, {"function": {"name": "add", key: given}}
    beside = {"function": {"name": "add"}, key: given}
    expected = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, ASK, ANSWER]
    for call in (flat, nested, beside, {"type": "function", **nested}):
        called = {"role": "assistant", "content": None, "tool_calls": [call]}
        assert to_example({"messages": [ASK, called, ASK, ANSWER]}).messages == expected
    legacy = {"role": "assistant", "content": None, "function_call": flat}
    assert to_example({"messages": [ASK, legacy, ASK, ANSWER]}).messages == expected
    turns = [{"from": "function_call", "value": json.dumps(flat)}, {"from": "human", "value": "Hi"}]
    made = to_example({"conversations": [ASK, *turns, {"from": "gpt", "value": "Hello."}]})
    assert made.messages == expected


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ({"name": "add", "params": {"a": 2}}, "the call of add has params, but no arguments; rename params to "
            "arguments."),
        ({"function": {"name": "add", "body": '{"a": 2}'}}, "the call of add has body, but no arguments; rename body "
            "to"),
        ({"name": "add", "arguments": {"a": 2}, "input": {"a": 3}}, "has arguments and input, which differ; keep one "
            "of them."),
        ({"name": "add", "arguments": [2, 3]}, "arguments of the call of add is a list, not an object; write"),
        ({"name": "add", "parameters": "a=2"}, "the value of a tool call's parameters is text that is not JSON"),
    ],
)  # fmt: skip
def test_arguments_that_are_not_known_are_refused(call: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(
        {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, ANSWER]}
    )


def test_other_keys_of_calls_and_parts_are_named() -> None:
    call = {"id": "c1", "name": "add", "arguments": {"a": 2}, "status": "done", "cost": 0, "note": None}
    parts = [{"type": "text", "text": "Hi", "cache_control": {"type": "x"}, "train": True}]
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    example = to_example({"messages": [{"role": "user", "content": parts}, called, ASK, ANSWER]})
    assert example.unread == ["cache_control of content parts", "cost of tool calls", "status of tool calls"]
    assert example.messages[1]["tool_calls"] == [{"id": "c1", **CALL}]
    assert to_example({"messages": [ASK, {**called, "tool_calls": [{"name": "add"}]}, ASK, ANSWER]}).unread == []


@pytest.mark.parametrize(
    "key",
    ["weight", "weights", "loss_weight", "train", "training", "trainable", "isTrainable", "loss", "do_train", "learn"],
)
@pytest.mark.parametrize("value", [0, False, 0.0])
def test_every_key_that_says_loss_leaves_a_message_out_of_it(key: str, value: Any) -> None:
    assert to_example({"messages": [ASK, {**ANSWER, key: value}, ASK, {**ANSWER, key: 1}]}) == Example(
        [ASK, ANSWER, ASK, ANSWER], left_out=[1]
    )


@pytest.mark.parametrize("key", ["loss_mask", "mask", "training_detail", "no_loss", "ignore", "ignore_loss"])
@pytest.mark.parametrize("value", [0, True, [{"begin": 0}]])
def test_keys_that_may_mean_the_opposite_or_a_part_are_refused(key: str, value: Any) -> None:
    assert f"a message has {key}, which is not read; only whole" in refusal({"messages": [ASK, {**ANSWER, key: value}]})
    assert to_example({"messages": [ASK, {**ANSWER, key: None}]}).messages[0] == ASK


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"training": 0}, {"mask": 1}])
def test_content_parts_that_are_not_to_be_learned_are_refused(flag: dict[str, Any]) -> None:
    parts = [{"type": "text", "text": "Hm."}, {"type": "text", "text": "Hello.", **flag}]
    assert f"has {next(iter(flag))}" in refusal({"messages": [ASK, {"role": "assistant", "content": parts}]})


def test_content_parts_are_kept_beside_their_text() -> None:
    parts = [{"type": "text", "text": text} for text in ("Hm.", "Hello.")]
    example = to_example({"messages": [ASK, {"role": "assistant", "content": parts}], "system": "Be brief."})
    assert example.messages[-1]["content"] == "Hm.Hello."
    assert example.parts == {"2": ["Hm.", "Hello."]}


@pytest.mark.parametrize("thought", [" Hm.", "Hm.\n"])
def test_reasoning_that_is_given_twice_is_read_once(thought: str) -> None:
    twice = {**ANSWER, "reasoning": thought, "reasoning_content": "Hm."}
    assert to_example({"messages": [ASK, twice]}).messages[1] == {**ANSWER, "reasoning_content": "Hm."}
    block = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHello."}
    assert to_example({"messages": [ASK, {**block, "reasoning_content": thought}]}).messages[1] == block
    other = {**ANSWER, "reasoning": "Oh.", "reasoning_content": "Hm."}
    assert "a message has reasoning_content and reasoning, which differ; keep one" in refusal(
        {"messages": [ASK, other]}
    )


@pytest.mark.parametrize("column", ["label", "kto_tag"])
@pytest.mark.parametrize("value", [False, 0, 0.0, "False", "0"])
def test_answers_that_preference_data_marks_as_bad_are_refused(column: str, value: Any) -> None:
    assert f"the row has {column} " in refusal({"prompt": "a", "completion": "b", column: value})
    assert f"the row has {column} " in refusal({"messages": [ASK, ANSWER], column: value})
    assert to_example({"prompt": "a", "completion": "b", column: 1}).text == "ab"


def test_the_number_of_a_class_beside_text_is_no_preference() -> None:
    assert to_example({"text": "a", "label": 0}).unread == ["label"]


@pytest.mark.parametrize(
    ("instruction", "given", "question"),
    [("", "Hi", "Hi"), ("Hi", "", "Hi"), ("Hi", " ", "Hi"), ("Say", "Hi", "Say\n\nHi"), ("", "", "")],
)
def test_an_empty_instruction_adds_no_blank_lines(instruction: str, given: str, question: str) -> None:
    example = to_example({"instruction": instruction, "input": given, "output": "Hello."})
    assert example.messages == [{"role": "user", "content": question}, ANSWER]
