"""Judge what a template does to a row: parts that it leaves out or repeats, and markup that it reads or writes too.

A part is refused, or accepted as at inference. Markup stays as it is in the stand-in of a row (parts.py), so most of
what is told of it is found once for all rows of a stand-in. Pure functions.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from unsloth_ddp.data.chat.parts import REQUIRED, THINK_END, Part, StandIn, closes, name_of
from unsloth_ddp.data.chat.scaffold import Places, Scaffold
from unsloth_ddp.data.sources.formats import Example
from unsloth_ddp.data.sources.messages import REASONING_KEYS, Message
from unsloth_ddp.utils.errors import UserError

SHOWN = 60
TEXTS = ("content", "reasoning")
CALL_KINDS = ("tool call", "arguments", "argument")


def turns_left_out(
    example: Example,
    missing: Collection[Part],
    repeated: Collection[Part],
    values: dict[Part, Any],
    loses: Callable[[Example], Collection[Part]],
) -> list[int]:
    """Return the earlier assistant turns whose reasoning, or text beside tool calls, the template leaves out.

    Args:
        missing: the required parts of the row that its rendered text lacks.
        repeated: the texts that it holds more than once.
        values: the texts of the parts, to show in the message.
        loses: returns the missing parts of another row, to find a change that helps.

    Raises:
        UserError: another part is left out, or the reasoning of the last turn, or a text is repeated.
    """
    last = max((i for i, message in enumerate(example.messages) if message["role"] == "assistant"), default=-1)
    lost: list[int] = []
    for part in sorted(missing, key=lambda part: (REQUIRED.index(part.kind), *part[1:3], str(part.place))):
        kind, index = part.kind, part.number
        if kind == "tool":
            raise UserError(
                f"the chat template does not render tools, so {name_of((example.tools or [])[index])[:100]} is not in "
                "the rendered row; give one that does with --chat_template, or remove the row's tools."
            )
        message = example.messages[index]
        if kind in CALL_KINDS:
            raise UserError(_call_refusal(part, message, values))
        if message["role"] != "assistant":
            raise UserError(_text_refusal(part, message, values))
        if kind == "reasoning" and index == last:
            raise UserError(_reasoning_refusal(example, part, values, loses))
        if kind == "content" and (index == last or not _is_left_out_at_inference(part, message, missing, values)):
            raise UserError(_text_refusal(part, message, values))
        lost.append(index)
    for part in sorted(repeated):
        raise UserError(
            f"the chat template renders the {part.kind} of message {part.number + 1} more than once "
            f"({_shown(values[part])}); give a template that renders it once with --chat_template."
        )
    return lost


def tool_keys_left_out(tools: list[Any], text: str) -> set[str]:
    """Return the keys of tools' descriptions that hold texts with a word that a rendered row lacks.

    Types are left out, since templates write them in their own way.
    """
    lowered = text.lower()
    return {
        f"{key[:100]} of tools"
        for tool in tools
        for key, value in _texts_in(tool, "")
        if key != "type" and not all(_is_in(word, lowered) for word in value.lower().split())
    }


def _texts_in(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the texts in a value, each with the key that it stands under."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _texts_in(item, str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item, key)
    elif isinstance(value, str):
        yield key, value


def _is_in(word: str, text: str) -> bool:
    printed = (word, json.dumps(word, ensure_ascii=False)[1:-1], json.dumps(word)[1:-1], repr(word)[1:-1])
    # Jinja's tojson writes these as escapes for HTML.
    return any(form in text for form in printed) or any(sign in word for sign in "<>&'")


def is_call_with_text(message: Message) -> bool:
    """Return whether a message has tool calls, and text without reasoning beside them."""
    return bool(message.get("tool_calls")) and THINK_END not in (message["content"] or "")


def _is_left_out_at_inference(part: Part, message: Message, missing: Collection[Part], values: dict[Part, Any]) -> bool:
    """Return whether all text beside tool calls is left out, as Llama 3.1's template does."""
    texts = {other for other in values if other.kind == "content" and other.number == part.number}
    return bool(message.get("tool_calls")) and texts <= set(missing)


def _call_refusal(part: Part, message: Message, values: dict[Part, Any]) -> str:
    calls = message["tool_calls"]
    name = name_of(calls[part.call])[:100]
    if part.kind == "tool call" and part.call:
        return (
            f"the chat template leaves out tool call {part.call + 1} of the {len(calls)} in message {part.number + 1}; "
            "write each call as a message of its own, or give a template that renders all with --chat_template."
        )
    if part.kind == "tool call":
        return (
            f"the chat template does not render tools, so the call of {name} is not in the rendered row; give one that "
            "does with --chat_template, or remove the row's tools."
        )
    what = "the arguments" if part.kind == "arguments" else f"{_shown(values[part])} in the arguments"
    return (
        f"the chat template leaves out {what} of the call of {name} in message {part.number + 1}; give a template that "
        "renders all of the call with --chat_template, or change the call."
    )


def _text_refusal(part: Part, message: Message, values: dict[Part, Any]) -> str:
    texts = [other for other in values if other.kind in ("content", "reasoning") and other.number == part.number]
    if len(texts) == 1:
        return (
            f"the chat template leaves out message {part.number + 1} of the row, of role {message['role']}; give one "
            "that renders it with --chat_template, or remove the message."
        )
    return (
        f"the chat template leaves out {_shown(values[part])} in message {part.number + 1} of the row, of role "
        f"{message['role']}, since it takes the message apart at its reasoning; move the text behind the reasoning, or "
        "give a template that renders it with --chat_template."
    )


def _reasoning_refusal(
    example: Example, part: Part, values: dict[Part, Any], loses: Callable[[Example], Collection[Part]]
) -> str:
    """Return the message for reasoning that is left out, with a change that makes the template render it."""
    index, source_key = part.number, part.place[0]
    message = example.messages[index]
    reasons = {other.place[0] for other in values if other.kind == "reasoning" and other.number == index}
    if len(reasons) > 1:
        where = "the reasoning in the content" if source_key == "content" else f"the {source_key}"
        what, fix = f"{where} of the answer, which has reasoning twice", "keep one of them"
    elif source_key == "content":
        what, fix = f"the reasoning in the answer ({_shown(values[part])})", "remove it"
    else:
        what, fix = f"the {source_key} of the answer", "give --reasoning_in_content, which writes it into the content"
        for key in REASONING_KEYS:
            renamed = {
                **{name: value for name, value in message.items() if name != source_key},
                key: message[source_key],
            }
            candidate = replace(example, messages=[*example.messages[:index], renamed, *example.messages[index + 1 :]])
            if key not in message and not any(other.number == index for other in loses(candidate)):
                fix = f"rename it to {key}"
                break
    return f"the chat template leaves out {what}; {fix}, or give a template that renders it with --chat_template."


def _shown(value: Any) -> str:
    text = " ".join(str(value).split())
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")


def opening_of(closing: str) -> str:
    """Return the markup that begins a block which `closing` ends: <think> for </think>, <|channel> for <channel|>."""
    return closing.replace("/", "", 1) if "/" in closing[:3] else f"<|{closing[1:-2]}>"


def notes_on_markup(standin: StandIn, scaffold: Scaffold, text: str, looked_for: set[str]) -> Iterator[str]:
    """Yield notes on the markup of a row, each with the markup.

    Args:
        text: the rendered stand-in.
        looked_for: markup that the template looks for in texts.
    """
    example = standin.example
    for index, message in enumerate(example.messages):
        if message["role"] != "assistant" or index < example.prompt_messages or index in example.left_out:
            continue
        content = str(message["content"])
        for closing in filter(closes, standin.literals):
            opening = opening_of(closing)
            begun, ended = content.count(opening), content.count(closing)
            if begun > ended:
                yield f"cut\t{opening}"
            elif ended > begun and closing in looked_for:
                yield f"unopened\t{closing}"
    for literal in {mark.literal for mark in standin.marks}:
        if any(re.search(f"{re.escape(literal)}\\s*{re.escape(literal)}", gap) for gap in scaffold.gaps):
            yield f"twice\t{literal}"
    yield from (f"taken\t{literal}" for literal in _taken_out(standin, scaffold, text))


def _taken_out(standin: StandIn, scaffold: Scaffold, text: str) -> set[str]:
    """Return the markup of texts that does not stand where the text has it, blocks of an answer aside."""
    slots = {slot.part: number for number, slot in reversed([*enumerate(scaffold.slots)])}
    blocks = {tag for literal in filter(closes, standin.literals) for tag in (literal, opening_of(literal))}
    removed: set[str] = set()
    for literal, role, part_before, part_behind in standin.marks:
        if role == "assistant" and literal in blocks:
            continue
        if part_before in slots:
            arrives = scaffold.gaps[slots[part_before] + 1].startswith(literal)
        elif part_behind in slots:
            arrives = scaffold.gaps[slots[part_behind]].endswith(literal)
        else:
            arrives = literal in text
        if not arrives:
            removed.add(literal)
    return removed


def notes_on_texts(standin: StandIn, text: str, scaffold: Scaffold, places: Places) -> Iterator[str]:
    """Yield notes on texts that lose their indentation, and on tags and speakers that they and the template write."""
    twice: set[str] = set()
    unindented = False
    for number, (slot, (start, end)) in enumerate(zip(scaffold.slots, places.slots, strict=True)):
        if slot.part.kind not in TEXTS:
            continue
        tag_before, tag_behind = scaffold.around[number]
        twice |= {tag_before} if tag_before and text.startswith(tag_before, start) else set()
        twice |= {tag_behind} if tag_behind and text.endswith(tag_behind, start, end) else set()
        if slot.part.kind == "content" and standin.example.messages[slot.part.number]["role"] == "assistant":
            value = standin.values[slot.part]
            indentation = value[: len(value) - len(value.lstrip())].rpartition("\n")[2]
            unindented |= bool(indentation) and not text.endswith(indentation, 0, start)
    yield from ["unindented"] if unindented else []
    yield from (f"twice\t{tag}" for tag in sorted(twice))
