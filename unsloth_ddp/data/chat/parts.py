"""Take a row apart into what has to arrive in its rendered text, and build a stand-in for the row. Pure functions.

A stand-in has the roles, keys, markup and structure of a row, and a word of its own in place of every text and value.
What a template does with a row is found from the stand-in, so it cannot depend on other rows, and rows with equal
stand-ins share it.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from unsloth_ddp.data.sources.formats import Example
from unsloth_ddp.data.sources.messages import REASONING_KEYS, Message

# Markup that separates reasoning from the answer, whether the template looks for it or not.
THINK_START, THINK_END = "<think>", "</think>"
# Values that a template may print with tojson are looked for in these styles, in this order.
JSON_STYLES: tuple[dict[str, Any], ...] = ({}, {"indent": 4}, {"indent": 2}, {"separators": (",", ":")})

# The word of a name that repeats the name of a call begins so.
REPEATED = "Zn"


class Part(NamedTuple):
    """A part of a row.

    Args:
        kind: "content", "reasoning", "tool call" (its name), "arguments" (all of a call), "argument" (a key or a
            value), "tool", "id", "key" (text under another key of a message), or "stand-in" (a word without a value).
        number: the index of the message or tool.
        call: the index of the tool call in the message.
        place: where the part stands: (key, piece of the text between markup), or the path of an argument.
    """

    kind: str
    number: int
    call: int = 0
    place: tuple[Any, ...] = ()


REQUIRED = ("content", "reasoning", "tool call", "arguments", "argument", "tool")


class Mark(NamedTuple):
    """Markup in a text, with the parts of the text beside it, None where the text ends or other markup stands."""

    literal: str
    role: str
    part_before: Part | None
    part_behind: Part | None


@dataclass
class StandIn:
    """The stand-in of a row: the example, the values that it stands for, and the part of each word.

    Args:
        any_tools: see stand_in.
        any_arguments: see stand_in.
        whole: objects of the stand-in that a template may print as one JSON value, by the part that they stand for.
        literals: the markup that divides its texts.
        marks: the markup in its texts.
        ids: the words of the ids of tool calls.
        called: the words of called tools where a tool's answer repeats the name.
    """

    example: Example
    any_tools: bool
    any_arguments: bool
    literals: tuple[str, ...]
    marks: list[Mark] = field(default_factory=list)
    values: dict[Part, Any] = field(default_factory=dict)
    words: dict[str, Part] = field(default_factory=dict)
    whole: dict[Part, Any] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)

    def word(self, part: Part, value: Any) -> str:
        """Return a new word for a value; it has the nine characters that Mistral's templates ask of an id."""
        self.values[part] = value
        word = f"Zq{len(self.words):05d}qZ"
        self.words[word] = part
        return word

    def number(self, part: Part, value: Any) -> int:
        """Return a new number for a number, a truth value or null."""
        self.values[part] = value
        number = 731_00000 + len(self.words)
        self.words[str(number)] = part
        return number

    @property
    def key(self) -> str:
        """Return the text that equal stand-ins have in common."""
        shown = self.example
        return json.dumps(
            (self.any_tools, self.any_arguments, shown.messages, shown.tools, shown.prompt_messages, shown.left_out)
        )


def name_of(tool: dict[str, Any]) -> str:
    """Return the name of a tool, or of the tool that a call names."""
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name"))


class Markup:
    """The markup that divides the texts of a row: what a template looks for in texts, and reasoning's."""

    def __init__(self, literals: Iterable[str]) -> None:
        self.literals = tuple(sorted({THINK_START, THINK_END, *literals}, key=lambda literal: (-len(literal), literal)))
        self._pattern = re.compile("(" + "|".join(map(re.escape, self.literals)) + ")")

    def split(self, text: str) -> list[str]:
        """Return the pieces of a text: text at even indices, markup at odd ones."""
        # Searching for each literal is faster than a pattern of alternatives.
        return self._pattern.split(text) if any(literal in text for literal in self.literals) else [text]


def closes(markup: str) -> bool:
    """Return whether markup ends a block, as </think>, [/THINK] and <channel|> do."""
    return ("/" in markup[:3] and markup[0] in "<[") or (markup.endswith("|>") and not markup.startswith("<|"))


def stand_in(example: Example, markup: Markup, *, any_tools: bool, any_arguments: bool) -> StandIn:
    """Build the stand-in of a row.

    Args:
        any_tools: give all tools one description, which fits templates that print a tool as JSON.
        any_arguments: give all tool calls one key and value, which fits templates that print arguments as JSON.
    """
    standin = StandIn(example, any_tools, any_arguments, markup.literals)
    messages = [_message(standin, index, message, markup) for index, message in enumerate(example.messages)]
    tools = [_tool(standin, index, tool) for index, tool in enumerate(example.tools or [])]
    standin.example = replace(example, messages=messages, tools=tools or None)
    return standin


def _message(standin: StandIn, index: int, message: Message, markup: Markup) -> Message:
    standin_message: Message = {}
    for key, value in message.items():
        if key == "role":
            standin_message[key] = value
        elif key == "tool_calls" and value:
            standin_message[key] = [_call(standin, index, number, call) for number, call in enumerate(value)]
        elif key == "content" and isinstance(value, list):
            standin_message[key] = [
                {**part, "text": _text(standin, index, message["role"], (key, place), part["text"], markup)}
                if "text" in part
                else part
                for place, part in enumerate(value)
            ]
        elif not isinstance(value, str) or not value.strip():
            standin_message[key] = value
        elif key == "content" or key in REASONING_KEYS:
            standin_message[key] = _text(standin, index, message["role"], (key,), value, markup)
        elif key == "tool_call_id":
            standin_message[key] = _id(standin, index, value)
        elif key == "name" and value in standin.called:
            standin_message[key] = standin.called[value]
        else:
            standin_message[key] = standin.word(Part("key", index, place=(key,)), value)
    return standin_message


def _text(standin: StandIn, index: int, role: str, place: tuple[Any, ...], text: str, markup: Markup) -> str:
    pieces = markup.split(text)
    parts: dict[int, Part] = {}
    for number in range(0, len(pieces), 2):
        if pieces[number].strip():
            begun = number == 0 or not closes(pieces[number - 1])
            ended = number + 1 < len(pieces) and closes(pieces[number + 1])
            reasons = place[0] != "content" or (role == "assistant" and begun and ended)
            parts[number] = Part("reasoning" if reasons else "content", index, place=(*place, number))
            pieces[number] = standin.word(parts[number], pieces[number])
    for number in range(1, len(pieces), 2):
        standin.marks.append(Mark(pieces[number], role, parts.get(number - 1), parts.get(number + 1)))
    return "".join(pieces)


def _id(standin: StandIn, index: int, value: str, call: int = 0) -> str:
    if value not in standin.ids:
        standin.ids[value] = standin.word(Part("id", index, call), value)
    return standin.ids[value]


def _call(standin: StandIn, index: int, number: int, call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    part = Part("arguments", index, number)
    arguments: Any = function["arguments"]
    name = standin.word(Part("tool call", index, number), function["name"])
    standin.called[function["name"]] = name.replace("Zq", REPEATED)
    standin.words[standin.called[function["name"]]] = Part("id", index, number, ("name",))
    standin.values[Part("id", index, number, ("name",))] = function["name"]
    if isinstance(arguments, str):
        arguments = standin.word(part, arguments) if arguments.strip() else arguments
    elif arguments:
        standin.values[part] = arguments
        if standin.any_arguments:
            words = [standin.word(Part("stand-in", index, number, (place,)), "") for place in range(2)]
            arguments = {words[0]: words[1]}
        else:
            arguments = _argument(standin, part, arguments, ())
        standin.whole[part] = arguments
    standin_call = {**call, "function": {**function, "name": name, "arguments": arguments}}
    if isinstance(call.get("id"), str) and call["id"].strip():
        standin_call["id"] = _id(standin, index, call["id"], number)
    return standin_call


def _argument(standin: StandIn, call: Part, value: Any, path: tuple[Any, ...]) -> Any:
    """Return a value of a call's arguments with a word for every key and text, and a number for everything else."""
    part = Part("argument", call.number, call.call, path)
    if isinstance(value, dict) and value:
        # Words rise in the order of the keys, since some templates sort them.
        words = {}
        for place, name in sorted(enumerate(value), key=lambda item: str(item[1]).lower()):
            words[name] = standin.word(part._replace(place=(*path, place, "key")), name) if str(name).strip() else name
        items = enumerate(value.items())
        standin_value: Any = {
            words[name]: _argument(standin, call, item, (*path, place)) for place, (name, item) in items
        }
    elif isinstance(value, list) and value:
        standin_value = [_argument(standin, call, item, (*path, place)) for place, item in enumerate(value)]
    elif isinstance(value, str):
        return standin.word(part, value) if value.strip() else value
    elif isinstance(value, (dict, list)):
        return value
    else:
        return standin.number(part, value)
    if path:
        standin.values[part] = value
        standin.whole[part] = standin_value
    return standin_value


def _tool(standin: StandIn, index: int, tool: dict[str, Any]) -> dict[str, Any]:
    part = Part("tool", index)
    inner = tool["function"] if isinstance(tool.get("function"), dict) else tool
    if not isinstance(inner.get("name"), str):
        return tool
    word = standin.word(part, tool)
    if standin.any_tools:
        function: dict[str, Any] = {
            "name": word,
            "description": "-",
            "parameters": {"type": "object", "properties": {}},
        }
    else:
        function = {**inner, "name": word}
    standin_tool = (
        function if inner is tool else {**({"type": "function"} if standin.any_tools else tool), "function": function}
    )
    standin.whole[part] = standin_tool
    return standin_tool
