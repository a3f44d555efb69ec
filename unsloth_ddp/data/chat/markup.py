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


def notes_on_markup(standin: StandIn, scaffold: Scaffold, text: str, looked_for: set[str]) -> Iterator[str]:
    """Yield notes on the markup of a row, each with the markup.

    Args:
        text: the rendered stand-in.
        looked_for: markup that the template looks for in texts.
    """
    example = standin.example
    for index, message in enumerate(example.messages):
        if message["role"] != "assistant" or index < example.prompt_messages or index in example.left_out:
            continue
        content = str(message["content"])
        for closing in filter(closes, standin.literals):
            opening = opening_of(closing)
            begun, ended = content.count(opening), content.count(closing)
            if begun > ended:
                yield f"cut\t{opening}"
            elif ended > begun and closing in looked_for:
                yield f"unopened\t{closing}"
    for literal in {mark.literal for mark in standin.marks}:
        if any(re.search(f"{re.escape(literal)}\\s*{re.escape(literal)}", gap) for gap in scaffold.gaps):
            yield f"twice\t{literal}"
    yield from (f"taken\t{literal}" for literal in _taken_out(standin, scaffold, text))


def _taken_out(standin: StandIn, scaffold: Scaffold, text: str) -> set[str]:
    """Return the markup of texts that does not stand where the text has it, blocks of an answer aside."""
    slots = {slot.part: number for number, slot in reversed([*enumerate(scaffold.slots)])}
    blocks = {tag for literal in filter(closes, standin.literals) for tag in (literal, opening_of(literal))}
    removed: set[str] = set()
    for literal, role, part_before, part_behind in standin.marks:
        if role == "assistant" and literal in blocks:
            continue
        if part_before in slots:
            arrives = scaffold.gaps[slots[part_before] + 1].startswith(literal)
        elif part_behind in slots:
            arrives = scaffold.gaps[slots[part_behind]].endswith(literal)
        else:
            arrives = literal in text
        if not arrives:
            removed.add(literal)
    return removed


def written_twice(text: str, scaffold: Scaffold, places: Places) -> set[str]:
    """Return tags and names of speakers that a text begins or ends with, and that the template writes around it."""
    twice: set[str] = set()
    for number, (slot, (start, end)) in enumerate(zip(scaffold.slots, places.slots, strict=True)):
        tag_before, tag_behind = scaffold.around[number]
        if slot.part.kind in TEXTS:
            twice |= {tag_before} if tag_before and text.startswith(tag_before, start) else set()
            twice |= {tag_behind} if tag_behind and text.endswith(tag_behind, start, end) else set()
    return twice
