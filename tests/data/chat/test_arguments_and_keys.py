"""Arguments of calls, keys of messages and tools, and content parts of rows under real chat templates."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from tests.data.chat.test_rows_arrive import (
    KINDS,
    NAMES,
    TOOLS,
    answer_of_tool,
    ask,
    call,
    encoder_of,
    encoder_of_trl,
    result,
    say,
    template,
    words_of,
)
from tests.data.test_tokenize import core, from_trl
from unsloth_ddp.data.chat.tokenize import EncodedRow

__all__ = ["core"]


def test_texts_of_a_tool_that_the_template_leaves_out_are_told(core: Tokenizer) -> None:
    encoder = encoder_of(core, from_trl("gemma4"))
    function = {**TOOLS[1]["function"], "return": {"type": "string", "description": "The sum."}}
    for tool, unread in ((TOOLS[0], ()), ({"type": "function", "function": function}, ("description of tools",))):
        found = result(encoder, {**KINDS["plain"], "tools": [tool]})
        assert isinstance(found, EncodedRow), found
        assert found.unread_keys == unread


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_training")])
def test_arguments_are_json_or_it_is_told(core: Tokenizer, name: str) -> None:
    encoder = encoder_of_trl(core, name)
    arguments = {"a": None, "b": True, "c": ["x", False], "d": {"e": None}, "f": "it's None", "g": 1.5}
    turns = [ask("q1"), say("", tool_calls=[call(1, arguments)]), answer_of_tool(1, "5"), say("Five.")]
    encoded = result(encoder, {"messages": turns})
    if isinstance(encoded, str):
        return
    text = encoder.tokenizer.decode(encoded.input_ids).replace("it's None", "")
    by_python = "True" in text or "None" in text or "['" in text
    assert by_python == ("python" in encoded.notes)
    assert "python" not in encoded.notes or name.startswith("lfm2"), name


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_5_think", "glm4moe", "gemma4_v5"])
def test_a_text_argument_stays_text_where_others_are_written_as_json(core: Tokenizer, name: str) -> None:
    encoder = encoder_of_trl(core, name)
    for value in ("5", 5):
        calling = say("", tool_calls=[call(1, {"a": value, "b": None})])
        turns = [ask("q1"), calling, answer_of_tool(1, "5"), say("Five.")]
        encoded = result(encoder, {"messages": turns})
        assert isinstance(encoded, EncodedRow)
        text = encoder.tokenizer.decode(encoded.input_ids)
        assert "null" in text
        assert ('"a": "5"' in text) == (name == "qwen2_5" and value == "5")


def test_values_are_not_written_as_text_where_the_template_quotes_text(core: Tokenizer) -> None:
    quoting = (
        "{{ m['content'] }}{% for c in m.tool_calls or [] %}{{ c.function.name }}({% for k, v in c.function.arguments "
        "| items %}{{ k }}={% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}{% endfor %}){% endfor %}"
    )
    encoder = encoder_of(core, template(quoting))
    turns = [ask("q1"), say("", tool_calls=[call(1, {"a": True})]), answer_of_tool(1, "5"), say("Five.")]
    encoded = result(encoder, {"messages": turns})
    assert isinstance(encoded, EncodedRow) and encoded.notes == ("python",)
    assert "wcall1name(a=True)" in encoder.tokenizer.decode(encoded.input_ids)


def test_only_reasoning_may_be_left_out_of_an_earlier_turn(core: Tokenizer) -> None:
    earlier = KINDS["text before a block"]["messages"]
    found = result(encoder_of(core, from_trl("qwen3")), {"messages": [*earlier, ask("q2"), say(words_of("a2"))]})
    assert isinstance(found, str)
    assert "leaves out 'wi1start is at wi1middle of this wi1end' in message 2 of the row" in found


def test_the_name_of_a_tool_in_its_answer_is_not_called_unread(core: Tokenizer) -> None:
    encoder = encoder_of(core, from_trl("qwen2_5"))
    found = result(encoder, KINDS["call"])
    assert isinstance(found, EncodedRow) and found.unread_keys == ()
    turns = [{**ask("q1"), "name": "Ann", "trust": 0, "extra": []}, say("Yes.")]
    found = result(encoder, {"messages": turns})
    assert isinstance(found, EncodedRow) and found.unread_keys == ("name", "trust")


def test_content_parts_are_joined_as_the_template_joins_them(core: Tokenizer) -> None:
    spaced = (
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}{{ part['text'] | "
        "trim }}{% if not loop.last %}{{ ' + ' }}{% endif %}{% endfor %}{% endif %}"
    )
    content_parts = [{"type": "text", "text": text} for text in (" A", "B ")]
    row = {"messages": [{"role": "user", "content": content_parts}, say("C")]}
    for content, expected in (("{{ m['content'] }}", "user\n A\nB <|im_end|>"), (spaced, "user\nA + B<|im_end|>")):
        encoder = encoder_of(core, template(content))
        found = result(encoder, row)
        assert isinstance(found, EncodedRow)
        assert expected in encoder.tokenizer.decode(found.input_ids)
