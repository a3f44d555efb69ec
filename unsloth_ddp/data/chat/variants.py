"""Write a row in the forms that templates read: reasoning beside the content, arguments as text. Pure functions."""

import functools
import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from unsloth_ddp.data.chat.parts import THINK_END, THINK_START
from unsloth_ddp.data.sources.formats import Example
from unsloth_ddp.data.sources.messages import REASONING_KEYS, Message


def variants(
    example: Example,
    prints_bare: Callable[[], bool],
    image_token: str | None = None,
    *,
    beside: Example | None = None,
    think: tuple[str, str] | None = None,
) -> Iterator[Example]:
    """Yield a row with its content parts, as it is, and then in the forms that may suit other templates better.

    Args:
        image_token: what stands for an image in the text that the model's processor takes.
        prints_bare: whether the template prints a text in arguments without quotation marks, as it prints a number.
        beside: the other row of a pair, which then has the same forms in the same order.
        think: what begins and ends reasoning that is written into the content, as a last form.
    """
    in_parts = example
    messages = [*example.messages, *(beside.messages if beside else ())]
    has_parts = bool(example.parts or (beside and beside.parts))
    if has_parts:
        yield _with_parts(example, as_list_of_parts)
    if example.images:
        yield _in_parts_only(example)
        example = _with_parts(example, lambda parts: _marked(parts, image_token))
    elif has_parts:
        # As servers join parts for templates that take only text.
        example = _with_parts(example, lambda parts: "\n".join(part for part in parts if part is not None))
    yield example
    if any(THINK_END in message["content"] for message in messages):
        yield _changed(example, _with_reasoning_key)
    if any(message.get("tool_calls") for message in messages):
        if prints_bare():
            yield _changed(example, _with_values_as_text)
        yield _changed(example, with_calls_as_text)
        yield _changed(example, lambda message: {**with_calls_as_text(message), "content": message["content"]})
    if not example.images:
        # Templates of image-text models may take lists only.
        yield _in_parts_only(in_parts)
    if think and any(message.get(key) for message in messages for key in REASONING_KEYS):
        for key in REASONING_KEYS:
            renamed = _changed(in_parts, functools.partial(_with_reasoning_as, name=key))
            yield from variants(renamed, prints_bare, image_token, beside=beside)
        written = _changed(in_parts, lambda message: _with_reasoning_in_content(message, think))
        yield from variants(written, prints_bare, image_token, beside=beside)


def with_calls_as_text(message: Message) -> Message:
    """Write tool calls in OpenAI's form, which some templates need: arguments as JSON text, empty content as null."""
    return {**_with_arguments(message, as_json), "content": message["content"] or None} if _calls(message) else message


def as_list_of_parts(parts: list[str | None]) -> list[dict[str, str]]:
    """Return content parts as templates read them."""
    return [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]


def _marked(parts: list[str | None], image_token: str | None) -> str:
    """Return content parts as one text, with the model's token in place of each image."""
    return "".join((image_token or "") if part is None else part for part in parts)


def _in_parts_only(example: Example) -> Example:
    """Write the content of every message as a list of parts."""
    texts: dict[str, list[str | None]] = {str(i): [m["content"]] for i, m in enumerate(example.messages)}
    return _with_parts(replace(example, parts=texts | example.parts), as_list_of_parts)


def _with_parts(example: Example, content: Callable[[list[str | None]], Any]) -> Example:
    """Write the content of messages that have several parts from these parts."""
    parts = {int(index): content(texts) for index, texts in example.parts.items()}
    messages = [{**m, "content": parts.get(index, m["content"])} for index, m in enumerate(example.messages)]
    return replace(example, messages=messages, parts={})


def as_json(value: Any) -> str:
    """Return a value as JSON text."""
    return json.dumps(value, ensure_ascii=False)


def _with_values_as_text(message: Message) -> Message:
    """Write every argument that is not text as JSON text, for templates that would print it as Python does."""

    def with_text(arguments: dict[str, Any]) -> dict[str, Any]:
        return {name: value if isinstance(value, str) else as_json(value) for name, value in arguments.items()}

    return _with_arguments(message, with_text)


def _with_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    if not _calls(message):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}
        for call in _calls(message)
    ]
    return {**message, "tool_calls": calls}


def _with_reasoning_key(message: Message) -> Message:
    reasoning, think, content = message["content"].partition(THINK_END)
    text_before, _, thought = reasoning.rpartition(THINK_START)
    if (
        message["role"] != "assistant"
        or not think
        or text_before.strip()
        or any(message.get(key) for key in REASONING_KEYS)
    ):
        return message
    return {**message, "reasoning_content": thought.strip("\n"), "content": content.lstrip("\n")}


def _with_reasoning_in_content(message: Message, think: tuple[str, str]) -> Message:
    written = _with_reasoning_as(message, "content")
    if written is message:
        return message
    return {**written, "content": f"{think[0]}\n{written['content']}\n{think[1]}\n\n{message['content']}"}


def _with_reasoning_as(message: Message, name: str) -> Message:
    """Write the reasoning of a message under another key."""
    reasoning = next((message[key].strip("\n") for key in REASONING_KEYS if message.get(key)), "")
    if not reasoning or message["role"] != "assistant":
        return message
    return {**{key: value for key, value in message.items() if key not in REASONING_KEYS}, name: reasoning}


def think_tokens(added: Collection[str]) -> tuple[str, str]:
    """Return the added tokens that begin and end reasoning, such as [THINK] and [/THINK], or <think> and </think>."""
    for begin in sorted(token for token in added if "think" in token.lower()):
        ends = {begin[:1] + "/" + begin[1:], begin.replace("START", "END"), begin.replace("start", "end")} - {begin}
        if end := next((end for end in sorted(ends) if end in added), None):
            return begin, end
    return THINK_START, THINK_END


def _calls(message: Message) -> list[dict[str, Any]]:
    return message.get("tool_calls") or []


def _changed(example: Example, change: Callable[[Message], Message]) -> Example:
    return replace(example, messages=[change(message) for message in example.messages])
