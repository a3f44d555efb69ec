"""Convert a row with a chosen and a rejected answer into a pair, and a row with a labelled answer into an example.

A pair is two examples with the same prompt:

    prompt, chosen, rejected                  texts, or lists of messages (TRL)
    chosen, rejected                          whole conversations or texts with the same prompt (TRL, UltraFeedback)
    conversations or messages, and both       the prompt, and one answer each (LLaMA-Factory's ShareGPT form, axolotl)
    instruction or question, [input,] both    Alpaca (LLaMA-Factory), Intel's form (axolotl), with any `history`

The two answers may be named chosen_response and rejected_response. A labelled answer has a column label or kto_tag:

    prompt, completion                        texts, or lists of messages (TRL)
    completion                                a whole conversation (axolotl's argilla_chat)
    conversations or messages                 a whole conversation; the label is of its last answer (LLaMA-Factory)
    instruction or question, [input,] output  Alpaca (LLaMA-Factory, axolotl), with `history` if there is one

Each answer becomes a row of formats.py, so that roles, tool calls, system prompts and texts are read and refused in the
same way as in any other row.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from unsloth_ddp.config.task_options import PAIR_TASKS
from unsloth_ddp.data.images.values import COLUMNS as IMAGE_COLUMNS
from unsloth_ddp.data.selection import renamed
from unsloth_ddp.data.sources.formats import (
    FORMATS,
    LABELS,
    QUESTIONS,
    Example,
    alpaca_turns,
    fix,
    messages_or_text,
    refuse_mixed,
    to_example,
)
from unsloth_ddp.data.sources.messages import RENAMED_ROLES, read_sharegpt_turn
from unsloth_ddp.data.sources.values import as_list, as_text, is_empty, is_missing, kind_of
from unsloth_ddp.utils.errors import UserError

ANSWERS = ("chosen", "rejected")
# Keys of messages and calls that each sample of one history may have anew.
IDS = ("id", "tool_call_id")
# Other names of the columns.
RENAMED = {"chosen_response": "chosen", "rejected_response": "rejected"}
# Columns of the prompt; the others are passed on.
CHATS = ("conversations", "messages")
ASKED = ("instruction", "question", "input")
PROMPTS = ("prompt", *CHATS, *ASKED, "history")
BESIDE = "prompt, messages, conversations or instruction beside them, or as whole conversations"
ACCEPTED = f"chosen and rejected, with {BESIDE}"

# Values of the label, and names of the labelled answer.
DESIRABLE = {"true": True, "1": True, "1.0": True, "desirable": True,
             "false": False, "0": False, "0.0": False, "undesirable": False}  # fmt: skip
LABELLED = ("completion", "output", "response")
ACCEPTED_LABELLED = (
    "label (true or false) beside prompt and completion, messages, conversations, or instruction and output"
)
# Names that --columns may give: those of all formats of all tasks.
READ_COLUMNS = sorted(
    {
        *(name for columns in FORMATS.items() for names in columns for name in names),
        *(*ANSWERS, *PROMPTS, *LABELLED, *LABELS, *IMAGE_COLUMNS),
    }
)


def converter(task: str, columns: Sequence[str] = ()) -> Callable[[Any], Example]:
    """Return the function that converts a row for a task, after renaming columns as --columns says."""
    convert = to_labelled if task == "kto" else to_pair if task in PAIR_TASKS else to_example
    names = dict(pair.split("=", 1) for pair in columns)
    return (lambda row: convert(renamed(row, names))) if names else convert


def to_pair(row: Any) -> Example:
    """Convert a row.

    Raises:
        UserError: the row is no pair, or one of its answers cannot be read.
    """
    whole_row, row = row, _renamed(row, f"a pair has {ACCEPTED}")
    for name in ANSWERS:
        _check_answer(row, name)
    if missing := [name for name in ANSWERS if name not in row]:
        raise UserError(_refusal(whole_row, row, missing))
    read, halves = _halves(row)
    chosen, rejected = (
        _read(name, {**_rest(row, ANSWERS), **half}) for name, half in zip(ANSWERS, halves, strict=True)
    )
    chosen.unread += [name for name in rejected.unread if name not in chosen.unread]
    chosen.unread += _not_shown(row, (*PROMPTS, "completion"), read, chosen)
    rejected.unread = []
    return dataclasses.replace(chosen, rejected=rejected)


def to_labelled(row: Any) -> Example:
    """Convert a row with an answer and its label.

    Raises:
        UserError: the row has no label, or its answer cannot be read.
    """
    row = _renamed(row, f"a labelled answer has {ACCEPTED_LABELLED}")
    if "chosen" in row and "rejected" in row:
        raise UserError("the row is a preference pair (chosen, rejected); give --task dpo.")
    labels = {name: DESIRABLE.get(str(row[name]).strip().lower()) for name in LABELS if name in row}
    if not labels:
        raise UserError(
            "the row has no label, which --task kto learns from; add a column label (true or false), or learn all "
            "answers with --task sft."
        )
    for column, desirable in labels.items():
        if desirable is None:
            raise UserError(
                f"{column} is {str(row[column])[:50]!r}, and a label is true (desirable) or false (undesirable); "
                "correct it or remove the row."
            )
    if len(set(labels.values())) > 1:
        raise UserError("the row has label and kto_tag, which disagree; keep one of them.")
    read, answer = _labelled_answer(row)
    example = to_example({**_rest(row, (*LABELS, *LABELLED)), **answer})
    example.unread += _not_shown(row, PROMPTS, read, example)
    return dataclasses.replace(example, desirable=desirable)


def _labelled_answer(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the column of the prompt, and the prompt and the completion of a labelled row."""
    filled = [name for name in LABELLED if name in row]
    filled = [name for name in filled if not is_empty(row[name])] or filled
    for name in filled:
        _check_answer(row, name)
    answer = messages_or_text(row[filled[0]], filled[0]) if filled else None
    _refuse_several([name for name in filled if row[name] != row[filled[0]]], filled)
    column, prompt = _prompt(row)
    refuse_mixed(row, {column: row[column] if column in ASKED else prompt, **dict.fromkeys(filled[:1], answer)})
    if column in CHATS:
        if answer is None:
            return column, _last_answer(prompt)
        if prompt and _role(prompt[-1]) == "assistant":
            _refuse_several([column], [filled[0], column])
    if answer is None:
        raise UserError(f"the row has a label and no answer; it needs {ACCEPTED_LABELLED}{fix(row)}.")
    if prompt is None:
        if isinstance(answer, list):
            return column, _last_answer(_turns(answer))
        _refuse_other_name(row)
        raise UserError(f"the row has an answer and no prompt; it needs {ACCEPTED_LABELLED}.")
    if isinstance(prompt, str) and isinstance(answer, str):
        return column, {"prompt": prompt, "completion": answer}
    question = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if question and _is_within(question, turns := _turns(answer)):
        return column, _last_answer(turns)
    rest = _without(question, _turns(answer))
    begin = next((i for i, turn in enumerate(rest) if _role(turn) == "assistant"), 0)
    question, rest = question + rest[:begin], rest[begin:]
    _check_one_question(question, {filled[0]: rest})
    return column, {"prompt": question, "completion": rest}


def _check_answer(row: dict[str, Any], name: str) -> None:
    """Refuse a column that cannot be an answer."""
    if name in row and not isinstance(row[name], str | dict | list):
        raise UserError(
            f"{name} is {kind_of(row[name])}, and an answer is text, a message or a list of messages; write it as one "
            "of them."
        )


def _refuse_several(others: list[str], columns: list[str]) -> None:
    if others:
        raise UserError(
            f"the row has an answer in {' and in '.join(columns)}, and its label is about one of them; "
            f"remove the others."
        )


def _last_answer(turns: list[Any]) -> dict[str, Any]:
    """Return a conversation as the prompt and its last assistant turn, which the label is about."""
    answers = [i for i, turn in enumerate(turns) if _role(turn) == "assistant"]
    if not answers:
        raise UserError(
            "the conversation has no assistant turn that the label could be about; add one or remove the row."
        )
    if not answers[-1]:
        raise UserError("the conversation begins with the answer, without a prompt; add one or remove the row.")
    return {"prompt": turns[: answers[-1]], "completion": turns[answers[-1] :]}


def _renamed(row: Any, needed: str) -> dict[str, Any]:
    """Return the columns that have a value, by the names that are used here."""
    if not isinstance(row, dict):
        raise UserError(f"the row is {kind_of(row)}, not an object with columns; {needed}.")
    row = {name: value for name, value in row.items() if not is_missing(value)}
    for other, name in RENAMED.items():
        if other in row and name not in row:
            _check_answer(row, other)
            row[name] = row.pop(other)
    return row


def _refusal(whole_row: dict[str, Any], row: dict[str, Any], missing: list[str]) -> str:
    if any(label in row for label in LABELS) and len(missing) == 2:
        return f"the row is one answer with a label; give --task kto, or write pairs, which have {ACCEPTED}."
    if len(missing) == 1:
        return f"the row has no {missing[0]} answer beside the other; add it or remove the row."
    try:
        to_example(row)
    except UserError:
        return (
            f"the row ({', '.join(map(str, whole_row))[:200]}) is no pair "
            f"of answers that the kit knows; write the better "
            f"answer as chosen and the other as rejected, with {BESIDE}."
        )
    return f"the row has one answer; give --task sft, or write pairs, which have {ACCEPTED}."


def _read(name: str, half: dict[str, Any]) -> Example:
    try:
        return to_example(half)
    except UserError as error:
        raise UserError(f"the {name} answer: {error}") from None


def _rest(row: dict[str, Any], others: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in (*others, *PROMPTS)}


def _prompt(row: dict[str, Any]) -> tuple[str, Any]:
    """Return the column of the prompt, and its turns or its text; None without one."""
    for name in CHATS:
        if not is_empty(row.get(name)):
            return name, _turns(as_list(row[name], name))
    question_column = next((name for name in ASKED if name in row), None)
    if question_column and not (question_column == "input" and "prompt" in row):
        return question_column, alpaca_turns({**row, "output": ""}, question_column)[:-1]
    if is_empty(row.get("prompt")):
        return "", None
    prompt = messages_or_text(row["prompt"], "prompt")
    return "prompt", _turns(prompt) if isinstance(prompt, list) else as_text(prompt, "prompt")


def _not_shown(row: dict[str, Any], columns: tuple[str, ...], read: str, example: Example) -> list[str]:
    """Return those of the columns that were not read, and have texts that the example does not have."""
    # A short text may stand anywhere in others.
    shown: Collection[str] = {message["content"].strip() for message in example.messages}
    if example.text is not None:
        shown = example.text[: example.prompt_chars]
    read_too = (read, "input", "history") if read in ASKED else (read,)
    others = [name for name in columns if name in row and name not in read_too]
    return [name for name in others if not all(text.strip() in shown for text in _texts_in(row[name]))]


def _texts_in(value: Any) -> list[str]:
    """Return the texts of a column: its own, or those of its messages."""
    if isinstance(value, dict):
        value = [value.get("content") or value.get("value") or value.get("text")]
    return [text for item in value for text in _texts_in(item)] if isinstance(value, list) else [str(value or "")]


def _halves(row: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return the column of the prompt, and those of the chosen and of the rejected row, as prompt and completion."""
    answers = {name: messages_or_text(row[name], name) for name in ANSWERS}
    column, prompt = _prompt(row)
    refuse_mixed(row, {column: row[column] if column in ASKED else prompt, **answers})
    if not isinstance(prompt, list) and all(isinstance(answer, str) for answer in answers.values()):
        return column, _texts(row, prompt, list(answers.values()))
    whole = [_turns(answer) for answer in answers.values()]
    # A text or a question beside conversations often repeats what they hold.
    is_text = isinstance(prompt, str) or column in ASKED
    question = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    repeats = any(_is_within(question, turns) for turns in whole)
    question, completions, beside = _after(question, whole, repeats=repeats, may_differ=is_text)
    _check_one_question(question, dict(zip(ANSWERS, completions, strict=True)))
    return "" if beside and is_text else column, [{"prompt": question, "completion": turns} for turns in completions]


def _after(
    prompt: list[Any], whole: list[list[Any]], *, repeats: bool, may_differ: bool
) -> tuple[list[Any], list[list[Any]], bool]:
    """Return the prompt of a pair, each answer after it, and whether the answers hold all of the prompt.

    Every message of the prompt and of both answers stands in the result, except with `may_differ`: a question beside
    conversations that differs from theirs.

    Args:
        repeats: whether an answer holds the whole prompt.
    """
    common = _common_messages(whole)
    completions = [_without(prompt, turns) for turns in whole]
    goes_on = all(turns and _role(turns[0]) != "assistant" for turns in completions)
    if common and (repeats or (may_differ and goes_on)):
        return common, [turns[len(common) :] for turns in whole], True
    if goes_on:
        common = _common_messages(completions)
        if prompt and common and (_role(common[0]) == "system" or _is_again(common[0], prompt)):
            raise UserError(
                "chosen and rejected begin with messages of the prompt and leave out others, so it is not clear what "
                "they answer; give them without the prompt, or with all of it."
            )
        prompt, completions = prompt + common, [turns[len(common) :] for turns in completions]
    return prompt, completions, False


def _is_again(message: Any, prompt: list[Any]) -> bool:
    """Return whether a message behind a prompt repeats one of it, and is no new question behind an answer."""
    return _role(prompt[-1]) != "assistant" and _is_within([message], prompt)


def _without(prompt: list[Any], turns: list[Any]) -> list[Any]:
    """Return an answer without the messages at its begin that repeat the end of the prompt."""
    # The system message is often repeated alone.
    repeats_system = prompt and _role(prompt[0]) == "system" and _same(prompt[0], turns[0])
    for start in (0, 1) if repeats_system else (0,):
        for count in range(min(len(prompt), len(turns) - 1 - start), 0, -1):
            if all(map(_same, prompt[-count:], turns[start : start + count])):
                return turns[start + count :]
    return turns


def _is_within(part: list[Any], turns: list[Any]) -> bool:
    """Return whether a conversation holds all messages of another, in their order."""
    remaining = iter(turns)
    return all(any(_same(turn, other) for other in remaining) for turn in part)


def _same(turn: Any, other: Any) -> bool:
    return bool(turn == other) or (_role(turn) is not None and _compared(turn) == _compared(other))


def _compared_call(call: Any) -> Any:
    """Return a tool call without its id, and with arguments as an object: each sample of a history may have others."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    with contextlib.suppress(ValueError):
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    others = {key: value for key, value in call.items() if key not in IDS and not is_empty(value)}
    return others | {"function": function | {"arguments": arguments}}


def _compared(turn: Any) -> Any:
    """Return what of a message is compared: no ids or empty keys, no space around its text, content parts joined."""
    if not isinstance(turn, dict):
        return turn
    compared = {key: value for key, value in turn.items() if key not in IDS and not is_empty(value)}
    if isinstance(compared.get("tool_calls"), list):
        compared["tool_calls"] = [_compared_call(call) for call in compared["tool_calls"]]
    if "role" in compared:
        compared["role"] = RENAMED_ROLES.get(str(compared["role"]), compared["role"])
    content = compared.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text")) for part in content)
    return compared | {"content": content.strip()} if isinstance(content, str) else compared


def _check_one_question(prompt: list[Any], answers: dict[str, list[Any]]) -> None:
    """Refuse answers to different prompts, and a prompt that is answered already."""
    if not all("assistant" in map(_role, turns) for turns in answers.values()):
        return  # refused where the row is read
    if not prompt and all(_role(turns[0]) == "assistant" for turns in answers.values()):
        raise UserError("the row has answers and no prompt; add a column prompt, or remove the row.")
    for name, turns in answers.items():
        begins = _role(turns[0])
        if begins == "assistant" and prompt and _role(prompt[-1]) == "assistant":
            raise UserError(
                f"the prompt ends with an assistant message, and {name} begins with another one; end the prompt with "
                "the question."
            )
        if begins in ("system", "user"):
            raise UserError(
                f"{name} goes on with a {begins} message where its answer should begin, so it is no answer to the same "
                "prompt as the other; give both the same prompt, or remove the row."
            )


def _role(turn: Any) -> Any:
    return turn.get("role") if isinstance(turn, dict) else None


def _turns(answer: list[Any] | str) -> list[Any]:
    """Return messages of OpenAI's form; a text is the assistant's. What is no turn is refused where rows are read."""
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    return [read_sharegpt_turn(turn, []) if isinstance(turn, dict) and "from" in turn else turn for turn in answer]


def _common_messages(whole: list[list[Any]]) -> list[Any]:
    """Return the messages with which both conversations begin; something is left of each."""
    limit = min(map(len, whole)) - 1
    count = next((i for i in range(limit) if not _same(whole[0][i], whole[1][i])), max(limit, 0))
    return whole[0][:count]


def _refuse_other_name(row: dict[str, Any]) -> None:
    """Refuse a row whose prompt seems to be in a column that is not read."""
    if other := next((name for name in row if str(name).lower() in QUESTIONS and not is_empty(row[name])), None):
        raise UserError(
            f"the row has no prompt, but a column {other}, which is not read; give --columns {other}=prompt, or "
            f"{other}=instruction to use the chat template."
        )


def _texts(row: dict[str, Any], prompt: Any, answers: list[Any]) -> list[dict[str, Any]]:
    """Return texts after their prompt; without one, it is what both begin with, up to a whole word."""
    if prompt is not None:
        return [{"prompt": as_text(prompt, "prompt"), "completion": answer} for answer in answers]
    _refuse_other_name(row)
    differs = (i for i, (message, other) in enumerate(zip(*answers, strict=False)) if message != other)
    common = answers[0][: next(differs, min(map(len, answers)))]
    if common in answers or not common[-1:].isspace():
        common = common[: len(common) - len(common.split()[-1])] if common.split() else ""
    # The space before a word belongs to its token.
    common = common.rstrip(" ")
    if not common:
        raise UserError(
            "the row has no prompt, and chosen and rejected do not begin with the same words; add a column prompt, or "
            "remove the row."
        )
    return [{"prompt": common, "completion": answer[len(common) :]} for answer in answers]
