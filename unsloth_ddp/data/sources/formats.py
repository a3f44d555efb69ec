"""Convert a row of any common chat format into an `Example`. Pure functions of plain values.

The columns of the row determine its format:

    messages                       OpenAI: a list of {"role", "content"}, with `tools` and tool_calls if there are any
    conversations                  ShareGPT: a list of {"from", "value"}
    instruction, [input,] output   Alpaca, with `history`, a list of [question, answer], if there is one
    prompt, completion             two texts, or two lists of messages
    text                           plain text, supervised completely

A `system` column adds a system message to every format except text, a column `images` or `image` the images
(images/values.py). Lists may also be JSON text, as in CSV files (messages_or_text); where such text may as well be an
answer, the row is refused (refuse_mixed).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from unsloth_ddp.data.images.values import COLUMNS as IMAGE_COLUMNS
from unsloth_ddp.data.images.values import MARKER, JoinedText, images_of_row, place_images
from unsloth_ddp.data.loss_columns import WRITE_FLAGS, loss_directions, with_loss_flags
from unsloth_ddp.data.sources.messages import (
    ROLES,
    SHAREGPT_ROLES,
    Message,
    is_loss_flag,
    read_message,
    read_sharegpt_turn,
    takes_part_in_loss,
)
from unsloth_ddp.data.sources.values import as_list, as_text, check_plain, from_json, is_empty, is_missing, kind_of
from unsloth_ddp.utils.errors import UserError

ACCEPTED = "messages; conversations; instruction, output (and input); prompt, completion; or text"
ANY_FIX = (
    "; give --columns OLD=NEW for other names (a question is instruction and its answer output, plain text is text), "
    "or write a chat as messages with role and content"
)
# Required columns of each format, in the order in which formats are tried -> optional columns.
FORMATS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("messages",): ("system", "system_prompt", "tools", "functions"),
    ("conversations",): ("system", "system_prompt", "tools", "functions"),
    ("instruction", "output"): ("input", "history", "system", "system_prompt", "tools", "functions"),
    ("prompt", "completion"): ("system", "system_prompt", "tools", "functions"),
    ("text",): (),
}
TURNS = {"messages": read_message, "conversations": read_sharegpt_turn}
# Columns with the label of an answer, which --task kto reads.
LABELS = ("label", "kto_tag")
MEDIA = ("video", "videos", "audio", "audios")
SHOWN_COLUMNS = 20
# Keys that make an object a message, of OpenAI's or ShareGPT's form.
MESSAGE_KEYS = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
# Keys of an object that holds messages.
CHAT_KEYS = ("messages", "conversations")
# Matches messages as Python or NumPy prints them.
PRINTED_MESSAGES = re.compile(
    r"\s*(\[\s*|\{\s*'(messages|conversations)':\s*\[\s*)?\{\s*'"
    r"(?=.*\b(role|from)': ['\"])(?=.*\b(content|value|tool_calls)': )",
    re.DOTALL,
)
# Names that other data sets have for the columns instruction and output.
QUESTIONS = ("instruction", "question", "query", "prompt", "user", "input")
ANSWERS = ("output", "answer", "response", "completion", "assistant", "target", "reply")


@dataclass
class Example:
    """A row that is ready to be tokenized, with either `messages` or `text`; it can be written as JSON.

    The first `prompt_messages` messages, or the first `prompt_chars` characters of the text, are the prompt: they are
    supervised only with --loss_on all. The messages with the indices `left_out` are never supervised. `parts` has the
    content parts of the messages that have several or an image, by the message's index; a part is text, or None for the
    next of the `images`, which are paths or data URIs. `unread` names the columns and keys of the row that were not
    read, and `template_values` has what the chat template is given beside messages and tools. Of a pair (preference.py)
    this is the chosen answer after its prompt, and `rejected` the other one; of a labelled answer, `desirable` is its
    label.
    """

    messages: list[Message] = field(default_factory=list)
    tools: list[Any] | None = None
    prompt_messages: int = 0
    text: str | None = None
    prompt_chars: int = 0
    left_out: list[int] = field(default_factory=list)
    parts: dict[str, list[str | None]] = field(default_factory=dict, compare=False, repr=False)
    images: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list, compare=False, repr=False)
    template_values: dict[str, Any] = field(default_factory=dict)
    rejected: Example | None = None
    desirable: bool | None = None

    def to_json(self) -> str:
        """Return the example as JSON."""
        # asdict() copies every value, which takes longer than all the rest.
        return json.dumps(vars(self), default=vars)

    @classmethod
    def from_json(cls, text: str) -> Example:
        """Return the example that was written as JSON."""
        values = json.loads(text)
        rejected = values.pop("rejected", None)
        return cls(**values, rejected=Example(**rejected) if rejected else None)


def to_example(row: Any) -> Example:
    """Convert a row.

    Raises:
        UserError: the row has none of the accepted formats, or a value is missing or of the wrong type.
    """
    if not isinstance(row, dict):
        if isinstance(row, list) and row and isinstance(row[0], dict):
            raise UserError("the row is a list of objects; if each is a row, name the file .json instead of .jsonl.")
        raise UserError(f"the row is {kind_of(row)}, not an object with columns; accepted columns: {ACCEPTED}.")
    # Tables fill missing columns of a row with null, pandas with NaN.
    whole_row, row = row, {name: value for name, value in row.items() if not is_missing(value)}
    # An empty column of images says that the row has none.
    row |= {name: [] for name in IMAGE_COLUMNS if name in whole_row and name not in row}
    if media := next((name for name in MEDIA if row.get(name)), None):
        raise UserError(f"the row has a column {media}; this kit trains on text and images only.")
    columns = _format_of(row)
    if columns in ((), ("text",)) and _speaker(row) in (*ROLES, *SHAREGPT_ROLES):
        raise UserError(
            "the row is one message, and a row is a whole chat; put its messages into a list named messages."
        )
    if not columns or ("chosen" in row and "rejected" in row):
        raise UserError(_refusal(whole_row, row))
    _refuse_undesired(row, columns)
    unread: list[str] = []
    read = {*columns, *FORMATS[columns], *IMAGE_COLUMNS}
    directions = loss_directions({name: value for name, value in row.items() if name not in read})
    if lists := [name for name, flags in directions.items() if isinstance(flags, list) and columns[0] not in TURNS]:
        raise UserError(f"the row has {lists[0]} as a list, which is read beside messages only; {WRITE_FLAGS}.")
    if len(columns) == 1 and (read_turn := TURNS.get(columns[0])):
        turns = with_loss_flags(as_list(row[columns[0]], columns[0]), directions)
        example = _chat(row, [], [read_turn(turn, unread) for turn in turns])
    elif columns == ("instruction", "output"):
        refuse_mixed(row, {"instruction": row["instruction"], "output": messages_or_text(row["output"], "output")})
        example = _chat(row, [], alpaca_turns(row))
    elif columns == ("prompt", "completion"):
        example = _prompt_and_completion(row, unread)
    else:
        _refuse_messages_in_text(row["text"])
        example = Example(text=as_text(row["text"], "text"))
    if example.text is not None and images_of_row(row):
        raise UserError("the row has images beside plain text, which has no place for them; write it as messages.")
    read -= {"tools", "functions"} if example.text is not None else set()
    read |= directions.keys()
    example.unread += sorted(set(unread))
    others = [name for name, value in row.items() if name not in read and not is_empty(value)]
    example.unread += [str(name)[:100] or "(no name)" for name in others]
    return example


def _refuse_undesired(row: dict[str, Any], columns: tuple[str, ...]) -> None:
    """Refuse an answer that preference data marks as not to learn, as KTO's label and LLaMA-Factory's kto_tag do."""
    for name in LABELS:
        # A CSV file holds text. Beside plain text, 0 is the number of a class.
        undesired = ("false",) if columns == ("text",) else ("false", "0", "0.0", "undesirable")
        if str(row.get(name)).strip().lower() in undesired:
            raise UserError(
                f"the row has {name} {str(row[name]).lower()}, which in KTO's format marks an answer not to learn; "
                "give --task kto, or remove such rows, or the column."
            )


def _refusal(row_with_nulls: dict[str, Any], row: dict[str, Any]) -> str:
    """Return why a row has none of the formats; `row` has no nulls."""
    if "chosen" in row_with_nulls and "rejected" in row_with_nulls:
        return (
            "the row is a preference pair (chosen, rejected); give --task dpo, or to learn only the chosen answer, "
            "--columns chosen=messages (a list) or chosen=completion (text)."
        )
    if null := next((name for name in _format_of(row_with_nulls) if is_missing(row_with_nulls[name])), None):
        return f"{null} is null; give it a value or remove the row."
    names = ", ".join(str(name)[:100] for name in list(row)[:SHOWN_COLUMNS]) or "none"
    more = f" and {len(row) - SHOWN_COLUMNS} more" if len(row) > SHOWN_COLUMNS else ""
    labelled = next((f"; with {name} it may be one for --task kto" for name in LABELS if name in row), "")
    return f"unknown columns ({names}{more}); accepted columns: {ACCEPTED}{fix(row) or ANY_FIX}{labelled}."


def fix(row: dict[str, Any]) -> str:
    """Return how to rename a column with a whole chat, or those of a question and its answer; "" without these."""
    for name, value in row.items():
        turns = messages_or_text(value, name) if isinstance(value, str) else value
        if isinstance(turns, list) and all(map(_looks_like_message, turns)) and len({*map(_speaker, turns)}) > 1:
            return f"; give --columns {name}=messages"
    questions, answers = ([name for name in row if str(name).lower() in names] for names in (QUESTIONS, ANSWERS))
    questions = ["instruction"] if "instruction" in row else questions
    if len(questions) != 1 or len(answers) != 1:
        return ""
    read = {*questions, *answers, *FORMATS["instruction", "output"], *IMAGE_COLUMNS, *LABELS}
    others = ", ".join(name for name, value in row.items() if isinstance(value, str) and value and name not in read)
    needed = f"; of the others ({others[:200]}) NAME=input adds what the question needs" if others else ""
    new_names = {questions[0]: "instruction", answers[0]: "output"}
    return "; give --columns " + " ".join(f"{name}={new}" for name, new in new_names.items() if name != new) + needed


def _speaker(turn: dict[str, Any]) -> str:
    return str(turn.get("role", turn.get("from")))


def _format_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the columns of the first format of which the row has all, or ()."""
    return next((columns for columns in FORMATS if all(name in row for name in columns)), ())


def alpaca_turns(row: dict[str, Any], question_column: str = "instruction") -> list[Message]:
    """Return the turns of an Alpaca row, its answer last; `question_column` is the column of its question."""
    context = as_text(row.get("input", ""), "input") if question_column != "input" else ""
    instruction = as_text(row[question_column], question_column)
    question = "\n\n".join(text for text in (instruction, context) if text.strip()) or instruction
    turns = [*_history(row), (question, as_text(row["output"], "output"))]
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]


def _history(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the earlier turns of an Alpaca row, as LLaMA-Factory has them."""
    if is_empty(row.get("history")):
        return []
    turns = as_list(row["history"], "history")
    if not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        raise UserError("history is not a list of [question, answer] pairs; fix or remove it.")
    return [(as_text(question, "history"), as_text(answer, "history")) for question, answer in turns]


def _prompt_and_completion(row: dict[str, Any], unread: list[str]) -> Example:
    read = {name: messages_or_text(row[name], name) for name in ("prompt", "completion")}
    refuse_mixed(row, read)
    lists = [name for name, value in read.items() if isinstance(value, list)]
    texts = [name for name, value in read.items() if isinstance(value, str) and value.strip() != "[]"]
    if lists and texts:
        raise UserError(
            f"{texts[0]} is text and {lists[0]} is a list of messages; make both text, or both lists of messages (JSON "
            "that is meant as text can stand as the content of a message)."
        )
    if lists:
        prompt, completion = ([read_message(m, unread) for m in as_list(read[name], name)] for name in read)
        # A whole conversation, as in pairs.
        begun = len(prompt) if completion[: len(prompt)] == prompt and len(completion) > len(prompt) else 0
        return _chat(row, prompt, completion[begun:])
    system = _system(row)
    prompt_text = (f"{system}\n\n" if system else "") + as_text(row["prompt"], "prompt")
    return Example(text=prompt_text + as_text(row["completion"], "completion"), prompt_chars=len(prompt_text))


def messages_or_text(value: Any, what: str) -> Any:
    """Return the messages of a list, a message, or an object of CHAT_KEYS, also as JSON text; other values as they are.

    Raises:
        UserError: the text is no JSON but messages as Python prints them, or gives a key twice; the value is a list of
            texts; an object with messages has other keys.
    """
    if isinstance(value, list) and (texts := [item for item in value if isinstance(item, str)]):
        raise UserError(
            f"{what} is a list of texts ({texts[0][:50]!r}{', ...' if len(value) > 1 else ''}); write it as one text, "
            "or as a list of messages with role and content."
        )
    if isinstance(value, dict):
        return _messages_of(value, what) or [value]
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    if PRINTED_MESSAGES.match(value):
        from_json(value, what)  # refuses it
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return value if _messages_of(parsed, what) is None else _messages_of(from_json(value, what), what)


def _messages_of(value: Any, what: str) -> list[Any] | None:
    """Return the messages of a message, a list of messages, or an object that holds one of them; None for other values.

    Raises:
        UserError: the object has other keys than its messages, which would be lost.
    """
    chat_key = next((key for key in CHAT_KEYS if value.get(key)), None) if isinstance(value, dict) else None
    items = value[chat_key] if chat_key else value
    items = [items] if isinstance(items, dict) else items
    if not isinstance(items, list) or not items or not all(map(_looks_like_message, items)):
        return None
    if chat_key and (
        others := [str(key)[:100] for key, item in value.items() if key != chat_key and not is_empty(item)]
    ):
        raise UserError(
            f"{what} is an object with {chat_key} and {', '.join(others)[:200]}; "
            f"give the list of {chat_key} alone, and the "
            "others as columns (JSON that is meant as text can stand as the content of a message)."
        )
    return items


def refuse_mixed(row: dict[str, Any], read: dict[str, Any]) -> None:
    """Refuse JSON text of messages beside columns that say that it may be meant as text: an answer that is JSON.

    It is read as messages beside other JSON text of messages, and where it is a whole conversation that repeats the
    texts beside it.

    Args:
        read: the columns of prompt and answers as messages_or_text returns them.
    """
    in_json = [name for name, value in read.items() if isinstance(row.get(name), str) and isinstance(value, list)]
    for name in in_json:
        if name in CHAT_KEYS:
            continue
        whole = _speaker(read[name][0]) in ("system", "developer", "user", "human")
        texts = {str(turn.get("content", turn.get("value"))).strip() for turn in read[name]} if whole else set()
        for other, value in read.items():
            is_text = isinstance(value, str) and value.strip() not in ("", "[]", *texts)
            is_list = isinstance(value, list) and other not in in_json
            if is_text or (is_list and not whole and name != "prompt"):
                form = "text" if is_text else "a list of messages"
                raise UserError(
                    f"{other} is {form} and {name} is a list of messages as JSON text; make both text, or both lists "
                    "of messages (JSON that is meant as text can stand as the content of a message)."
                )


def _refuse_messages_in_text(text: Any) -> None:
    """Refuse messages in the column text, which would be trained with their brackets."""
    if isinstance(text, str) and isinstance(messages_or_text(text, "text"), list):
        raise UserError("text is messages as JSON text; write the list of messages as a column messages.")


def _looks_like_message(item: Any) -> bool:
    return isinstance(item, dict) and any(names <= item.keys() for names in MESSAGE_KEYS)


def _system(row: dict[str, Any]) -> str:
    """Return the text of the system column, or "" without one."""
    columns = [name for name in ("system", "system_prompt") if not is_empty(row.get(name))]
    if len(columns) == 2 and row["system"] != row["system_prompt"]:
        raise UserError("the row has two different system prompts, in system and system_prompt; keep one of them.")
    return as_text(row[columns[0]], columns[0]) if columns else ""


def _chat(row: dict[str, Any], prompt: list[Message], rest: list[Message]) -> Example:
    messages = prompt + rest
    if not messages:
        raise UserError("the conversation is empty; remove the row.")
    flagged = {
        message["role"] for message in messages if any(value and is_loss_flag(name) for name, value in message.items())
    }
    trained = [takes_part_in_loss(message) for message in messages]
    learned = [
        keep for message, keep in zip(rest, trained[len(prompt) :], strict=True) if message["role"] == "assistant"
    ]
    if not any(learned):
        problem = "only assistant turns of weight 0" if learned else "no assistant turn to learn from"
        raise UserError(f"the conversation has {problem}; add one or remove the row.")
    unread = [f"weight, train or loss of {role} messages" for role in sorted(flagged - {"assistant"})]
    system = _system(row)
    if system and messages[0]["role"] == "system":
        unread += ["system beside another system message"] if messages[0]["content"] != system else []
    elif system:
        messages, trained = [{"role": "system", "content": system}, *messages], [True, *trained]
        prompt = prompt and messages[: len(prompt) + 1]
    left_out = [i for i, message in enumerate(messages) if message["role"] == "assistant" and not trained[i]]
    column = images_of_row(row)
    images = place_images(messages, column)
    if column is None and not images and any(MARKER in str(message["content"]) for message in messages):
        unread.append(f"{MARKER} in texts of rows without a column images")
    elif images and any(m["role"] == "assistant" and MARKER in str(m["content"]) for m in messages):
        unread.append(f"{MARKER} in answers, where it is text")
    contents = [(str(i), message["content"]) for i, message in enumerate(messages)]
    # JSON, in which examples are stored, has only texts as keys.
    parts = {
        i: text.parts for i, text in contents if isinstance(text, JoinedText) and (len(text.parts) > 1 or text.images)
    }
    return Example(messages, _tools(row), len(prompt), left_out=left_out, parts=parts, unread=unread, images=images)


def _tools(row: dict[str, Any]) -> list[Any] | None:
    """Return the tools of a row, from `tools` or OpenAI's older `functions`; None if there are none."""
    tools = as_list(row["tools"], "tools") if row.get("tools") else []
    if row.get("functions"):
        if tools:
            raise UserError("the row has tools and the older functions; keep one of them.")
        tools = [{"type": "function", "function": function} for function in as_list(row["functions"], "functions")]
    for tool in tools:
        if not isinstance(tool, dict):
            raise UserError(f"a tool is {kind_of(tool)}, not an object that describes a function.")
    check_plain(tools, "tools")
    return tools or None
