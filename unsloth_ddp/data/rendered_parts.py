"""Find the parts of a row that a chat template does not render, by marking each part and rendering the row once.

Searching for the text itself is not enough: the name of a tool may also be a word of the user's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Literal, NamedTuple

from unsloth_ddp.data.chat_template import ChatTemplate
from unsloth_ddp.data.formats import Example
from unsloth_ddp.data.messages import REASONING_KEYS, Message

THINK_END = "</think>"


class Part(NamedTuple):
    """A part of a row: content, reasoning or tool call `call` of message `number`, or tool definition `number`."""

    kind: Literal["content", "reasoning", "tool call", "tool"]
    number: int
    call: int = 0


class PartChecker:
    """Find the parts of examples that one template leaves out; render once per shape of row."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._missing: dict[Hashable, frozenset[Part]] = {}

    def missing(self, example: Example) -> frozenset[Part]:
        """Return the parts that the rendered row lacks; none if the marked row cannot be rendered."""
        shape = row_shape(example)
        if shape not in self._missing:
            self._missing[shape] = self._render(example)
        return self._missing[shape]

    def _render(self, example: Example) -> frozenset[Part]:
        marks: dict[Part, str] = {}
        messages = [_marked(message, index, marks) for index, message in enumerate(example.messages)]
        tools = [_marked_tool(tool, index, marks) for index, tool in enumerate(example.tools or [])]
        try:
            text = self.template.render(messages, tools or None)
        except Exception:
            return frozenset()
        return frozenset(part for part, mark in marks.items() if mark not in text)


def row_shape(example: Example) -> Hashable:
    """Return a key of what decides which parts a template renders: roles, keys, tool calls, reasoning in the content."""
    messages = tuple(
        (
            m["role"],
            tuple(sorted(key for key, value in m.items() if value)),
            THINK_END in (m["content"] or ""),
            # Some templates fail unless the arguments are text.
            tuple(type(call["function"]["arguments"]) for call in m.get("tool_calls") or []),
        )
        for m in example.messages
    )
    return messages, len(example.tools or [])


def _mark(part: Part) -> str:
    return f"Zq{part.kind.replace(' ', '')}{part.number}x{part.call}qZ"


def _inserted(text: str, mark: str) -> str:
    """Insert a mark in the middle, because templates examine how a text begins and ends."""
    start, middle = len(text) - len(text.lstrip()), len(text.strip()) // 2
    return text[: start + middle] + mark + text[start + middle :]


def _marked(message: Message, index: int, marks: dict[Part, str]) -> Message:
    def mark(kind: Any, text: str) -> str:
        if not text.strip():
            return text
        part = Part(kind, index)
        marks[part] = _mark(part)
        return _inserted(text, marks[part])

    marked = dict(message)
    if message["content"]:
        marked["content"] = _marked_content(message, index, mark, marks)
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            marked[key] = mark("reasoning", message[key])
    if message.get("tool_calls"):
        parts = [Part("tool call", index, number) for number in range(len(message["tool_calls"]))]
        marks.update({part: _mark(part) for part in parts})
        marked["tool_calls"] = [
            _renamed(call, marks[part]) for call, part in zip(message["tool_calls"], parts, strict=True)
        ]
    return marked


def _marked_content(message: Message, index: int, mark: Callable[[Any, str], str], marks: dict[Part, str]) -> str:
    reasoning, think, content = message["content"].rpartition(THINK_END)
    if message["role"] != "assistant" or not think or not content.strip():
        return mark("content", message["content"])
    if reasoning.replace("<think>", "").strip():
        part = Part("reasoning", index)
        marks[part] = _mark(part)
        reasoning += marks[part]
    return reasoning + think + mark("content", content)


def _renamed(tool: dict[str, Any], mark: str) -> dict[str, Any]:
    """Return a tool or a tool call with a mark in the function's name."""
    if isinstance(tool.get("function"), dict):
        return {**tool, "function": _renamed(tool["function"], mark)}
    return {**tool, "name": f"{tool['name']}{mark}"} if isinstance(tool.get("name"), str) else tool


def _marked_tool(tool: dict[str, Any], index: int, marks: dict[Part, str]) -> dict[str, Any]:
    part = Part("tool", index)
    marked = _renamed(tool, _mark(part))
    if marked != tool:
        marks[part] = _mark(part)
    return marked
