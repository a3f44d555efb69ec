"""Convert one message of OpenAI's or ShareGPT's format into the form that chat templates read."""

import re
from functools import cache
from typing import Any

from unsloth_ddp.data.images.values import PART_KEYS, JoinedText, image_of_part, is_image_part, take_images
from unsloth_ddp.data.sources.values import (
    as_list,
    as_text,
    check_plain,
    from_json,
    is_empty,
    is_missing,
    kind_of,
    quoted,
)
from unsloth_ddp.utils.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
# Roles that templates would not know or would drop: OpenAI's newer name for system, and its older name for tool.
RENAMED_ROLES = {"developer": "system", "function": "tool"}
SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "function_call": "assistant",
    "system": "system", "tool": "tool", "observation": "tool",
}  # fmt: skip
# A key of these words alone says whether a message takes part in the loss: weight (OpenAI, axolotl), train (axolotl),
# loss (ms-swift), trainable, loss_weight, is_training.
LOSS_WORDS = {
    "weight", "weights", "train", "training", "trainable", "trained", "loss", "supervise", "supervised", "learn",
}  # fmt: skip
LINK_WORDS = {"is", "in", "on", "do", "has", "for", "from", "include", "included", "compute"}
# Such a word beside others, or one of these, may mean a part of the message, or the opposite.
LEFT_OUT_WORDS = {"mask", "masked", "ignore", "ignored", "exclude", "excluded", "skip", "skipped"}
MASK_WORDS = LEFT_OUT_WORDS | {"no", "not", "detail", "details"}
# Of a column, they say which parts of the row are meant.
SCOPE_WORDS = {
    "history", "prompt", "prompts", "input", "inputs", "output", "outputs", "turn", "turns", "message", "messages",
    "role", "roles", "response", "responses", "completion", "completions", "assistant", "user", "system", "last",
    "first", "only", "all", "tokens",
}  # fmt: skip
PLAIN = {"role", "content"}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Other content than text, which would be dropped silently, and the fix.
NOT_TRAINED = {
    "refusal": "move its text into content",
    "audio": "this kit trains on text and images only",
}
# Keys that hold the arguments of a call: OpenAI's, Llama 3.1's, Anthropic's, and others'.
ARGUMENT_KEYS = ("arguments", "parameters", "input", "args", "kwargs")
# Keys of a call beside its function; those that templates print are kept.
KEPT_CALL_KEYS = ("id", "index")
CALL_KEYS = (*KEPT_CALL_KEYS, "type", "function")
# Types of content parts with text, of OpenAI's two interfaces.
TEXT_TYPES = ("text", "input_text", "output_text")
THINK = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)

Message = dict[str, Any]


@cache
def is_loss_flag(key: str) -> bool:
    """Return whether a key of a message says whether it takes part in the loss.

    Raises:
        UserError: it seems to, but may mean something else.
    """
    words = _words(key)
    if words & LOSS_WORDS and words <= LOSS_WORDS | LINK_WORDS:
        return True
    if words & (LOSS_WORDS | MASK_WORDS) and words <= LOSS_WORDS | LINK_WORDS | MASK_WORDS:
        raise UserError(
            f"a message has {key[:100]}, which is not read; only whole messages can be left out of the loss, with "
            "weight: 0 or train: false."
        )
    return False


def directs_loss(column: str) -> bool:
    """Return whether the name of a column says what of the row is learned: loss_mask, skip, mask_history."""
    words = _words(column)
    directs = words & (LOSS_WORDS | LEFT_OUT_WORDS)
    return bool(directs) and words <= LOSS_WORDS | LINK_WORDS | MASK_WORDS | SCOPE_WORDS


def _words(key: str) -> frozenset[str]:
    return frozenset(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", key[:100]))


def read_message(message: Any, unread: list[str]) -> Message:
    """Convert a message of OpenAI's format, or one of ShareGPT's; loss flags are kept (see `takes_part_in_loss`).

    Args:
        unread: the names of keys inside the message that are not read are added here.

    Raises:
        UserError: it has no known role, no text content, or content that cannot be trained.
    """
    if not isinstance(message, dict):
        raise UserError(f"a message is {kind_of(message)}, not an object with role and content.")
    message = {str(name): value for name, value in message.items() if not is_missing(value)}
    role = message.get("role")
    if role is None and "from" in message:
        return read_sharegpt_turn(message, unread)
    if role is None:
        raise UserError(f"a message has no role; accepted: {', '.join(ROLES)}.")
    if not isinstance(role, str) or role not in (*ROLES, *RENAMED_ROLES):
        raise UserError(f"a message has {quoted(role)} as role; accepted: {', '.join(ROLES)}.")
    message["role"] = RENAMED_ROLES.get(role, role)
    if message.keys() == PLAIN and isinstance(message["content"], str):
        # Most messages; there may be millions.
        check_plain(message["content"], "a message")
        return message
    for name, fix in NOT_TRAINED.items():
        if message.get(name):
            raise UserError(f"a message has {name}, which is not trained; {fix}, or remove the row.")
    if message.get("channel") == "analysis":
        raise UserError(
            "a message has channel analysis: it is reasoning, and would be trained as an answer; move its text into "
            "thinking of the assistant message after it, and remove it."
        )
    _read_calls(message, unread)
    _read_reasoning(message)
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = _joined_parts(content, unread)
    elif content is None and message.get("tool_calls"):
        message["content"] = ""
    elif content is None:
        raise UserError(f"a message of role {role} has no content; give it text or remove the row.")
    elif not isinstance(content, str):
        raise UserError(f"a message of role {role} has {kind_of(content)} as content, not text; write it as text.")
    take_images(message)
    check_plain(message, "a message")
    return message


def read_sharegpt_turn(turn: Any, unread: list[str]) -> Message:
    """Convert a turn of ShareGPT's format; a turn with a role is read as a message of OpenAI's format.

    Raises:
        UserError: see read_message.
    """
    if not isinstance(turn, dict):
        raise UserError(f"a turn of conversations is {kind_of(turn)}, not an object with from and value.")
    if turn.get("role") is not None:
        return read_message(turn, unread)
    speaker = turn.get("from")
    if speaker is None:
        raise UserError(f"a turn of conversations has no from; accepted: {', '.join(SHAREGPT_ROLES)}.")
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        raise UserError(
            f"a turn of conversations has {quoted(speaker)} as from; accepted: {', '.join(SHAREGPT_ROLES)}."
        )
    value = as_text(turn.get("value"), "value of a turn")
    rest = {name: item for name, item in turn.items() if name not in ("from", "value")}
    if speaker != "function_call" and rest.get("content") not in (None, "", value):
        raise UserError("a turn of conversations has value and content, which differ; keep one of them.")
    if speaker != "function_call":
        return read_message({**rest, "role": SHAREGPT_ROLES[speaker], "content": value}, unread)
    calls = from_json(value, "the value of a function_call turn")
    calls = calls if isinstance(calls, list) else [calls]
    return read_message({**rest, "role": "assistant", "tool_calls": calls}, unread)


def takes_part_in_loss(message: Message) -> bool:
    """Remove the loss flags from a message and return whether it is trained; without a flag it is.

    Raises:
        UserError: a flag is neither 0 nor 1, or two of them disagree.
    """
    if message.keys() == PLAIN:
        return True
    filled = {
        name: message.pop(name)
        for name in sorted(message, reverse=True)
        if not is_empty(message[name]) and is_loss_flag(name)
    }
    for name, value in filled.items():
        _check_flag(name, value, "a message")
    if len({bool(value) for value in filled.values()}) > 1:
        raise UserError(f"a message has {' and '.join(filled)}, which disagree; keep one of them.")
    return all(filled.values())


def _check_flag(name: str, value: Any, what: str) -> None:
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        shown = quoted(value) if isinstance(value, str) else str(value)[:20]
        raise UserError(f"{what} has {name} {shown}; only 0 (or false) and 1 (or true) are accepted.")


def _read_others(keys: dict[str, Any], what: str, kind: str, unread: list[str]) -> None:
    """Note the keys of a part of a message that are not read, and refuse a flag that leaves the part out of the loss.

    Args:
        what, kind: the word for the part, and for all of its kind.

    Raises:
        UserError: there is such a flag, or its value is neither 0 nor 1.
    """
    for name, value in keys.items():
        if not is_loss_flag(name):
            unread.append(f"{name[:100]} of {kind}")
            continue
        if is_empty(value):
            continue
        _check_flag(name, value, what)
        if not value:
            raise UserError(
                f"{what} has {name[:100]} 0 or false; only whole messages can be left out of the loss, so write the "
                "parts as messages of their own, or remove the row."
            )


def _read_calls(message: Message, unread: list[str]) -> None:
    """Convert tool calls to one form, and OpenAI's older function_call to a tool call."""
    if legacy := message.pop("function_call", None):
        if message.get("tool_calls"):
            raise UserError("a message has tool_calls and the older function_call; keep one of them.")
        message["tool_calls"] = [legacy]
    if message.get("tool_calls"):
        message["tool_calls"] = [_tool_call(call, unread) for call in as_list(message["tool_calls"], "tool_calls")]
    if not message.get("tool_calls"):
        # Some templates ask only whether the key is there, and render an answer without calls as one with calls.
        message.pop("tool_calls", None)
    elif message["role"] != "assistant":
        raise UserError(f"a message of role {message['role']} has tool_calls; only assistant messages can have them.")


def _read_reasoning(message: Message) -> None:
    """Remove reasoning that a message gives twice.

    Raises:
        UserError: it is not text, or two of its keys differ.
    """
    for key in REASONING_KEYS:
        if message.get(key) in ([], {}):
            del message[key]
        if not isinstance(message.get(key, ""), str):
            raise UserError(
                f"a message has {kind_of(message[key])} as {key}, not text; write it as text, or remove it."
            )
    filled = [key for key in REASONING_KEYS if message.get(key, "").strip()]
    if len({message[key].strip() for key in filled}) > 1:
        raise UserError(f"a message has {' and '.join(filled)}, which differ; keep one of them.")
    content = message.get("content")
    block = THINK.match(content) if filled and isinstance(content, str) else None
    repeated = filled if block and block[1].strip() == message[filled[0]].strip() else filled[1:]
    for key in repeated:
        del message[key]


def _tool_call(call: Any, unread: list[str]) -> dict[str, Any]:
    """Convert a tool call, so that `function` holds the name, and arguments (JSON text with OpenAI) as an object."""
    if not isinstance(call, dict):
        raise UserError(f"a tool call is {kind_of(call)}, not an object.")
    call = {str(name): value for name, value in call.items() if not is_missing(value)}
    inner = call.get("function") or None
    if isinstance(inner, str):
        inner = {"name": inner}
    outer = {name: value for name, value in call.items() if name not in CALL_KEYS}
    function = {str(name): value for name, value in inner.items()} if isinstance(inner, dict) else {}
    for name, value in outer.items():
        if not is_empty(function.get(name)) and function[name] != value:
            raise UserError(
                f"a tool call has {name[:100]} twice, beside function and in it, which differ; keep one of them."
            )
    function = {name: value for name, value in {**outer, **function}.items() if not is_missing(value)}
    if not isinstance(function.get("name"), str):
        raise UserError("a tool call names no function; write {'function': {'name': ..., 'arguments': {...}}}.")
    read_function = {"name": function["name"], "arguments": _arguments(function)}
    others = {name: value for name, value in function.items() if name not in ("name", "type", *ARGUMENT_KEYS)}
    _read_others(others, "a tool call", "tool calls", unread)
    return {
        **{name: call[name] for name in KEPT_CALL_KEYS if name in call},
        "type": "function",
        "function": read_function,
    }


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call as an object.

    Raises:
        UserError: they are given twice, under an unknown key, or not as an object.
    """
    name = f"the call of {function['name'][:100]}"
    filled = {key: function[key] for key in ARGUMENT_KEYS if not is_empty(function.get(key))}
    read = {
        key: from_json(value, f"the value of a tool call's {key}") if isinstance(value, str) else value
        for key, value in filled.items()
    }
    if len(read) > 1 and any(value != next(iter(read.values())) for value in read.values()):
        raise UserError(f"{name} has {' and '.join(read)}, which differ; keep one of them.")
    unknown = [key for key, value in function.items() if key not in ARGUMENT_KEYS and _may_be_arguments(value)]
    if not read and unknown:
        raise UserError(f"{name} has {unknown[0][:100]}, but no arguments; rename {unknown[0][:100]} to arguments.")
    arguments: Any = next(iter(read.values()), {})
    if not isinstance(arguments, dict):
        raise UserError(
            f"{next(iter(read))} of {name} is {kind_of(arguments)}, not an object; write {{'name of the argument': "
            "value}."
        )
    return arguments


def _may_be_arguments(value: Any) -> bool:
    return isinstance(value, (dict, list)) or (isinstance(value, str) and value.lstrip().startswith("{"))


def _joined_parts(parts: list[Any], unread: list[str]) -> str:
    """Join OpenAI's list of content parts; each is text or an image."""
    joined: list[str | None] = []
    images: list[str | int | None] = []
    for part in parts:
        if is_image_part(part):
            if not is_empty(part.get("text")):
                raise UserError(
                    f"a message has an image part with text beside it ({quoted(str(part['text']))}); write the text as "
                    "a part of its own, {'type': 'text', 'text': ...}, before or after the image."
                )
            images.append(image_of_part(part))
            joined.append(None)
            read, kind = {*PART_KEYS, "index", "type", "text"}, "image parts"
        elif isinstance(part, dict) and part.get("type", "text") in TEXT_TYPES and isinstance(part.get("text"), str):
            joined.append(part["text"])
            read, kind = {"type", "text"}, "content parts"
        else:
            shown = f"of type {quoted(part['type'])}" if isinstance(part, dict) and "type" in part else kind_of(part)
            raise UserError(
                f"a message has a content part ({shown}) that is neither {{'type': 'text', 'text': ...}} nor {{'type': "
                "'image', 'image': ...}; this kit trains on text and images only, so write it in one of these forms, "
                "or remove the row."
            )
        others = {str(key): value for key, value in part.items() if key not in read and not is_empty(value)}
        _read_others(others, "a content part", kind, unread)
    return JoinedText(joined, images)
