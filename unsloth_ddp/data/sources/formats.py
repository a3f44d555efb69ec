"""Convert a row of any common chat format into an `Example`. Pure functions of plain values.

The columns of the row determine its format:

    messages                       OpenAI: a list of {"role", "content"}, with `tools` and tool_calls if there are any
    conversations                  ShareGPT: a list of {"from", "value"}
    instruction, [input,] output   Alpaca, with `history`, a list of [question, answer], if there is one
    prompt, completion             two texts, or two lists of messages
    text                           plain text, supervised completely

A `system` column adds a system message to every format except text, a column `images` or `image` the images (images/values.py).
Lists may also be JSON text, as in CSV files. A prompt or completion counts as such a list only if every item has the keys of a
message; other text that begins with a bracket stays text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from unsloth_ddp.data.images.values import COLUMNS as IMAGE_COLUMNS
from unsloth_ddp.data.images.values import MARKER, JoinedText, images_of_row, place_images
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
    "or write a "
    "chat as messages with role and content"
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
# Begins messages as Python or NumPy prints them.
PRINTED_MESSAGES = re.compile(r"\s*(\[\s*)?\{\s*'(role|content|from|value)': ")
# Names that other data sets have for the columns instruction and output.
QUESTIONS = ("instruction", "question", "query", "prompt", "user", "input")
ANSWERS = ("output", "answer", "response", "completion", "assistant", "target", "reply")


@dataclass
class Example:
    """A row that is ready to be tokenized, with either `messages` or `text`; it can be written as JSON.

    The first `prompt_messages` messages, or the first `prompt_chars` characters of the text, are the prompt: they are
    supervised only with --loss_on all. The messages with the indices `left_out` are never supervised. `parts` has the content
    parts of the messages that have several or an image, by the message's index; a part is text, or None for the next of the
    `images`, which are paths or data URIs. `unread` names the columns and keys of the row that were not read. Of a pair
    (preference.py) this is the chosen answer after its prompt, and `rejected` the other one; of a labelled answer, `desirable` is
    its label.
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
    given, row = row, {name: value for name, value in row.items() if not is_missing(value)}
    # An empty column of images says that the row has none.
    row |= {name: [] for name in IMAGE_COLUMNS if name in given and name not in row}
    if media := next((name for name in MEDIA if row.get(name)), None):
        raise UserError(f"the row has a column {media}; this kit trains on text and images only.")
    columns = _format_of(row)
    if columns in ((), ("text",)) and _speaker(row) in (*ROLES, *SHAREGPT_ROLES):
        raise UserError(
            "the row is one message, and a row is a whole chat; put its messages into a list named messages."
        )
    if not columns or ("chosen" in row and "rejected" in row):
        raise UserError(_refusal(given, row))
    _refuse_undesired(row, columns)
    unread: list[str] = []
    if len(columns) == 1 and (read_turn := TURNS.get(columns[0])):
        example = _chat(row, [], [read_turn(turn, unread) for turn in as_list(row[columns[0]], columns[0])])
    elif columns == ("instruction", "output"):
        example = _chat(row, [], alpaca_turns(row))
    elif columns == ("prompt", "completion"):
        example = _prompt_and_completion(row, unread)
    else:
        example = Example(text=as_text(row["text"], "text"))
    if example.text is not None and images_of_row(row):
        raise UserError("the row has images beside plain text, which has no place for them; write it as messages.")
    read = {*columns, *FORMATS[columns], *IMAGE_COLUMNS} - (
        {"tools", "functions"} if example.text is not None else set()
    )
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
                f"the row has {name} {str(row[name]).lower()}, which in KTO's format marks an answer not to learn; give --task "
                "kto, or remove such rows, or the column."
            )


def _refusal(given: dict[str, Any], row: dict[str, Any]) -> str:
    """Return why a row has none of the formats; `row` is `given` without nulls."""
    if "chosen" in given and "rejected" in given:
        return (
            "the row is a preference pair (chosen, rejected); give --task dpo, or to learn only the chosen answer, "
            "--columns "
            "chosen=messages (a list) or chosen=completion (text)."
        )
    if null := next((name for name in _format_of(given) if is_missing(given[name])), None):
        return f"{null} is null; give it a value or remove the row."
    names = ", ".join(str(name)[:100] for name in list(row)[:SHOWN_COLUMNS]) or "none"
    more = f" and {len(row) - SHOWN_COLUMNS} more" if len(row) > SHOWN_COLUMNS else ""
    labelled = next((f"; with {name} it may be one for --task kto" for name in LABELS if name in row), "")
    return f"unknown columns ({names}{more}); accepted columns: {ACCEPTED}{fix(row) or ANY_FIX}{labelled}."


def fix(row: dict[str, Any]) -> str:
    """Return how to rename a column with a whole chat, or those of a question and its answer, or "" without such columns."""
    for name, value in row.items():
        turns = messages_or_text(value, name) if isinstance(value, str) else value
        if isinstance(turns, list) and all(map(_looks_like_message, turns)) and len({*map(_speaker, turns)}) > 1:
            return f"; give --columns {name}=messages"
    asked, answers = ([name for name in row if str(name).lower() in names] for names in (QUESTIONS, ANSWERS))
    asked = ["instruction"] if "instruction" in row else asked
    if len(asked) != 1 or len(answers) != 1:
        return ""
    read = {*asked, *answers, *FORMATS["instruction", "output"], *IMAGE_COLUMNS, *LABELS}
    others = ", ".join(name for name, value in row.items() if isinstance(value, str) and value and name not in read)
    needed = f"; of the others ({others[:200]}) NAME=input adds what the question needs" if others else ""
    wanted = {asked[0]: "instruction", answers[0]: "output"}
    return "; give --columns " + " ".join(f"{name}={new}" for name, new in wanted.items() if name != new) + needed


def _speaker(turn: dict[str, Any]) -> str:
    return str(turn.get("role", turn.get("from")))


def _format_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the columns of the first format of which the row has all, or ()."""
    return next((columns for columns in FORMATS if all(name in row for name in columns)), ())


def alpaca_turns(row: dict[str, Any], asked: str = "instruction") -> list[Message]:
    """Return the turns of an Alpaca row, its answer last; `asked` is the column of its question."""
    context = as_text(row.get("input", ""), "input") if asked != "input" else ""
    instruction = as_text(row[asked], asked)
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
    lists = [name for name, value in read.items() if isinstance(value, list)]
    texts = [name for name, value in read.items() if isinstance(value, str) and value.strip() != "[]"]
    if lists and texts:
        written = "a list of messages" + (" as JSON text" if isinstance(row[lists[0]], str) else "")
        raise UserError(
            f"{texts[0]} is text and {lists[0]} is {written}; make both text, or both lists of messages (JSON that is meant "
            "as text can stand as the content of a message)."
        )
    if lists:
        prompt, completion = ([read_message(m, unread) for m in as_list(read[name], name)] for name in read)
        return _chat(row, prompt, completion)
    system = _system(row)
    prompt_text = (f"{system}\n\n" if system else "") + as_text(row["prompt"], "prompt")
    return Example(text=prompt_text + as_text(row["completion"], "completion"), prompt_chars=len(prompt_text))


def messages_or_text(value: Any, what: str) -> Any:
    """Return a list of messages for a message, a list of them, or either as JSON text; any other value as it is.

    Raises:
        UserError: the text is no JSON but messages as Python prints them, or gives a key twice; the value is a list of texts.
    """
    if isinstance(value, list) and (texts := [item for item in value if isinstance(item, str)]):
        raise UserError(
            f"{what} is a list of texts ({texts[0][:50]!r}{', ...' if len(value) > 1 else ''}); write it as one text, or as a list of "
            "messages with role and content."
        )
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        if PRINTED_MESSAGES.match(value):
            from_json(value, what)  # refuses it
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        items = found if isinstance(found, list) else [found]
        value = from_json(value, what) if items and all(map(_looks_like_message, items)) else value
    return [value] if isinstance(value, dict) else value


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
        found = "only assistant turns of weight 0" if learned else "no assistant turn to learn from"
        raise UserError(f"the conversation has {found}; add one or remove the row.")
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
        tools = [{"type": "function", "function": one} for one in as_list(row["functions"], "functions")]
    for tool in tools:
        if not isinstance(tool, dict):
            raise UserError(f"a tool is {kind_of(tool)}, not an object that describes a function.")
    check_plain(tools, "tools")
    return tools or None
