"""One row of any common chat format -> one `Example`. Pure functions of plain values.

The format is found from the row's columns:

    messages                       OpenAI: a list of {"role", "content"}, with `tools` and tool_calls if there are any
    conversations                  ShareGPT: a list of {"from", "value"}
    instruction, [input,] output   Alpaca
    prompt, completion             two texts, or two lists of messages
    text                           plain text, supervised as a whole
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from unsloth_ddp.errors import UserError

ACCEPTED = "messages; conversations; instruction, output (and input); prompt, completion; or text"
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}

Message = dict[str, Any]


@dataclass
class Example:
    """A row ready to be tokenized: either `messages` or `text` is given.

    The first `prompt_messages` messages, or the first `prompt_chars` characters of the text, are never supervised.
    """

    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    prompt_messages: int = 0
    text: str | None = None
    prompt_chars: int = 0


def to_example(row: Any) -> Example:
    """The example a row stands for.

    Raises:
        UserError: the row has none of the accepted shapes, or a value of its shape is missing or of a wrong type.
    """
    if not isinstance(row, dict):
        raise UserError(f"the row is {_kind(row)}, not an object with columns; accepted columns: {ACCEPTED}.")
    # Tables fill the columns that a row lacks with nulls.
    row = {name: value for name, value in row.items() if value is not None}
    if "messages" in row:
        return _checked(Example([_message(m) for m in _list(row, "messages")], _tools(row)))
    if "conversations" in row:
        return _checked(Example([_sharegpt(m) for m in _list(row, "conversations")], _tools(row)))
    if "instruction" in row and "output" in row:
        context = _text(row, "input", default="")
        question = _text(row, "instruction") + (f"\n\n{context}" if context else "")
        turns = [("user", question), ("assistant", _text(row, "output"))]
        if "system" in row:
            turns.insert(0, ("system", _text(row, "system")))
        return Example([{"role": role, "content": content} for role, content in turns])
    if "prompt" in row and "completion" in row:
        return _prompt_completion(row)
    if "text" in row:
        return Example(text=_text(row, "text"))
    raise UserError(f"unknown columns ({', '.join(map(str, row)) or 'none'}); accepted columns: {ACCEPTED}.")


def _prompt_completion(row: dict[str, Any]) -> Example:
    if isinstance(row["prompt"], list) or isinstance(row["completion"], list):
        prompt = [_message(m) for m in _list(row, "prompt")]
        completion = [_message(m) for m in _list(row, "completion")]
        return _checked(Example(prompt + completion, _tools(row), prompt_messages=len(prompt)))
    prompt_text = _text(row, "prompt")
    return Example(text=prompt_text + _text(row, "completion"), prompt_chars=len(prompt_text))


def _message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"a message is {_kind(message)}, not an object with role and content.")
    message = {name: value for name, value in message.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise UserError(f"a message has the role {role!r}; accepted: {', '.join(ROLES)}.")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = _text_parts(content)
    elif content is None and message.get("tool_calls"):
        message["content"] = ""
    elif not isinstance(content, str):
        raise UserError(f"a message of role {role} has {_kind(content)} as content, not text.")
    if "tool_calls" in message:
        message["tool_calls"] = [_tool_call(call) for call in _list(message, "tool_calls")]
    return message


def _tool_call(call: Any) -> Any:
    """A tool call whose arguments are an object: OpenAI stores them as JSON text, templates want the object."""
    if not isinstance(call, dict):
        raise UserError(f"a tool call is {_kind(call)}, not an object.")
    function = call.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        try:
            call = {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
        except json.JSONDecodeError:
            raise UserError("the arguments of a tool call are not JSON.") from None
    return call


def _text_parts(parts: list[Any]) -> str:
    """OpenAI's list of content parts, where all of them are text."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError("a message has content parts that are not text; this kit trains on text only.")
    return "".join(part["text"] for part in parts)


def _sharegpt(message: Any) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"a turn of conversations is {_kind(message)}, not an object with from and value.")
    if "role" in message:
        return _message(message)
    speaker = message.get("from")
    if speaker not in SHAREGPT_ROLES:
        raise UserError(f"a turn of conversations is from {speaker!r}; accepted: {', '.join(SHAREGPT_ROLES)}.")
    if not isinstance(message.get("value"), str):
        raise UserError(f"a turn of conversations has {_kind(message.get('value'))} as value, not text.")
    return {"role": SHAREGPT_ROLES[speaker], "content": message["value"]}


def _checked(example: Example) -> Example:
    if not example.messages:
        raise UserError("the conversation is empty.")
    if not any(m["role"] == "assistant" for m in example.messages[example.prompt_messages :]):
        raise UserError("the conversation has no assistant turn to learn from.")
    return example


def _tools(row: dict[str, Any]) -> list[Any] | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError:
            raise UserError("tools is text that is not JSON.") from None
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"tools is {_kind(tools)}, not a list.")
    return tools or None


def _list(row: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(row.get(name), list):
        raise UserError(f"{name} is {_kind(row.get(name))}, not a list.")
    return row[name]


def _text(row: dict[str, Any], name: str, default: str | None = None) -> str:
    value = row.get(name, default)
    if not isinstance(value, str):
        raise UserError(f"{name} is {_kind(value)}, not text.")
    return value


def _kind(value: Any) -> str:
    names = {type(None): "missing", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")
