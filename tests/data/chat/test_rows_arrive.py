"""Rows of every kind under every chat template that TRL ships, and under templates that lose or move parts of them.

Each text has words of its own at its start, in its middle and at its end. The decoded tokens have to hold every word
once, or the row is refused, or it is told that an earlier turn lost its reasoning and is not supervised.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections import Counter
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.data.test_tokenize import TRL_TEMPLATES, core, from_trl, make_tokenizer, supervised
from unsloth_ddp.data.chat.tokenize import EncodedRow, Encoder
from unsloth_ddp.data.sources.formats import to_example
from unsloth_ddp.utils.errors import UserError

__all__ = ["core"]

NAMES = sorted(path.stem for path in TRL_TEMPLATES.glob("*.jinja"))
# They take nothing but lists of content parts.
LISTS_ONLY = {"idefics3", "llava_next", "smolvlm"}
MARKS = "<|im_start|> <|im_end|> <|eot_id|> <|start|> <|end|> <|return|> <|call|> <|channel|> <|message|>"
# Some templates put one text directly behind another.
WORD = re.compile(r"w[a-z]\d(?:start|middle|end)|w(?:call|tool)\dname|w(?:key|schema|v|t|a)\d[a-z]")


def words_of(name: str) -> str:
    return f"w{name}start is at w{name}middle of\n  this w{name}end"


def ask(name: str) -> dict[str, Any]:
    return {"role": "user", "content": words_of(name)}


def say(content: str, **keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **keys}


def call(number: int, arguments: Any) -> dict[str, Any]:
    function = {"name": f"wcall{number}name", "arguments": arguments}
    return {"type": "function", "id": f"abcdefgh{number}", "function": function}


def answer_of_tool(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "name": f"wcall{number}name", "tool_call_id": f"abcdefgh{number}", "content": content}


SYSTEM = {"role": "system", "content": words_of("s1")}
ANSWER = words_of("a1")
TOOLS = [
    {"type": "function", "function": {"name": f"wtool{number}name", "description": "Add.", "parameters": parameters}}
    for number, parameters in enumerate(
        [
            {"type": "object", "properties": {"wschema0a": {"type": "string", "enum": ["x", "y"]}}, "required": []},
            {"type": "object", "properties": {}},
        ]
    )
]
THINK = f"<think>\n{words_of('r1')}\n</think>\n\n"
CALLED = {"wkey1a": words_of("v1"), "wkey2b": {"wkey3c": ["wv2a", 2.5]}, "wkey4d": 17}
WITH_TOOLS = {"tools": TOOLS}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [ask("q1"), say(ANSWER)]},
    "system": {"messages": [SYSTEM, ask("q1"), say(ANSWER)]},
    "turns": {"messages": [ask("q1"), say(ANSWER), ask("q2"), say(words_of("a2"))]},
    "space": {"messages": [{"role": "user", "content": f"\n {words_of('q1')} \n"}, say(f"\n\n  {ANSWER}\n")]},
    "words of the scaffold": {"messages": [{"role": "user", "content": "user"}, say("assistant")]},
    "reasoning": {"messages": [ask("q1"), say(ANSWER, reasoning_content=words_of("r1"))]},
    "blank reasoning": {"messages": [ask("q1"), say(ANSWER, reasoning_content="\n")]},
    "thinking": {"messages": [ask("q1"), say(ANSWER, thinking=words_of("r1"))]},
    "block": {"messages": [ask("q1"), say(THINK + ANSWER)]},
    "empty block": {"messages": [ask("q1"), say("<think>\n\n</think>\n\n" + ANSWER)]},
    "blocks in turns": {
        "messages": [
            ask("q1"),
            say(THINK + ANSWER),
            ask("q2"),
            say(f"<think>{words_of('r2')}</think>{words_of('a2')}"),
        ]
    },
    "text before a block": {"messages": [ask("q1"), say(f"{words_of('i1')}\n{THINK}{ANSWER}")]},
    "two blocks": {
        "messages": [ask("q1"), say(f"{THINK}{ANSWER} <think>{words_of('r2')}</think> {words_of('a2')}")]
    },
    "block begun": {"messages": [ask("q1"), say(f"{words_of('i1')} <think> {ANSWER}")]},
    "block ended": {"messages": [ask("q1"), say(f"{words_of('i1')} </think> {ANSWER}")]},
    "block and reasoning": {"messages": [ask("q1"), say(THINK + ANSWER, reasoning_content=words_of("r2"))]},
    "Gemma's block": {"messages": [ask("q1"), say(f"<|channel>thought\n{words_of('r1')}<channel|>{ANSWER}")]},
    "Mistral's block": {"messages": [ask("q1"), say(f"[THINK]{words_of('r1')}[/THINK]{ANSWER}")]},
    "call": {
        "messages": [
            ask("q1"),
            say("", tool_calls=[call(1, CALLED)]),
            answer_of_tool(1, f'{{"x": "{words_of("t1")}"}}\n'),
            say(ANSWER),
        ],
        **WITH_TOOLS,
    },
    "call without arguments": {
        "messages": [ask("q1"), say("", tool_calls=[call(1, {})]), answer_of_tool(1, "wt1a"), say(ANSWER)],
        **WITH_TOOLS,
    },
    "call with blank text": {
        "messages": [ask("q1"), say(" \n", tool_calls=[call(1, CALLED)]), answer_of_tool(1, "wt1a"), say(ANSWER)],
    },
    "call with text": {
        "messages": [
            ask("q1"),
            say(words_of("c1"), tool_calls=[call(1, CALLED)]),
            answer_of_tool(1, "wt1a"),
            say(ANSWER),
        ],
    },
    "call with reasoning": {
        "messages": [
            ask("q1"),
            say("", reasoning_content=words_of("r1"), tool_calls=[call(1, CALLED)]),
            answer_of_tool(1, "wt1a"),
            say(ANSWER, reasoning_content=words_of("r2")),
        ],
    },
    "two calls": {
        "messages": [
            ask("q1"),
            say("", tool_calls=[call(1, CALLED), call(2, {"wkey5e": "wv5a"})]),
            answer_of_tool(1, "wt1a"),
            answer_of_tool(2, "wt2a"),
            say(ANSWER),
        ],
    },
    "call at the end": {"messages": [ask("q1"), say("", tool_calls=[call(1, CALLED)])], **WITH_TOOLS},
    "two answers": {"messages": [ask("q1"), say(ANSWER), say(words_of("a2"))]},
    "answer left out": {"messages": [ask("q1"), say(ANSWER, weight=0), ask("q2"), say(words_of("a2"))]},
    "directive": {"messages": [{"role": "system", "content": f"{words_of('s1')} /no_think"}, ask("q1"), say(ANSWER)]},
    "content parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": words_of(f"p{number}")} for number in range(2)]},
            say(ANSWER),
        ]
    },
}  # fmt: skip


def encoder_of(core: Tokenizer, template: str, **options: Any) -> Encoder:
    return Encoder(make_tokenizer(core, template, "<eos>", MARKS), **({"supervise_all": False} | options))


@functools.cache
def encoder_of_trl(core: Tokenizer, name: str) -> Encoder:
    """Return an encoder that the tests of a template share: rows change nothing of it, as one of the tests checks."""
    return encoder_of(core, from_trl(name))


def result(encoder: Encoder, row: dict[str, Any]) -> EncodedRow | str:
    try:
        return encoder.encode(to_example(json.loads(json.dumps(row))))
    except UserError as error:
        return str(error)


def told_words(value: Any) -> list[str]:
    """Return the words of a row's messages, and the names of its tools."""
    if isinstance(value, dict):
        if "parameters" in value:
            return [value["name"]]
        return [word for key, item in value.items() if key != "name" or "arguments" in value for word
            in (*WORD.findall(key), *told_words(item))]  # fmt: skip
    if isinstance(value, list):
        return [word for item in value for word in told_words(item)]
    return WORD.findall(value) if isinstance(value, str) else []


def check_arrived(encoder: Encoder, row: dict[str, Any], encoded: EncodedRow) -> None:
    """Check that every word of a row stands once in its tokens, and that only the assistant's are supervised."""
    decode = encoder.tokenizer.decode
    text, learned = decode(encoded.input_ids), decode([label for label in encoded.labels if label >= 0])
    printed, supervised = Counter(WORD.findall(text)), set(WORD.findall(learned))
    turns = [message for message in row["messages"] if message["role"] == "assistant"]
    by_assistant = {word for turn in turns for word in told_words(turn)}
    assert not {word for word in supervised if word not in by_assistant and "name" not in word}
    names = {word for word in printed if "name" in word}
    for number, message in enumerate([*row["messages"], {"tools": row.get("tools", [])}]):
        expected = Counter(told_words(message))
        lost = {word for word in expected if not printed[word]}
        if lost:
            # Only earlier turns may lose something, and then they are not supervised.
            assert {"reasoning", "text"} & set(encoded.notes), lost
            assert message["role"] == "assistant", lost
            assert message is not turns[-1], lost
            assert not supervised & set(expected), (number, lost)
            continue
        assert all(printed[word] == 1 for word in expected if word not in names), message
        if message in turns and not message.get("weight", 1):
            assert not supervised & set(expected)
        elif message in turns:
            assert set(expected) <= supervised


def results(encoder: Encoder) -> dict[str, EncodedRow | str]:
    return {kind: result(encoder, row) for kind, row in KINDS.items()}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_a_row_is_lost(core: Tokenizer, name: str) -> None:
    encoder = encoder_of_trl(core, name)
    found = results(encoder)
    for kind, encoded in found.items():
        if isinstance(encoded, EncodedRow):
            check_arrived(encoder, KINDS[kind], encoded)
    if name.removesuffix("_training") not in LISTS_ONLY:
        assert all(isinstance(found[kind], EncodedRow) for kind in ("plain", "turns", "space", "words of the scaffold"))


# Two of the templates by default, and all of them in CI.
@pytest.mark.parametrize(
    "name", [n if n in ("qwen3", "gptoss") else pytest.param(n, marks=pytest.mark.slow) for n in NAMES]
)
def test_a_row_is_encoded_alike_whatever_row_came_before_it(core: Tokenizer, name: str) -> None:
    rows, first = list(KINDS.items()), results(encoder_of(core, from_trl(name)))
    encoder = encoder_of(core, from_trl(name))
    random.Random(name).shuffle(rows)
    for kind, row in rows:
        assert result(encoder, row) == first[kind], kind


OUTCOMES = {
    "qwen3": {
        "reasoning": (), "blank reasoning": (), "thinking": "leaves out the thinking of the answer; rename it to "
            "reasoning_content",
        "block": (), "blocks in turns": ("reasoning", "own"), "text before a block": "leaves out 'wi1start is at "
            "wi1middle of this",
        "call": ("own",), "two calls": ("own",), "call with text": ("own",), "Gemma's block": (),
    },
    "qwen2_5": {
        "reasoning": "leaves out the reasoning_content of the answer; give --reasoning_in_content", "block": (), "two "
            "blocks": (), "call": (),
        "text before a block": (), "block and reasoning": "leaves out the reasoning_content of the answer, which has "
            "reasoning twice",
    },
    "llama3_1": {"call": (), "call with text": ("text",), "two calls": "only supports single tool-calls", "block": ()},
    "gemma4_v5": {
        "Gemma's block": "leaves out the reasoning in the answer ('thought wr1start is at wr1middle of this",
            "block": (), "call": (),
    },
    "deepseek_r1_distill": {
        "plain": ("unprompted",), "block": ("training",), "reasoning": "leaves out the reasoning_content of the "
            "answer; give",
    },
    "gptoss": {"thinking": (), "call": (), "two calls": "leaves out tool call 2 of the 2"},
    "qwen3_5_think": {"call": (), "two calls": (), "reasoning": (), "block": ()},
}  # fmt: skip


@pytest.mark.parametrize("name", OUTCOMES)
def test_what_is_trained_told_and_refused(core: Tokenizer, name: str) -> None:
    encoder = encoder_of_trl(core, name)
    for kind, expected in OUTCOMES[name].items():
        found = result(encoder, KINDS[kind])
        if isinstance(expected, str):
            assert isinstance(found, str) and expected in found, kind
        else:
            assert isinstance(found, EncodedRow) and found.notes == expected, (kind, found)


# ---- templates that lose, move and repeat ----

TURN = "<|im_start|>{{ m['role'] }}\n%s<|im_end|>\n"
LOOP = "{%% for m in messages %%}%s{%% endfor %%}{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"


def template(content: str, turn: str = TURN) -> str:
    return LOOP % (turn % content)


LOSING = {
    "the begin": "{{ m['content'][5:] }}",
    "the end": "{{ m['content'][:-5] }}",
    "the middle": "{{ m['content'][:8] + m['content'][-8:] }}",
    "what is long": "{{ m['content'] | truncate(30, true) }}",
    "all but the first line": "{{ m['content'].split('\n')[0] }}",
    "all but the last block": "{{ m['content'].split('[/SCRATCH]')[-1] }}",
    "a question that was asked": (
        "{% if loop.first or loop.index < 3 or m['content'] != messages[0]['content'] %}{{ m['content'] }}{% endif %}"
    ),
    "case": "{{ m['content'] | lower }}",
    "a question named user": "{% if m['content'] != 'user' %}{{ m['content'] }}{% endif %}",
}
LOST = {
    "all but the last block": say(f"{words_of('r1')}[/SCRATCH]{ANSWER}"),
    "case": say("Berlin"),
}


@pytest.mark.parametrize("loses", LOSING)
def test_a_template_that_loses_a_part_is_refused(core: Tokenizer, loses: str) -> None:
    answer = LOST.get(loses, say(ANSWER))
    question = {"role": "user", "content": "user"} if loses == "a question named user" else ask("q1")
    row = {"messages": [question, say("Yes."), question, answer]}
    for before in ([], [KINDS["plain"], {"messages": [ask("q3"), say("ok"), ask("q4"), say("ok")]}]):
        encoder = encoder_of(core, template(LOSING[loses]))
        for other in before:
            result(encoder, other)
        found = result(encoder, row)
        assert isinstance(found, str) and "leaves out" in found


def test_a_template_that_repeats_a_text_is_refused(core: Tokenizer) -> None:
    found = result(encoder_of(core, template("{{ m['content'] ~ '\n' ~ m['content'] }}")), KINDS["plain"])
    assert isinstance(found, str)
    assert "renders the content of message 1 more than once ('wq1start is at wq1middle of this wq1end')" in found


MOVING = {
    "white space": template("{{ m['content'] | trim }}"),
    "JSON": template("{{ m['content'] | tojson }}"),
    "JSON without other letters": template("{{ m['content'] | tojson(ensure_ascii=true) }}"),
    "a directive": template("{{ m['content'].replace('/no_think', '') | trim }}"),
    "reasoning behind the answer": template(
        "{{ m['content'] }}{% if m.thinking %}<because>{{ m.thinking }}{% endif %}"
    ),
}


@pytest.mark.parametrize("moves", MOVING)
def test_a_template_that_moves_a_part_loses_nothing(core: Tokenizer, moves: str) -> None:
    encoder = encoder_of(core, MOVING[moves])
    texts = ["Stra\u00dfe \u2605", '"quoted"\t\\ ', "  a\nb  ", "user", "1", "/no_think 5"]
    for text in texts:
        row = {"messages": [{"role": "user", "content": text}, say(text + " wa1a", thinking="why")]}
        found = result(encoder, row)
        if moves == "reasoning behind the answer":
            assert isinstance(found, EncodedRow), found
            assert "<because>why" in encoder.tokenizer.decode(found.input_ids)
        else:
            assert (
                isinstance(found, str) and "leaves out the thinking of the answer; give --reasoning_in_content" in found
            )
        row["messages"][1].pop("thinking")
        assert isinstance(result(encoder, row), EncodedRow), text


# ---- what generation has to produce ----


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_training") and name not in LISTS_ONLY])
def test_what_is_supervised_follows_the_prompt(core: Tokenizer, name: str) -> None:
    encoder = encoder_of_trl(core, name)
    for turns in (KINDS["plain"]["messages"], KINDS["turns"]["messages"]):
        prompt = encoder.tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
        encoded = result(encoder, {"messages": turns})
        assert isinstance(encoded, EncodedRow)
        learned = [label >= 0 for label in encoded.labels]
        begins = [place for place, one in enumerate(learned) if one and not learned[place - 1]]
        first = turns[-1]["content"].split()[0]
        begin = max(place for place in begins if first in encoder.tokenizer.decode(encoded.input_ids[place:]))
        before = encoder.tokenizer.decode(encoded.input_ids[:begin])
        if "unprompted" in encoded.notes and not before.startswith(prompt):
            # The prompt opens a block of reasoning that the answer does not have.
            assert prompt.startswith(before)
            assert prompt[len(before) :].strip() == "<think>"
        else:
            assert before.rstrip() == prompt.rstrip()


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "gptoss"])
def test_a_row_that_begins_with_the_assistant_has_a_prompt_too(core: Tokenizer, name: str) -> None:
    encoder = encoder_of_trl(core, name)
    encoded = result(encoder, {"messages": [say("Hello."), ask("q1"), say("Yes.")]})
    assert isinstance(encoded, EncodedRow), encoded
    learned = encoder.tokenizer.decode([label for label in encoded.labels if label >= 0])
    assert learned.startswith("<|channel|>final<|message|>Hello." if name == "gptoss" else "Hello.")


WIDE = """{{ bos_token }}
{% for m in messages %}
    {{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>' }}
{% endfor %}

{% if add_generation_prompt %}
    {{ '<|assistant|>\n' }}
{% endif %}
"""
JOINED = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + ('<|return|>' if loop.last and "
    "m.role == 'assistant' else '<|end|>') }}{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|message|>{% "
    "endif %}"
)


@pytest.mark.parametrize("source", [WIDE, JOINED])
def test_a_turn_is_found_where_a_longer_chat_is_printed_otherwise(core: Tokenizer, source: str) -> None:
    # White space of the template, and a last turn that ends otherwise, make no chat the beginning of a longer one.
    encoder = encoder_of(core, source)
    encoded = result(encoder, KINDS["turns"])
    assert isinstance(encoded, EncodedRow), encoded
    ends = ["<|end|>", "<|return|>" if source == JOINED else "<|end|>"]
    assert [run.strip() for run in supervised(encoder.tokenizer, vars(encoded))] == [
        words_of("a1") + ends[0],
        words_of("a2") + ends[1],
    ]
    assert isinstance(empty := result(encoder, {"messages": [ask("q1"), say("")]}), EncodedRow)
    assert not WORD.findall("".join(supervised(encoder.tokenizer, vars(empty))))


def test_a_turn_that_holds_the_answer_of_a_tool_is_refused(core: Tokenizer) -> None:
    found = result(encoder_of(core, from_trl("gemma4")), KINDS["call with text"])
    assert isinstance(found, str) and "behind the answer of the tool" in found


def test_a_header_is_not_supervised_behind_a_turn_that_lost_its_reasoning(core: Tokenizer) -> None:
    encoder = encoder_of(core, from_trl("gptoss"))
    turns = [ask("q1"), say(THINK, tool_calls=[call(1, CALLED)]), answer_of_tool(1, "wt1a"), say(ANSWER)]
    found = result(encoder, {"messages": turns})
    assert isinstance(found, EncodedRow), found
    assert found.notes == ("reasoning",)
    assert all("<|start|>assistant" not in run for run in supervised(encoder.tokenizer, vars(found)))
