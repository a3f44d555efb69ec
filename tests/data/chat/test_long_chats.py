"""Test that the turns of long chats are found without rendering the chat once more for each of them."""

from __future__ import annotations

import random
from datetime import date
from typing import Any

import pytest
from trl.chat_template_utils import has_generation_markers

from tests.data.test_tokenize import TOOL, from_trl
from unsloth_ddp.data.chat import turn_spans
from unsloth_ddp.data.chat.renderer import ChatRenderer, RenderedChat
from unsloth_ddp.data.chat.template import ChatTemplate, TemplatePair
from unsloth_ddp.data.sources.formats import Example

TEMPLATES = ["qwen3", "qwen3_6", "llama3_2", "gptoss", "gemma4_v4", "glm4moe", "deepseekv3", "phi3_5"]
# Whatever the length of a chat, a row is rendered at most so often.
MOST_RENDERED = 30


def renderer(name: str, *, supervise_all: bool = False) -> ChatRenderer:
    special_tokens = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    own = ChatTemplate(from_trl(name), has_generation_markers(from_trl(name)), special_tokens, date(2026, 1, 1))
    return ChatRenderer(TemplatePair(own, None), "<|im_end|>", supervise_all=supervise_all, use_training=False)


def call(number: int, reasoning: str = "") -> list[dict[str, Any]]:
    """Return a call of a tool and its result."""
    function = {"name": "add", "arguments": {"a": number}}
    asked = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "id": "c", "function": function}]}
    reasoned = {"reasoning_content": reasoning} if reasoning else {}
    return [asked | reasoned, {"role": "tool", "tool_call_id": "c", "name": "add", "content": f"result {number}"}]


def answer(number: int) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": f"answer {number}"}, {"role": "user", "content": f"question {number}"}]


def chat(rng: random.Random, turns: int) -> list[dict[str, Any]]:
    """Return a chat of answers and calls in no order, some of them with reasoning."""
    made = [{"role": "user", "content": "question"}]
    for number in range(turns):
        made += rng.choice([call(number), call(number, "because"), answer(number)])
    return [*made, {"role": "assistant", "content": "the end"}]


def read(name: str, example: Example, *, supervise_all: bool) -> RenderedChat | str:
    try:
        return renderer(name, supervise_all=supervise_all).render(example)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("supervise_all", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_are_found_where_rendering_each_of_them_finds_them(
    name: str, supervise_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(name)
    messages = chat(rng, 9)
    plain = [message for number in range(6) for message in reversed(answer(number))]
    left_out = [i for i, message in enumerate(messages) if message["role"] == "assistant" and rng.random() < 0.3]
    rows = [Example(messages, tools=[TOOL], left_out=left_out), Example(plain, prompt_messages=4, left_out=[5])]
    found = [read(name, row, supervise_all=supervise_all) for row in rows]
    monkeypatch.setattr(turn_spans, "_locate", lambda turns, gaps, locate: [locate(turn) for turn in turns])
    monkeypatch.setattr(turn_spans, "_owners", lambda spans, written: None)
    assert [read(name, row, supervise_all=supervise_all) for row in rows] == found


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "glm4moe"])
def test_a_long_chat_is_rendered_as_seldom_as_a_short_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str] = []
    original = ChatTemplate._render

    def count(self: ChatTemplate, *given: Any, **others: Any) -> Any:
        rendered.append(name)
        return original(self, *given, **others)

    monkeypatch.setattr(ChatTemplate, "_render", count)
    assert renderer(name).render(Example(chat(random.Random(1), 80), tools=[TOOL])).spans
    assert len(rendered) <= MOST_RENDERED


def test_turns_whose_gaps_differ_in_one_of_them_are_each_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last turn's prompt is one character shorter here, so that it says nothing about the others."""
    gaps = {turn: turn_spans.Gap(10 * turn, "the same") for turn in range(1, 5)}
    looked_at: list[int] = []

    def locate(turn: int) -> turn_spans.Place:
        looked_at.append(turn)
        return 10 * turn + (3 if turn < 4 else 2), False

    assert turn_spans._locate([1, 2, 3, 4], gaps, locate) == [(13, False), (23, False), (33, False), (42, False)]
    assert sorted(looked_at) == [1, 2, 3, 4]


def test_the_name_of_a_call_that_stands_again_at_its_result_is_no_part_of_the_turn() -> None:
    messages = [{"role": "user", "content": "q"}, *call(1), *call(2, "because"), *call(3), *answer(4), *call(5)]
    messages += [{"role": "assistant", "content": "the end"}]
    found = renderer("gemma4_v4", supervise_all=True).render(Example(messages, tools=[TOOL], left_out=[3]))
    assert [found.text[start:end] for start, end in found.spans] == [
        "<|tool_call>call:add{a:2}<tool_call|><|tool_response>"
    ]
