"""Convert a row with a chosen and a rejected answer into a pair: two examples with the same prompt.

    prompt, chosen, rejected                  texts, or lists of messages (TRL)
    chosen, rejected                          whole conversations or texts, which begin with the same prompt (TRL, UltraFeedback)
    conversations or messages, and both       the prompt, and one answer each (LLaMA-Factory's ShareGPT form, axolotl)
    instruction or question, [input,] both    Alpaca (LLaMA-Factory), Intel's form (axolotl), with `history` if there is one

The two answers may be named chosen_response and rejected_response. Each half becomes a row of formats.py, so that roles, tool
calls, system prompts and texts are read and refused in the same way as in any other row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from unsloth_ddp.data.sources.formats import Example, alpaca_turns, messages_or_text, to_example
from unsloth_ddp.data.sources.messages import read_sharegpt_turn
from unsloth_ddp.data.sources.values import as_list, as_text, is_empty, is_missing, kind_of
from unsloth_ddp.utils.errors import UserError

ANSWERS = ("chosen", "rejected")
# Other names of the columns.
RENAMED = {"chosen_response": "chosen", "rejected_response": "rejected", "question": "instruction"}
# Columns of the prompt; the others are passed on.
PROMPTS = ("prompt", "conversations", "messages", "instruction", "input", "history")
ACCEPTED = (
    "chosen and rejected, with prompt, messages, conversations or instruction beside them, or as whole conversations"
)


def to_pair(row: Any) -> Example:
    """Convert a row.

    Raises:
        UserError: the row is no pair, or one of its answers cannot be read.
    """
    if not isinstance(row, dict):
        raise UserError(f"the row is {kind_of(row)}, not an object with columns; a pair has {ACCEPTED}.")
    row = {name: value for name, value in row.items() if not is_missing(value)}
    for other, name in RENAMED.items():
        if other in row and name not in row:
            row[name] = row.pop(other)
    if missing := [name for name in ANSWERS if name not in row]:
        raise UserError(_refusal(row, missing))
    halves = [_read(name, {**_rest(row), **half}) for name, half in zip(ANSWERS, _halves(row), strict=True)]
    chosen, rejected = halves
    rejected.unread = []
    return dataclasses.replace(chosen, rejected=rejected)


def _refusal(row: dict[str, Any], missing: list[str]) -> str:
    if len(missing) == 1:
        return f"the row has no {missing[0]} answer beside the other; add it or remove the row."
    try:
        to_example(row)
    except UserError:
        return f"the row is no pair of answers; it needs {ACCEPTED}."
    return f"the row has one answer, which --task sft learns; a pair has {ACCEPTED}."


def _read(name: str, half: dict[str, Any]) -> Example:
    try:
        example = to_example(half)
    except UserError as error:
        raise UserError(f"the {name} answer: {error}") from None
    if example.images:
        raise UserError(
            "the pair has images, which preference training does not take; give --task sft, or remove them."
        )
    return example


def _rest(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in (*ANSWERS, *PROMPTS)}


def _halves(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the columns of the chosen and of the rejected row, as prompt and completion."""
    answers = [messages_or_text(row[name], name) for name in ANSWERS]
    for name in ("conversations", "messages"):
        if not is_empty(row.get(name)):
            return _with_prompt(_turns(as_list(row[name], name)), [_turns(_one_or_more(a)) for a in answers])
    if "instruction" in row:
        question = alpaca_turns({**row, "output": ""})[:-1]
        return _with_prompt(question, [_turns(_one_or_more(answer)) for answer in answers])
    prompt = messages_or_text(row["prompt"], "prompt") if "prompt" in row else None
    if all(isinstance(answer, str) for answer in answers):
        if isinstance(prompt, list):
            return _with_prompt(_turns(prompt), [_turns(_one_or_more(answer)) for answer in answers])
        return _texts(prompt, answers)
    whole = [_turns(_one_or_more(answer)) for answer in answers]
    if isinstance(prompt, list):
        return _with_prompt(_turns(prompt), whole)
    common = _common_messages(whole)
    if common or prompt is None:
        # A text beside whole conversations repeats the question that they hold.
        return _with_prompt(common, [turns[len(common) :] for turns in whole])
    return _with_prompt([{"role": "user", "content": as_text(prompt, "prompt")}], whole)


def _with_prompt(prompt: list[Any], answers: list[list[Any]]) -> list[dict[str, Any]]:
    # Some sets repeat the conversation in both answers.
    if prompt and all(answer[:1] == prompt[:1] for answer in answers):
        prompt = _common_messages(answers)
        answers = [answer[len(prompt) :] for answer in answers]
    return [{"prompt": prompt, "completion": answer} for answer in answers]


def _one_or_more(answer: Any) -> list[Any]:
    """Return an answer as a list of messages: a text is the assistant's, an object a single message."""
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    return answer if isinstance(answer, list) else [answer]


def _turns(turns: list[Any]) -> list[Any]:
    """Return messages of OpenAI's form for turns of either form; what is no turn is refused where the row is read."""
    return [read_sharegpt_turn(turn, []) if isinstance(turn, dict) and "from" in turn else turn for turn in turns]


def _common_messages(whole: list[list[Any]]) -> list[Any]:
    """Return the messages with which both conversations begin; something is left of each."""
    most = min(map(len, whole)) - 1
    count = next((i for i in range(most) if whole[0][i] != whole[1][i]), max(most, 0))
    return whole[0][:count]


def _texts(prompt: Any, answers: list[Any]) -> list[dict[str, Any]]:
    """Return texts after their prompt; without one, it is what both begin with, up to a whole word."""
    if prompt is not None:
        return [{"prompt": as_text(prompt, "prompt"), "completion": answer} for answer in answers]
    differs = (i for i, (one, other) in enumerate(zip(*answers, strict=False)) if one != other)
    common = answers[0][: next(differs, min(map(len, answers)))]
    if common in answers or not common[-1:].isspace():
        common = common[: len(common) - len(common.split()[-1])] if common.split() else ""
    # The space before a word belongs to its token.
    common = common.rstrip(" ")
    return [{"prompt": common, "completion": answer[len(common) :]} for answer in answers]
