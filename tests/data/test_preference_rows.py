"""Rows with a chosen and a rejected answer become pairs with the same prompt; other rows are told the right option."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.conftest import DEMO_MODEL
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.data.chat.tokenize import Encoder, encode_row
from unsloth_ddp.data.sources.formats import Example, to_example
from unsloth_ddp.data.sources.preference import converter, to_labelled, to_pair
from unsloth_ddp.utils.errors import UserError

ASK, GOOD, BAD = (
    {"role": role, "content": text} for role, text in (("user", "Q"), ("assistant", "good"), ("assistant", "bad"))
)
PAIR = Example([ASK, GOOD], prompt_messages=1, rejected=Example([ASK, BAD], prompt_messages=1))
SYSTEM = {"role": "system", "content": "S"}


def sharegpt(message: dict[str, str]) -> dict[str, str]:
    """Return a message in ShareGPT's form."""
    return {"from": {"user": "human", "assistant": "gpt"}[message["role"]], "value": message["content"]}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"chosen": [ASK, GOOD], "rejected": [ASK, BAD], "prompt": None},
        {"chosen": '[{"role": "user", "content": "Q"}, {"role": "assistant", "content": "good"}]',
            "rejected": [ASK, BAD]},
        # UltraFeedback's: the question as text, and the chosen conversation once more.
        {"prompt": "Q", "messages": [ASK, GOOD], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": "Q", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASK], "chosen": "good", "rejected": "bad"},
        {"messages": [ASK], "chosen": GOOD, "rejected": BAD},
        {"conversations": [{"from": "human", "value": "Q"}], "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"}},
        {"chosen": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "good"}],
            "rejected": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "bad"}]},
        {"instruction": "Q", "input": "", "chosen": "good", "rejected": "bad"},
        {"question": "Q", "chosen": "good", "rejected": "bad"},
        {"instruction": "Q", "chosen_response": "good", "rejected_response": "bad"},
        {"input": "Q", "chosen": "good", "rejected": "bad"},
        # The prompt is repeated in one answer, or its end is in both.
        {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": "bad"},
        {"prompt": "Q", "chosen": [GOOD], "rejected": [ASK, BAD]},
        {"prompt": [], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
        {"prompt": ASK, "chosen": GOOD, "rejected": BAD},
        # A table of texts: messages, and lists of them, as JSON of either form.
        {"prompt": json.dumps(ASK), "chosen": json.dumps(GOOD), "rejected": json.dumps(BAD)},
        {"chosen": json.dumps([ASK, GOOD]), "rejected": json.dumps([ASK, BAD]), "prompt": "Q"},
        {"conversations": json.dumps([sharegpt(ASK)]), "chosen": json.dumps(sharegpt(GOOD)),
            "rejected": json.dumps(sharegpt(BAD))},
        {"chosen": json.dumps([sharegpt(ASK), sharegpt(GOOD)]), "rejected": json.dumps([sharegpt(ASK), sharegpt(BAD)])},
        {"chosen": json.dumps({"messages": [ASK, GOOD]}), "rejected": json.dumps({"conversations": [sharegpt(ASK),
            sharegpt(BAD)]})},
        {"chosen": {"messages": [ASK, GOOD]}, "rejected": {"messages": [ASK, BAD]}},
        {"conversations": json.dumps([ASK]), "chosen": "good", "rejected": "bad"},
    ],
)  # fmt: skip
def test_every_form_of_a_pair_is_read(row: dict[str, Any]) -> None:
    assert to_pair(row) == PAIR


def test_systems_tools_and_long_conversations_are_read_as_in_other_rows() -> None:
    found = to_pair(
        {"system": "S", "instruction": "Q", "history": [["a", "b"]], "chosen": "good", "rejected": "bad", "x": 1}
    )
    assert [m["content"] for m in found.messages] == ["S", "a", "b", "Q", "good"] and found.prompt_messages == 4
    assert found.unread == ["x"]
    talk = [SYSTEM, ASK, GOOD, ASK]
    found = to_pair({"chosen": [*talk, GOOD], "rejected": [*talk, BAD, ASK, BAD], "tools": [{"type": "function"}]})
    assert found.prompt_messages == 4 and found.rejected is not None and len(found.rejected.messages) == 7
    assert found.tools == found.rejected.tools == [{"type": "function"}]
    found = to_pair({"prompt": talk, "chosen": [ASK, GOOD], "rejected": [ASK, BAD]})
    assert (found.messages, found.prompt_messages) == ([*talk, GOOD], 4)
    whole = {"chosen": [SYSTEM, ASK, GOOD], "rejected": [SYSTEM, ASK, BAD]}
    for name in ("question", "instruction", "prompt"):
        found = to_pair({name: "Q", **whole})
        assert (found.messages, found.unread) == ([SYSTEM, ASK, GOOD], [])
    assert to_pair({"question": "Other", **whole}).unread == ["question"]
    found = to_pair({"prompt": [SYSTEM], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]})
    assert (found.messages, found.prompt_messages) == ([SYSTEM, ASK, GOOD], 2)
    # Nothing but the last message may differ.
    same = to_pair({"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]})
    assert same.prompt_messages == 1 and same.rejected == Example([ASK, GOOD], prompt_messages=1)


TALK = [SYSTEM, {"role": "user", "content": "Q1"}, {"role": "assistant", "content": "A1"}, ASK]


@pytest.mark.parametrize("column", ["prompt", "messages", "conversations"])
@pytest.mark.parametrize(
    ("beside", "repeated"),
    [
        (TALK, TALK[3:]),
        (TALK, TALK),
        (TALK, TALK[2:]),
        (TALK, []),
        # The system message and the last question alone, as some sets write whole chats.
        (TALK, [SYSTEM, ASK]),
        (TALK[3:], TALK),
        (TALK[1:2], TALK),
        ([{"role": "developer", "content": "S"}, *TALK[1:3], {**ASK, "name": None}], TALK),
        ([*TALK[:3], {"role": "user", "content": [{"type": "text", "text": "Q"}]}], [ASK]),
    ],
)
def test_no_message_of_a_prompt_is_lost_or_doubled(column: str, beside: list[Any], repeated: list[Any]) -> None:
    row = {column: beside, "chosen": [*repeated, GOOD], "rejected": [*repeated, BAD]}
    expected = [message["content"] for message in TALK]
    found = to_pair(row)
    assert [message["content"] for message in found.messages] == [*expected, "good"]
    assert found.rejected is not None
    assert [message["content"] for message in found.rejected.messages] == [*expected, "bad"]
    assert found.prompt_messages == found.rejected.prompt_messages == 4 and not found.unread
    labelled = to_labelled({column: beside, "completion": row["chosen"], "label": True})
    assert (labelled.messages, labelled.prompt_messages, labelled.unread) == (found.messages, 4, [])


@pytest.mark.parametrize("repeated", [TALK[:2], TALK[1:2]])
def test_answers_that_leave_out_a_part_of_the_prompt_are_refused(repeated: list[Any]) -> None:
    with pytest.raises(UserError, match="begin with messages of the prompt and leave out others"):
        to_pair({"messages": TALK, "chosen": [*repeated, GOOD], "rejected": [*repeated, BAD]})


def test_the_history_of_a_question_is_kept_beside_conversations() -> None:
    found = to_pair({"instruction": "Q", "history": [["a", "b"]], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]})
    assert [message["content"] for message in found.messages] == ["a", "b", "Q", "good"]


# What may be an answer that is JSON is read as messages only where the row says so.
ANSWER_AS_TEXT = {"chosen": json.dumps(GOOD), "rejected": json.dumps(BAD)}
CHATS_AS_TEXT = {"chosen": json.dumps([ASK, GOOD]), "rejected": json.dumps({"messages": [ASK, BAD]})}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "Q", **ANSWER_AS_TEXT}, "prompt is text and chosen is a list of messages as JSON text; make both "
            "text"),
        ({"instruction": "Q", **ANSWER_AS_TEXT}, "instruction is text and chosen is a list of messages as JSON text"),
        ({"prompt": [ASK], **ANSWER_AS_TEXT}, "prompt is a list of messages and chosen is a list of messages as JSON "
            "text"),
        ({"prompt": "Other", **CHATS_AS_TEXT}, "prompt is text and chosen is a list of messages as JSON text"),
        ({"prompt": "Q", "completion": json.dumps(GOOD)}, "prompt is text and completion is a list of messages as "
            "JSON text"),
        ({"prompt": [ASK], "completion": json.dumps(GOOD)}, "prompt is a list of messages and completion is a list"),
        ({"prompt": json.dumps([ASK]), "completion": "good"}, "completion is text and prompt is a list of messages as "
            "JSON"),
        ({"instruction": "Q", "output": json.dumps([GOOD])}, "instruction is text and output is a list of messages as "
            "JSON"),
        ({"text": json.dumps([ASK, GOOD])}, "text is messages as JSON text; write the list of messages as a column "
            "messages."),
        ({"text": json.dumps({"conversations": [sharegpt(ASK)]})}, "text is messages as JSON text"),
        ({"text": str([{"content": "Q", "role": "user"}])}, "text is a list or object as Python or NumPy prints it"),
        ({"prompt": "Q", "chosen": str({"messages": [ASK, GOOD]}), "rejected": "b"}, "chosen is a list or object as "
            "Python"),
        ({"chosen": json.dumps({"messages": [ASK, GOOD], "id": 1}), "rejected": "b"}, "chosen is an object with "
            "messages and id"),
    ],
)  # fmt: skip
def test_json_text_that_may_be_meant_as_text_is_refused_by_every_task(row: dict[str, Any], said: str) -> None:
    converters = [to_pair] if "chosen" in row else [to_example, to_labelled]
    for convert in converters[: 1 if "text" in row else None]:
        with pytest.raises(UserError) as refused:
            convert({**row, "label": True} if convert is to_labelled else row)
        assert said in str(refused.value)


def test_parts_of_a_row_that_are_not_read_are_told() -> None:
    answers = {"chosen": "good", "rejected": "bad"}
    assert to_pair({"prompt": "Q", "input": "I", "completion": "old", **answers}).unread == ["input", "completion"]
    assert to_pair({"question": "Q", "prompt": "other", **answers}).unread == ["prompt"]
    assert to_labelled({"prompt": "Q", "input": "I", "completion": "good", "label": True}).unread == ["input"]
    # The answers hold these texts too.
    turns = {"chosen": [{"role": "assistant", "content": "good day"}], "rejected": [BAD]}
    assert to_pair({"prompt": [ASK], "input": "good", **turns}).unread == ["input"]
    assert to_labelled({"instruction": "Add", "prompt": "7", "output": "17", "label": True}).unread == ["prompt"]
    repeated = {"prompt": "Q", "messages": [ASK, GOOD], "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    assert to_pair(repeated).unread == []


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_a_history_with_new_ids_in_each_answer_is_one_prompt(arguments: Any) -> None:
    def turns(number: int, answer: Any, given_arguments: Any) -> list[Any]:
        call = {"id": f"c{number}", "type": "function", "function": {"name": "w", "arguments": given_arguments}}
        asked = {"role": "assistant", "id": f"m{number}", "content": "", "tool_calls": [call]}
        return [ASK, asked, {"role": "tool", "tool_call_id": f"c{number}", "content": "r"}, answer]

    pair = to_pair({"chosen": turns(1, GOOD, {"a": 1}), "rejected": turns(2, BAD, arguments)})
    assert pair.rejected is not None and (pair.prompt_messages, pair.rejected.prompt_messages) == (3, 3)


def test_texts_share_their_prompt_up_to_a_whole_word() -> None:
    found = to_pair({"prompt": "Q: ", "chosen": "good", "rejected": "bad"})
    assert (found.text, found.prompt_chars) == ("Q: good", 3)
    begin = "Human: Hi\n\nAssistant:"
    found = to_pair({"chosen": f"{begin} Hello there", "rejected": f"{begin} Hello them"})
    assert found.text is not None and found.text[: found.prompt_chars] == f"{begin} Hello"
    found = to_pair({"chosen": f"{begin} Yes", "rejected": f"{begin} Yes."})
    assert found.text is not None and found.text[: found.prompt_chars] == begin


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"messages": [ASK, GOOD]},
            "the row has one answer; give --task sft, or write pairs, which have chosen and rejected",
        ),
        ({"chosen": [ASK, GOOD]}, "the row has no rejected answer beside the other"),
        (
            {"a": 1},
            "the row (a) is no pair of answers that the kit knows; write the better answer as chosen and the other",
        ),
        ({"chosen": [ASK, GOOD], "rejected": [ASK]}, "the rejected answer: the conversation has no assistant turn"),
        (
            {"prompt": "a", "chosen": "b", "rejected": 5},
            "rejected is a number, and an answer is text, a message or a list of messages",
        ),
        ({"chosen": 3}, "chosen is a number, and an answer is text"),
        ({"chosen_response": 3}, "chosen_response is a number, and an answer is text"),
        ({"question": ["Q"], "chosen": "a", "rejected": "b"}, "question is a list, not text"),
        ({"input": 3, "chosen": "a", "rejected": "b"}, "input is a number, not text"),
        (
            {"query": "Q", "chosen": "The good", "rejected": "The bad"},
            "the row has no prompt, but a column query, which is not read; give --columns query=prompt",
        ),
        (
            {"prompt": "", "chosen": "good", "rejected": "bad"},
            "the row has no prompt, and chosen and rejected do not begin",
        ),
        ({"prompt": "", "chosen": [GOOD], "rejected": [BAD]}, "the row has answers and no prompt"),
        (
            {"chosen": [ASK, GOOD], "rejected": [{**ASK, "content": "R"}, BAD]},
            "chosen goes on with a user message where",
        ),
        (
            {"messages": [ASK, GOOD], "chosen": "good", "rejected": "bad"},
            "the prompt ends with an assistant message, and",
        ),
        (
            {"chosen": str([ASK, GOOD]), "rejected": str([ASK, BAD])},
            "chosen is a list or object as Python or NumPy prints it",
        ),
        ({"prompt": "Q", "chosen": str(GOOD), "rejected": str(BAD)}, "chosen is a list or object as Python or NumPy"),
        ([1], "the row is a list"),
    ],
)
def test_other_rows_are_told_what_fits(row: Any, said: str) -> None:
    with pytest.raises(UserError) as refused:
        to_pair(row)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "row", [{"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, {"messages": [ASK, GOOD], "chosen": [], "rejected": []}]
)
def test_pairs_are_not_trained_as_text(row: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="the row is a preference pair"):
        to_example(row)


def test_both_answers_are_supervised_as_in_other_rows_and_cut_after_the_same_prompt() -> None:
    encoder = Encoder(AutoTokenizer.from_pretrained(DEMO_MODEL), supervise_all=False)
    row = {"prompt": [ASK], "chosen": [GOOD], "rejected": [{"role": "assistant", "content": "bad " * 9}]}
    pair = encode_row(encoder, to_pair(row), 64)
    halves = [encode_row(encoder, to_example({"messages": [ASK, row[name][0]]}), 64) for name in ("chosen", "rejected")]
    assert pair.parts == [len(half.input_ids) for half in halves]
    assert (
        pair.input_ids == halves[0].input_ids + halves[1].input_ids
        and pair.labels == halves[0].labels + halves[1].labels
    )
    prompt = halves[0].labels.count(IGNORED)
    cut = encode_row(encoder, to_pair(row), prompt + 2)
    assert cut.overlong and cut.parts[1] == prompt + 2
    first, second = cut.input_ids[: cut.parts[0]], cut.input_ids[cut.parts[0] :]
    assert first[:prompt] == second[:prompt]
    # Without room for an answer there is nothing to compare.
    assert set(encode_row(encoder, to_pair(row), prompt).labels) == {IGNORED}
    same = to_pair({**row, "rejected": [GOOD]})
    assert encode_row(encoder, same, 64).notes == ("identical",)
    assert encode_row(encoder, same, prompt + 1).notes == ()
    empty = [{**BAD, "content": " "}]
    assert encode_row(encoder, to_pair({**row, "rejected": empty}), 64).notes == ("empty",)
    labelled = to_labelled({"prompt": row["prompt"], "completion": empty, "label": False})
    assert encode_row(encoder, labelled, 64).notes == ("empty",)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "--task sft --beta 0.2",
            "beta 0.2 is for --task dpo, orpo, simpo, cpo or kto, and task is sft; leave it out.",
        ),
        ("--task orpo --reference precomputed", "reference precomputed is for --task dpo or kto"),
        (
            "--task dpo --preference_loss ipo --label_smoothing 0.1",
            "label_smoothing 0.1 has no effect on preference_loss ipo",
        ),
        ("--task dpo --cuda_graphs on", "cuda_graphs on does not work with task dpo: a captured step sums the losses"),
        ("--task dpo --method full --reference adapter_off", "reference adapter_off does not work with task dpo"),
        (
            "--task dpo --method full --streaming --max_steps 3",
            "method full with streaming does not work with task dpo: its reference",
        ),
        ("--task simpo --reference_model other", "reference_model other is for --task dpo or kto"),
        (
            "--task dpo --reference_model other --reference adapter_off",
            "reference adapter_off with reference_model other does",
        ),
        ("--task kto --reference_model_revision main", "reference_model_revision main names no model"),
        (
            "--task orpo --backend unsloth",
            "backend unsloth does not work with task orpo: its fused loss returns no log-probabilities; give --backend",
        ),
        ("--task dpo --loss_on all", "loss_on all does not work with task dpo"),
        ("--task dpo --desirable_weight 2", "desirable_weight 2.0 is for --task kto"),
        ("--task kto --preference_loss ipo", "preference_loss ipo is for --task dpo or cpo"),
        (
            "--task kto --desirable_weight 0 --undesirable_weight 0",
            "desirable_weight and undesirable_weight are both 0",
        ),
        ("--task grpo", "grpo"),
    ],
)
def test_options_that_do_not_fit_the_task_are_refused(options: str, said: str) -> None:
    with pytest.raises((UserError, SystemExit)) as refused:
        parse_settings(f"--model m --dataset rows.jsonl {options}".split())
    assert isinstance(refused.value, SystemExit) or said in str(refused.value)


LABELLED = Example([ASK, BAD], prompt_messages=1, desirable=False)
SHAREGPT = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "bad"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [ASK], "completion": [BAD], "label": False},
        {"prompt": "Q", "completion": [BAD], "label": "False"},
        {"prompt": [ASK], "completion": "bad", "label": 0},
        {"prompt": [ASK], "completion": [ASK, BAD], "label": 0},
        {"input": "Q", "output": "bad", "label": 0},
        {"completion": [ASK, BAD], "label": 0.0},
        {"messages": [ASK, BAD], "label": "undesirable"},
        {"conversations": SHAREGPT, "kto_tag": False},
        {"conversations": SHAREGPT[:1], "output": "bad", "kto_tag": False},
        {"instruction": "Q", "input": "", "output": "bad", "kto_tag": "false"},
        {"question": "Q", "completion": "bad", "label": False},
        {"prompt": [ASK], "completion": "bad", "output": "", "response": "bad", "label": False},
        {"prompt": '[{"role": "user", "content": "Q"}]', "completion": '[{"role": "assistant", "content": "bad"}]',
            "label": False},
    ],
)  # fmt: skip
def test_every_form_of_a_labelled_answer_is_read(row: dict[str, Any]) -> None:
    name = "label" if "label" in row else "kto_tag"
    assert to_labelled(row) == LABELLED and to_labelled(row).unread == []
    assert to_labelled({**row, name: True}).desirable is True
    with pytest.raises(UserError):
        to_example(row)


def test_the_label_is_about_the_last_answer() -> None:
    talk = [SYSTEM, ASK, GOOD, ASK, BAD]
    for row in ({"messages": talk}, {"completion": talk}, {"prompt": talk[:-1], "completion": talk[-1:]}):
        found = to_labelled({**row, "label": True, "extra": 1})
        assert (found.prompt_messages, found.messages, found.unread) == (4, talk, ["extra"])
    found = to_labelled({"prompt": "Q: ", "completion": "good", "label": True})
    assert (found.text, found.prompt_chars, found.desirable) == ("Q: good", 3, True)
    found = to_labelled({"instruction": "Q", "history": [["a", "b"]], "system": "S", "output": "good", "label": 1})
    assert [m["content"] for m in found.messages] == ["S", "a", "b", "Q", "good"] and found.prompt_messages == 4


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "the row is a preference pair (chosen, rejected); give "
            "--task dpo"),
        ({"messages": [ASK, GOOD]}, "the row has no label, which --task kto learns from"),
        ({"messages": [ASK, GOOD], "label": None}, "the row has no label"),
        ({"messages": [ASK, GOOD], "label": True, "kto_tag": 0}, "the row has label and kto_tag, which disagree"),
        ({"messages": [ASK, GOOD], "label": 3}, "label is '3', and a label is true (desirable) or false (undesirable)"),
        ({"messages": [ASK], "label": True}, "the conversation has no assistant turn that the label could be about"),
        ({"completion": "good", "label": True}, "the row has an answer and no prompt"),
        ({"prompt": "", "completion": "good", "label": True}, "the row has an answer and no prompt"),
        ({"messages": [GOOD], "label": True}, "the conversation begins with the answer, without a prompt"),
        ({"prompt": [ASK], "label": True}, "the row has a label and no answer"),
        ({"question": "Q", "answer": "a", "label": True}, "instruction and output; give --columns "
            "question=instruction answer=output."),
        ({"question": ["Q"], "output": "a", "label": True}, "question is a list, not text"),
        ({"prompt": [ASK], "completion": 3, "label": True}, "completion is a number, and an answer is text, a message "
            "or a list"),
        ({"prompt": "Q", "response": "one", "completion": "two", "label": True}, "the row has an answer in completion "
            "and in response, and its label is about one"),
        ({"messages": [ASK, BAD], "output": "two", "label": True}, "the row has an answer in output and in messages"),
        ([1], "the row is a list"),
    ],
)  # fmt: skip
def test_other_rows_are_told_what_kto_needs(row: Any, said: str) -> None:
    with pytest.raises(UserError) as refused:
        to_labelled(row)
    assert said in str(refused.value)


def test_labelled_rows_are_neither_pairs_nor_text() -> None:
    row = {"prompt": [ASK], "completion": [BAD], "label": False}
    for convert in (to_pair, to_example):
        with pytest.raises(UserError, match="--task kto"):
            convert(row)
    assert [converter(task) for task in ("kto", "orpo", "sft")] == [to_labelled, to_pair, to_example]
