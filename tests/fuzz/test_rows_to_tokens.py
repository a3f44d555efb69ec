"""Follow each part of random rows to its tokens, under the templates of TRL, Unsloth and Transformers.

A row is refused, or every word of it stands in its tokens as often as in the row, its markup too, only answers are
supervised, they follow the generation prompt, and both answers of a pair follow the same tokens. What differs has to be
told in a note.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.data.chat.test_pairs import encode as encode_pair
from tests.data.chat.test_pairs import prompts
from tests.data.chat.test_rows_arrive import MARKS, WORD, answer_of_tool, ask, call, result, say, words_of
from tests.data.test_tokenize import TRL_TEMPLATES, core, make_tokenizer
from unsloth_ddp.data.chat.labels import first_supervised
from unsloth_ddp.data.chat.prompt import example_of, rendered
from unsloth_ddp.data.chat.tokenize import Encoder
from unsloth_ddp.utils.errors import UserError

__all__ = ["core"]

# The session's tokenizer is shared by all examples.
many = settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MARKUP = [
    "<tool_response>", "</tool_response>", "<think>", "</think>", "/think", "/no_think", "[THINK]", "<|channel>",
        "<channel|>",
    "<tool_call>", "[INST]", "<|im_end|>", "ASSISTANT:", "### Response:", "<tools>", "{{ x }}", "<image>", "</s>",
]  # fmt: skip
# Reasoning may be written in other markup, and that of earlier turns left out.
BLOCKS = {"<think>", "</think>", "[THINK]", "<|channel>", "<channel|>"}
LEFT_OUT = {"reasoning", "text"}


def constants_in(path: Path) -> Iterator[str]:
    """Yield the chat templates that a Python module holds as constants."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "{%" in node.value:
            yield from [node.value] if "messages" in node.value and len(node.value) > 100 else []


def folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@functools.cache
def templates() -> dict[str, str]:
    found = {path.stem: path.read_text(encoding="utf-8") for path in sorted(TRL_TEMPLATES.glob("*.jinja"))}
    modules = [
        folder_of("unsloth") / "chat_templates.py",
        *sorted(folder_of("transformers").glob("models/*/processing_*.py")),
    ]
    for module in modules:
        found |= {f"{module.stem} {number}": source for number, source in enumerate(constants_in(module))}
    return found


@functools.cache
def encoder_of_template(core: Tokenizer, name: str) -> Encoder | None:
    """Return the encoder of a template; None if it is no template of chats."""
    try:
        return Encoder(make_tokenizer(core, templates()[name], "<eos>", MARKS), supervise_all=False)
    except UserError:
        return None


def test_the_templates_of_three_libraries_are_found() -> None:
    kinds = Counter(name.partition("_")[0] if " " in name else "TRL" for name in templates())
    assert kinds["TRL"] > 50 and kinds["chat"] > 15 and kinds["processing"] >= 3


@st.composite
def texts(draw: st.DrawFn, name: str) -> str:
    """Return a text of three words of its own, with markup before, behind or inside it."""
    text = words_of(name)
    for markup in draw(st.lists(st.sampled_from(MARKUP), max_size=2)):
        places = [
            f"{markup}\n{text}",
            f"{text}\n{markup}",
            text.replace(" is ", f" {markup} is "),
            text.replace("start", f"start{markup}"),
        ]
        text = draw(st.sampled_from(places))
    return text


@st.composite
def answers(draw: st.DrawFn, name: str) -> dict[str, Any]:
    text = draw(texts(f"a{name}"))
    kind = draw(st.sampled_from(["plain", "plain", "block", "key"]))
    if kind == "key":
        return say(text, reasoning_content=words_of(f"r{name}"))
    return say(f"<think>\n{words_of(f'r{name}')}\n</think>\n\n{text}" if kind == "block" else text)


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    if draw(st.booleans()):
        turns.append({"role": "system", "content": draw(texts("s1"))})
    for turn in range(draw(st.integers(1, 2))):
        turns.append({**ask("q1"), "content": draw(texts(f"q{turn}"))})
        if draw(st.integers(0, 3)) == 0:
            arguments = {"wkey1a": draw(texts(f"v{turn}"))}
            turns += [say(draw(st.just("") | texts(f"c{turn}")), tool_calls=[call(1, arguments)])]
            turns += [answer_of_tool(1, draw(texts(f"t{turn}")))]
        turns.append(draw(answers(str(turn))))
    return turns


def told_texts(value: Any) -> list[str]:
    """Return all texts in a row's messages but names and ids."""
    if isinstance(value, dict):
        return [
            text
            for key, item in value.items()
            if key not in ("name", "tool_call_id", "id")
            for text in told_texts(item)
        ]
    return [text for item in value for text in told_texts(item)] if isinstance(value, list) else [str(value)]


@many
@given(st.data())
def test_every_part_of_a_row_is_followed_to_its_tokens(core: Tokenizer, data: st.DataObject) -> None:
    encoder = encoder_of_template(core, data.draw(st.sampled_from(sorted(templates()))))
    turns = data.draw(chats())
    found = result(encoder, {"messages": turns}) if encoder else ""
    if encoder is None or isinstance(found, str):
        return
    kinds, text = {note.partition("\t")[0] for note in found.notes}, encoder.tokenizer.decode(found.input_ids)
    learned = encoder.tokenizer.decode([label for label in found.labels if label >= 0])
    arrived = Counter(WORD.findall(text))
    for turn in turns:
        words = Counter(word for said in told_texts({**turn, "role": ""}) for word in WORD.findall(said))
        lost = words - arrived
        assert not lost or (kinds & LEFT_OUT and turn["role"] == "assistant" and turn is not turns[-1]), lost
        assert all(arrived[word] <= 1 for word in words)
        assert turn["role"] == "assistant" or not set(words) & set(WORD.findall(learned))
    for markup in set(MARKUP) - BLOCKS if not kinds & LEFT_OUT else ():
        held = sum(said.replace("</think>", "").count(markup) for said in told_texts(turns))
        assert text.replace("</think>", "").count(markup) >= held or f"taken\t{markup}" in found.notes, markup
    answer = Counter(word for said in told_texts({**turns[-1], "role": ""}) for word in WORD.findall(said))
    assert not answer - Counter(WORD.findall(learned))


def plain(text: str) -> str:
    return re.sub(r"\s", "", text)


@many
@given(st.data())
def test_an_answer_follows_its_generation_prompt_or_it_is_told(core: Tokenizer, data: st.DataObject) -> None:
    encoder = encoder_of_template(core, data.draw(st.sampled_from(sorted(templates()))))
    turns = [*([{"role": "system", "content": data.draw(texts("s1"))}] if data.draw(st.booleans()) else [])]
    turns += [{"role": "user", "content": data.draw(texts("q1"))}, data.draw(answers("1"))]
    found = result(encoder, {"messages": turns}) if encoder else ""
    if encoder is None or isinstance(found, str) or "training" in found.notes:
        return
    begin = first_supervised(found.labels)
    prompt = rendered(encoder.tokenizer, example_of(turns[:-1]), prompt=True)
    follows = plain(encoder.tokenizer.decode(found.input_ids[:begin])) == plain(prompt)
    assert follows or any(note.startswith(("unprompted", "prompt\t")) for note in found.notes), found.notes


@many
@given(st.data())
def test_both_answers_of_a_pair_follow_the_same_tokens(core: Tokenizer, data: st.DataObject) -> None:
    encoder = encoder_of_template(core, data.draw(st.sampled_from(sorted(templates()))))
    *asked, chosen = data.draw(chats())
    rejected = data.draw(answers("9"))
    repeated = data.draw(st.sampled_from([0, 1, len(asked)]))
    shown = asked[len(asked) - repeated :]
    row = {"prompt": asked, "chosen": [*shown, chosen], "rejected": [*shown, rejected]}
    found = encode_pair(encoder, json.loads(json.dumps(row))) if encoder else ""
    if encoder is None or isinstance(found, str):
        return
    one, other = prompts(found)
    assert one == other
    kinds, text = {note.partition("\t")[0] for note in found.notes}, encoder.tokenizer.decode(one)
    words = Counter(word for said in told_texts(asked) for word in WORD.findall(said))
    assert not words - Counter(WORD.findall(text)) or kinds & LEFT_OUT
    for answer, begin, end in ((chosen, 0, found.parts[0]), (rejected, found.parts[0], len(found.input_ids))):
        learned = [label for label in found.labels[begin:end] if label >= 0]
        words = Counter(word for said in told_texts({**answer, "role": ""}) for word in WORD.findall(said))
        assert not words - Counter(WORD.findall(encoder.tokenizer.decode(learned)))
