"""One row of any common chat format -> one `Example`. Pure functions of plain values.

The format is found from the row's columns:

    messages                       OpenAI: a list of {"role", "content"}, with `tools` and tool_calls if there are any
    conversations                  ShareGPT: a list of {"from", "value"}
    instruction, [input,] output   Alpaca
    prompt, completion             two texts, or two lists of messages
    text                           plain text, supervised as a whole

Lists may also be JSON text, the only way that a CSV file can hold them. A prompt or completion is such a list only if
every item of it is an object with role and content; other text that begins with a bracket stays text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from unsloth_ddp.utils.errors import UserError

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
DEEPEST = 50
# What to_csv makes of a list of objects.
PRINTED_BY_PYTHON = re.compile(r"\s*\[\s*\{\s*'")
SHOWN_COLUMNS = 20

Message = dict[str, Any]


@dataclass
class Example:
    """A row ready to be tokenized: either `messages` or `text` is given; all of it could be written as JSON.

    The first `prompt_messages` messages, or the first `prompt_chars` characters of the text, are the prompt: they are
    supervised only where everything is.
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
    given, row = row, {name: value for name, value in row.items() if value is not None}
    if "messages" in row:
        return _chat(row, [], [_message(m) for m in _list(row, "messages")])
    if "conversations" in row:
        system = [{"role": "system", "content": _text(row, "system")}] if row.get("system") else []
        return _chat(row, [], system + [_sharegpt(m) for m in _list(row, "conversations")])
    if "instruction" in row and "output" in row:
        context = _text(row, "input", default="")
        question = _text(row, "instruction") + (f"\n\n{context}" if context else "")
        turns = [("user", question), ("assistant", _text(row, "output"))]
        if row.get("system"):
            turns.insert(0, ("system", _text(row, "system")))
        return Example([{"role": role, "content": content} for role, content in turns])
    if "prompt" in row and "completion" in row:
        return _prompt_and_completion(row)
    if "text" in row:
        return Example(text=_text(row, "text"))
    if null := _null_column(given):
        raise UserError(f"{null} is null; give it a value or remove the row.")
    names = ", ".join(str(name)[:100] for name in list(row)[:SHOWN_COLUMNS]) or "none"
    more = f" and {len(row) - SHOWN_COLUMNS} more" if len(row) > SHOWN_COLUMNS else ""
    raise UserError(f"unknown columns ({names}{more}); accepted columns: {ACCEPTED}.")


def _null_column(row: dict[str, Any]) -> str | None:
    """The first null that keeps a row from an accepted shape whose other columns it has."""
    for shape in (("messages",), ("conversations",), ("instruction", "output"), ("prompt", "completion"), ("text",)):
        if all(name in row for name in shape):
            return next(name for name in shape if row[name] is None)
    return None


def _prompt_and_completion(row: dict[str, Any]) -> Example:
    read = {name: _messages_or_text(row[name]) for name in ("prompt", "completion")}
    lists = [name for name, value in read.items() if isinstance(value, list)]
    texts = [name for name, value in read.items() if isinstance(value, str) and value.strip() != "[]"]
    if lists and texts:
        written = "a list of messages" if isinstance(row[lists[0]], list) else "a list of messages as JSON text"
        raise UserError(
            f"{texts[0]} is text and {lists[0]} is {written}; make both text, or both lists of messages (JSON that is meant "
            "as text can stand as the content of a message)."
        )
    if lists:
        prompt = [_message(m) for m in _list(read, "prompt")]
        return _chat(row, prompt, [_message(m) for m in _list(read, "completion")])
    prompt_text = _text(row, "prompt")
    return Example(text=prompt_text + _text(row, "completion"), prompt_chars=len(prompt_text))


def _messages_or_text(value: Any) -> Any:
    """`value`, or the list of messages that it is the JSON text of."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        items = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return items if items and all(_looks_like_message(item) for item in items) else value


def _looks_like_message(item: Any) -> bool:
    return isinstance(item, dict) and "role" in item and ("content" in item or "tool_calls" in item)


def _chat(row: dict[str, Any], prompt: list[Message], rest: list[Message]) -> Example:
    if not prompt + rest:
        raise UserError("the conversation is empty; remove the row.")
    if not any(message["role"] == "assistant" for message in rest):
        raise UserError("the conversation has no assistant turn to learn from; add one or remove the row.")
    tools = _list(row, "tools") if row.get("tools") else None
    for tool in tools or []:
        if not isinstance(tool, dict):
            raise UserError(f"a tool is {_kind(tool)}, not an object that describes a function.")
    _check_plain(tools, "tools")
    return Example(prompt + rest, tools or None, prompt_messages=len(prompt))


def _message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"a message is {_kind(message)}, not an object with role and content.")
    message = {str(name): value for name, value in message.items() if value is not None}
    role = message.get("role")
    if role is None:
        raise UserError(f"a message has no role; accepted: {', '.join(ROLES)}.")
    if role not in ROLES:
        raise UserError(f"a message has {_quoted(role)} as role; accepted: {', '.join(ROLES)}.")
    if role == "developer":
        # OpenAI's newer name for it; most chat templates would drop a role they do not know without a word.
        message["role"] = "system"
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = _text_parts(content)
    elif content is None and message.get("tool_calls"):
        message["content"] = ""
    elif content is None:
        raise UserError(f"a message of role {role} has no content; give it text or remove the row.")
    elif not isinstance(content, str):
        raise UserError(f"a message of role {role} has {_kind(content)} as content, not text.")
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in _list(message, "tool_calls")]
    _check_plain(message, "a message")
    return message


def _tool_call(call: Any) -> dict[str, Any]:
    """A tool call as templates want it: inside `function`, its arguments an object (OpenAI has them as JSON text)."""
    if not isinstance(call, dict):
        raise UserError(f"a tool call is {_kind(call)}, not an object.")
    function = call.get("function") or {"name": call.get("name"), "arguments": call.get("arguments")}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError("a tool call names no function; write {'function': {'name': ..., 'arguments': {...}}}.")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = _json(arguments, "the value of a tool call's arguments")
    outer = {name: value for name, value in call.items() if name not in ("name", "arguments") and value is not None}
    return {**outer, "type": "function", "function": {**function, "arguments": arguments}}


def _text_parts(parts: list[Any]) -> str:
    """OpenAI's list of content parts, where all of them are text."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError("a message has content parts that are not text; this kit trains on text only.")
    return "".join(part["text"] for part in parts)


def _sharegpt(message: Any) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"a turn of conversations is {_kind(message)}, not an object with from and value.")
    if message.get("role") is not None:
        return _message(message)
    speaker = message.get("from")
    if speaker is None:
        raise UserError(f"a turn of conversations has no from; accepted: {', '.join(SHAREGPT_ROLES)}.")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise UserError(
            f"a turn of conversations has {_quoted(speaker)} as from; accepted: {', '.join(SHAREGPT_ROLES)}."
        )
    return {"role": SHAREGPT_ROLES[speaker], "content": _text(message, "value", what="value of a turn")}


def _list(row: dict[str, Any], name: str) -> list[Any]:
    value = row.get(name)
    if isinstance(value, str):
        value = _json(value, name)
    if not isinstance(value, list):
        raise UserError(f"{name} is {_kind(value)}, not a list.")
    return value


def _text(row: dict[str, Any], name: str, default: str | None = None, what: str | None = None) -> str:
    value = row.get(name, default)
    if not isinstance(value, str):
        raise UserError(f"{what or name} is {_kind(value)}, not text.")
    _check_plain(value, what or name)
    return value


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if PRINTED_BY_PYTHON.match(text):
            raise UserError(
                f"{what} is a list as Python or NumPy prints it, which is not JSON; write the table again as JSONL or Parquet "
                "(to_json(..., orient='records', lines=True), to_parquet), which keep lists."
            ) from None
        raise UserError(f"{what} is text that is not JSON; fix or remove it.") from None


def _check_plain(value: Any, what: str, depth: int = 0) -> None:
    """Refuse what JSON or a tokenizer cannot take: tables hold dates and bytes, JSON text may hold half characters."""
    if depth > DEEPEST:
        raise UserError(f"{what} is nested over {DEEPEST} levels deep; fix or remove it.")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UserError(f"{what} holds broken Unicode (half a surrogate pair); fix or remove it.") from None
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_plain(name, what, depth + 1)
            _check_plain(item, what, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item, what, depth + 1)
    elif not isinstance(value, (bool, int, float, type(None))):
        raise UserError(f"{what} holds a {type(value).__name__}, which is no JSON value; make it text or remove it.")


def _quoted(value: Any) -> str:
    return repr(value[:100]) if isinstance(value, str) else _kind(value)


def _kind(value: Any) -> str:
    names = {type(None): "missing", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")
