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
from unsloth_ddp.data.chat.turn_spans import ROWS_ALIKE, Gap, Place, PlacesInGaps
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


def read(reader: ChatRenderer, example: Example) -> RenderedChat | str:
    try:
        return reader.render(example)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("supervise_all", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_are_found_where_rendering_each_of_them_finds_them(
    name: str, supervise_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, rows = random.Random(name), []
    for turns in (9, 2, 5, 7, 3, 6):
        messages = chat(rng, turns)
        left_out = [i for i, one in enumerate(messages) if one["role"] == "assistant" and rng.random() < 0.3]
        rows.append(Example(messages, tools=[TOOL], left_out=left_out))
    rows.append(
        Example([one for number in range(6) for one in reversed(answer(number))], prompt_messages=4, left_out=[5])
    )
    reader = renderer(name, supervise_all=supervise_all)
    found = [read(reader, row) for row in rows]
    monkeypatch.setattr(PlacesInGaps, "of", lambda self, turns, gaps, locate: [locate(turn) for turn in turns])
    monkeypatch.setattr(turn_spans, "_owners", lambda spans, written: None)
    reader = renderer(name, supervise_all=supervise_all)
    assert [read(reader, row) for row in rows] == found


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "glm4moe"])
def test_a_long_chat_is_rendered_as_seldom_as_a_short_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[str] = []
    original = ChatTemplate._render

    def count(self: ChatTemplate, *given: Any, **others: Any) -> Any:
        rendered.append(name)
        return original(self, *given, **others)

    long = renderer(name)
    # Looked for once for each template.
    assert not long.pair.template.unasked_prompt
    monkeypatch.setattr(ChatTemplate, "_render", count)
    assert long.render(Example(chat(random.Random(1), 80), tools=[TOOL])).spans
    assert len(rendered) <= MOST_RENDERED


def places(offsets: dict[int, int], of: PlacesInGaps) -> tuple[list[int | None], list[int]]:
    """Return the places found in gaps of one kind, and the turns that were looked at."""
    looked_at: list[int] = []

    def locate(turn: int) -> Place:
        looked_at.append(turn)
        return 10 * turn + offsets[turn], False

    found = of.of([*offsets], {turn: Gap(10 * turn, "the same") for turn in offsets}, locate)
    return [character for character, _ in found], sorted(looked_at)


def test_gaps_of_a_kind_that_differ_in_one_row_are_each_looked_at() -> None:
    assert places({1: 3, 2: 3, 3: 3, 4: 2}, PlacesInGaps()) == ([13, 23, 33, 42], [1, 2, 3, 4])


def test_gaps_of_a_kind_that_differ_between_rows_are_each_looked_at() -> None:
    of = PlacesInGaps()
    assert places({1: 3, 2: 3, 3: 3}, of) == ([13, 23, 33], [1, 3])
    assert places({1: 4, 2: 4, 3: 4}, of) == ([14, 24, 34], [1, 2, 3])


def test_gaps_of_a_kind_that_several_rows_had_alike_are_not_looked_at() -> None:
    of = PlacesInGaps()
    for _ in range(ROWS_ALIKE):
        assert places({1: 3, 2: 3}, of) == ([13, 23], [1, 2])
    assert places({5: 3, 6: 3}, of) == ([53, 63], [])


def test_the_name_of_a_call_that_stands_again_at_its_result_is_no_part_of_the_turn() -> None:
    messages = [{"role": "user", "content": "q"}, *call(1), *call(2, "because"), *call(3), *answer(4), *call(5)]
    messages += [{"role": "assistant", "content": "the end"}]
    found = renderer("gemma4_v4", supervise_all=True).render(Example(messages, tools=[TOOL], left_out=[3]))
    assert [found.text[start:end] for start, end in found.spans] == [
        "<|tool_call>call:add{a:2}<tool_call|><|tool_response>"
    ]
