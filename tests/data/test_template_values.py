"""Test what rows and options give to the chat template, and what templates do with reasoning and spaces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trl
from transformers import AutoTokenizer

from unsloth_ddp.config.parse import DEMO_MODEL
from unsloth_ddp.data.chat.template import variables_of
from unsloth_ddp.data.chat.tokenize import Encoder
from unsloth_ddp.data.sources.formats import Example, to_example
from unsloth_ddp.data.sources.preference import to_pair
from unsloth_ddp.data.template_values import TemplateColumns
from unsloth_ddp.utils.errors import UserError

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def tokenizer_of(template: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    return tokenizer


def taken(row: dict[str, Any], template: str = "qwen3", convert: Any = to_example, **of_run: Any) -> Example:
    example = convert(row)
    TemplateColumns(of_run, variables_of(tokenizer_of(template).chat_template)).take(example, row)
    return example


@pytest.mark.parametrize(
    ("row", "of_run", "values", "unread"),
    [
        ({"enable_thinking": False, "source": "x"}, {}, {"enable_thinking": False}, ["source"]),
        ({"chat_template_kwargs": '{"enable_thinking": true, "a": null}'}, {"enable_thinking": False},
            {"enable_thinking": True}, []),
        ({}, {"enable_thinking": False}, {"enable_thinking": False}, []),
        # A word of CSV or JSON text would be true for a template, whichever it is.
        ({"enable_thinking": "False"}, {}, {"enable_thinking": False}, []),
        ({"chat_template_kwargs": {"enable_thinking": "true"}}, {}, {"enable_thinking": True}, []),
        # Reasoning, and no switch.
        ({"enable_thinking": "first I add"}, {}, {}, ["enable_thinking"]),
    ],
)  # fmt: skip
def test_values_come_from_columns_and_the_option(
    row: dict[str, Any], of_run: dict[str, Any], values: dict[str, Any], unread: list[str]
) -> None:
    example = taken({"messages": CHAT, **row}, **of_run)
    assert (example.template_values, example.unread) == (values, unread)
    assert Example.from_json(example.to_json()).template_values == values


def test_rows_are_rendered_with_their_values() -> None:
    tokenizer = tokenizer_of("gptoss")
    encoder = Encoder(tokenizer, supervise_all=False)
    low, high = (
        encoder.encode(taken({"messages": CHAT, "reasoning_effort": effort}, "gptoss")) for effort in ("low", "high")
    )
    assert "Reasoning: low" in tokenizer.decode(low.input_ids)
    assert "Reasoning: high" in tokenizer.decode(high.input_ids)
    other = encoder.encode(taken({"messages": CHAT, "chat_template_kwargs": {"reasoning_efort": "low"}}, "gptoss"))
    assert "Reasoning: medium" in tokenizer.decode(other.input_ids)
    assert other.unread_keys == ("chat_template_kwargs.reasoning_efort",)


def test_both_answers_of_a_pair_have_the_values() -> None:
    row = {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "no"}], "enable_thinking": False}
    pair = taken(row, convert=to_pair)
    assert pair.rejected is not None and pair.template_values == pair.rejected.template_values != {}


def test_values_of_the_row_itself_are_refused() -> None:
    with pytest.raises(UserError, match=r"chat_template_kwargs has tools, .* give tools as a column"):
        taken({"messages": CHAT, "chat_template_kwargs": {"tools": []}})
    with pytest.raises(UserError, match="chat_template_kwargs is a list, not an object"):
        taken({"messages": CHAT, "chat_template_kwargs": "[1]"})
    with pytest.raises(UserError, match="chat_template_kwargs has messages"):
        TemplateColumns({"messages": 1})


@pytest.mark.parametrize(
    ("template", "written"),
    [
        ("llama3", "<think>\nbecause\n</think>\n\nno<|eot_id|>"),
        ("gptoss", "<|channel|>analysis<|message|>because<|end|>"),
        ("lfm2_2_5", "because"),
    ],
)
def test_reasoning_that_a_template_leaves_out_is_written_in_its_form(template: str, written: str) -> None:
    tokenizer = tokenizer_of(template)
    chat = [CHAT[0], {"role": "assistant", "content": "no", "reasoning_content": "because"}]
    with pytest.raises(
        UserError, match=r"leaves out the reasoning_content of the answer; (give --reasoning_in_content|rename)"
    ):
        Encoder(tokenizer, supervise_all=False).encode(to_example({"messages": chat}))
    row = Encoder(tokenizer, supervise_all=False, reasoning_in_content=True).encode(to_example({"messages": chat}))
    assert written in tokenizer.decode([label for label in row.labels if label >= 0])


def test_text_that_gemma_writes_behind_the_answer_of_a_tool_is_refused_with_what_helps() -> None:
    call = {"type": "function", "function": {"name": "a", "arguments": {"x": 1}}}
    turns = [{"role": "tool", "content": "5", "name": "a"}, {"role": "assistant", "content": "no"}]
    tool = {"type": "function", "function": {"name": "a", "description": "d", "parameters": {"type": "object"}}}
    encoder = Encoder(tokenizer := tokenizer_of("gemma4_v4"), supervise_all=False)

    def row(**message: Any) -> Example:
        asked = {"role": "assistant", "tool_calls": [call], **message}
        return to_example({"messages": [CHAT[0], asked, *turns], "tools": [tool]})

    with pytest.raises(
        UserError, match="text of message 2, which calls tools, behind the answer of the tool; write the text into"
    ):
        encoder.encode(row(content="I look."))
    helped = encoder.encode(row(content="", reasoning_content="I look."))
    assert "I look.\n<channel|><|tool_call>" in tokenizer.decode([label for label in helped.labels if label >= 0])


def test_a_template_that_the_sandbox_refuses_is_said_to_be_one() -> None:
    tokenizer = tokenizer_of("llama3")
    tokenizer.chat_template = "{% set _ = messages.append(1) %}{{ messages[0].content }}"
    with pytest.raises(UserError, match=r"does what Jinja's sandbox refuses, .*'append' of 'list' object is unsafe"):
        Encoder(tokenizer, supervise_all=False).encode(to_example({"messages": CHAT}))


@pytest.mark.parametrize(
    ("template", "answer", "notes"),
    [
        ("llama3", "    return x", ("unindented",)),
        ("llama3", "\n\nx", ()),
        ("llama3", "def f():\n    return", ()),
        ("qwen3", "    return x", ()),
        ("glm4moe", "<think>a</think>\n\n    return x", ("unindented",)),
    ],
)
def test_answers_whose_spaces_are_taken_off_are_counted(template: str, answer: str, notes: tuple[str, ...]) -> None:
    chat = [CHAT[0], {"role": "assistant", "content": answer}]
    row = Encoder(tokenizer_of(template), supervise_all=False).encode(to_example({"messages": chat}))
    assert tuple(note for note in row.notes if note == "unindented") == notes
