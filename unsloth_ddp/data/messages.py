"""Convert one message of OpenAI's or ShareGPT's format into the form that chat templates read."""

from __future__ import annotations

from typing import Any

from unsloth_ddp.data.values import as_list, as_text, check_plain, from_json, is_missing, kind_of, quoted
from unsloth_ddp.utils.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
# Roles that templates would not know or would drop: OpenAI's newer name for system, and its older name for tool.
RENAMED_ROLES = {"developer": "system", "function": "tool"}
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
# 0 or false on an assistant message excludes it from the loss: weight (OpenAI, axolotl), train (axolotl), loss (ms-swift).
LOSS_FLAGS = ("weight", "train", "loss")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Other content than text, which would be dropped silently, and the fix.
NOT_TRAINED = {
    "refusal": "move its text into content",
    "audio": "this kit trains on text only",
    "images": "this kit trains on text only",
    "train_detail": "only whole messages can be left out of the loss, with train or weight",
}

Message = dict[str, Any]


def read_message(message: Any) -> Message:
    """Convert a message of OpenAI's format; LOSS_FLAGS are kept (see `takes_part_in_loss`).

    Raises:
        UserError: it has no known role, no text content, or content that cannot be trained.
    """
    if not isinstance(message, dict):
        raise UserError(f"a message is {kind_of(message)}, not an object with role and content.")
    message = {str(name): value for name, value in message.items() if not is_missing(value)}
    role = message.get("role")
    if role is None:
        raise UserError(f"a message has no role; accepted: {', '.join(ROLES)}.")
    if not isinstance(role, str) or role not in (*ROLES, *RENAMED_ROLES):
        raise UserError(f"a message has {quoted(role)} as role; accepted: {', '.join(ROLES)}.")
    message["role"] = RENAMED_ROLES.get(role, role)
    _check_trained(message)
    _read_calls(message)
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = _text_parts(content)
    elif content is None and message.get("tool_calls"):
        message["content"] = ""
    elif content is None:
        raise UserError(f"a message of role {role} has no content; give it text or remove the row.")
    elif not isinstance(content, str):
        raise UserError(f"a message of role {role} has {kind_of(content)} as content, not text; write it as text.")
    check_plain(message, "a message")
    return message


def read_sharegpt_turn(turn: Any) -> Message:
    """Convert a turn of ShareGPT's format; a turn with a role is read as a message of OpenAI's format.

    Raises:
        UserError: see read_message.
    """
    if not isinstance(turn, dict):
        raise UserError(f"a turn of conversations is {kind_of(turn)}, not an object with from and value.")
    if turn.get("role") is not None:
        return read_message(turn)
    speaker = turn.get("from")
    if speaker is None:
        raise UserError(f"a turn of conversations has no from; accepted: {', '.join(SHAREGPT_ROLES)}.")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise UserError(
            f"a turn of conversations has {quoted(speaker)} as from; accepted: {', '.join(SHAREGPT_ROLES)}."
        )
    value = as_text(turn.get("value"), "value of a turn")
    rest = {name: item for name, item in turn.items() if name not in ("from", "value")}
    if speaker != "function_call":
        return read_message({**rest, "role": SHAREGPT_ROLES[speaker], "content": value})
    calls = from_json(value, "the value of a function_call turn")
    return read_message({**rest, "role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]})


def takes_part_in_loss(message: Message) -> bool:
    """Remove the LOSS_FLAGS from a message and return whether it is trained; without a flag it is.

    Raises:
        UserError: a flag is neither 0 nor 1, or two of them disagree.
    """
    given = {name: message.pop(name) for name in LOSS_FLAGS if name in message}
    for name, value in given.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise UserError(f"a message has {name} {str(value)[:20]}; only 0 (or false) and 1 (or true) are accepted.")
    if len({bool(value) for value in given.values()}) > 1:
        raise UserError(f"a message has {' and '.join(given)}, which disagree; keep one of them.")
    return all(given.values())


def _check_trained(message: Message) -> None:
    for name, fix in NOT_TRAINED.items():
        if message.get(name):
            raise UserError(f"a message has {name}, which is not trained; {fix}, or remove the row.")


def _read_calls(message: Message) -> None:
    """Convert tool calls to one form, and OpenAI's older function_call to a tool call."""
    if "function_call" in message:
        legacy = message.pop("function_call")
        if legacy and message.get("tool_calls"):
            raise UserError("a message has tool_calls and the older function_call; keep one of them.")
        if legacy:
            message["tool_calls"] = [legacy]
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call) for call in as_list(message["tool_calls"], "tool_calls")]
    if not message.get("tool_calls"):
        # Some templates ask only whether the key is there, and render an answer without calls as one with calls.
        message.pop("tool_calls", None)
    elif message["role"] != "assistant":
        raise UserError(f"a message of role {message['role']} has tool_calls; only assistant messages can have them.")


def _tool_call(call: Any) -> dict[str, Any]:
    """Convert a tool call, so that `function` holds the name, and arguments (JSON text with OpenAI) as an object."""
    if not isinstance(call, dict):
        raise UserError(f"a tool call is {kind_of(call)}, not an object.")
    function = call.get("function") or {"name": call.get("name"), "arguments": call.get("arguments")}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError("a tool call names no function; write {'function': {'name': ..., 'arguments': {...}}}.")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = from_json(arguments, "the value of a tool call's arguments")
    outer = {name: value for name, value in call.items() if name not in ("name", "arguments") and value is not None}
    return {**outer, "type": "function", "function": {**function, "arguments": arguments}}


def _text_parts(parts: list[Any]) -> str:
    """Join OpenAI's list of content parts; all of them must be text."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UserError(
                "a message has content parts that are not text; this kit trains on text only, so remove the row."
            )
    return "".join(part["text"] for part in parts)
