"""Find markup of a row that the template writes too, takes out, or reads as something else. Pure functions.

Markup stays as it is in the stand-in of a row (parts.py), so most of this is found once for all rows of a stand-in.
"""

import re
from collections.abc import Iterator

from unsloth_ddp.data.chat.parts import StandIn, closes
from unsloth_ddp.data.chat.scaffold import Places, Scaffold

TEXTS = ("content", "reasoning")


def opening_of(closing: str) -> str:
    """Return the markup that begins a block which `closing` ends: <think> for </think>, <|channel> for <channel|>."""
    return closing.replace("/", "", 1) if "/" in closing[:3] else f"<|{closing[1:-2]}>"


def notes_on_markup(made: StandIn, scaffold: Scaffold, text: str, looked_for: set[str]) -> Iterator[str]:
    """Yield notes on the markup of a row, each with the markup.

    Args:
        text: the rendered stand-in.
        looked_for: markup that the template looks for in texts.
    """
    example = made.example
    for index, message in enumerate(example.messages):
        if message["role"] != "assistant" or index < example.prompt_messages or index in example.left_out:
            continue
        content = str(message["content"])
        for closing in filter(closes, made.literals):
            opening = opening_of(closing)
            begun, ended = content.count(opening), content.count(closing)
            if begun > ended:
                yield f"cut\t{opening}"
            elif ended > begun and closing in looked_for:
                yield f"unopened\t{closing}"
    for literal in {mark.literal for mark in made.marks}:
        if any(re.search(f"{re.escape(literal)}\\s*{re.escape(literal)}", gap) for gap in scaffold.gaps):
            yield f"twice\t{literal}"
    yield from (f"taken\t{literal}" for literal in _taken_out(made, scaffold, text))


def _taken_out(made: StandIn, scaffold: Scaffold, text: str) -> set[str]:
    """Return the markup of texts that does not stand where the text has it, blocks of an answer aside."""
    slots = {slot.part: number for number, slot in reversed([*enumerate(scaffold.slots)])}
    blocks = {one for literal in filter(closes, made.literals) for one in (literal, opening_of(literal))}
    taken: set[str] = set()
    for literal, role, left, right in made.marks:
        if role == "assistant" and literal in blocks:
            continue
        if left in slots:
            arrives = scaffold.gaps[slots[left] + 1].startswith(literal)
        elif right in slots:
            arrives = scaffold.gaps[slots[right]].endswith(literal)
        else:
            arrives = literal in text
        if not arrives:
            taken.add(literal)
    return taken


def written_twice(text: str, scaffold: Scaffold, places: Places) -> set[str]:
    """Return tags and names of speakers that a text begins or ends with, and that the template writes around it."""
    twice: set[str] = set()
    for number, (slot, (start, end)) in enumerate(zip(scaffold.slots, places.slots, strict=True)):
        before, behind = scaffold.around[number]
        if slot.part.kind in TEXTS:
            twice |= {before} if before and text.startswith(before, start) else set()
            twice |= {behind} if behind and text.endswith(behind, start, end) else set()
    return twice
