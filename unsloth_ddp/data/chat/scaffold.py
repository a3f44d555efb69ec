"""Find the parts of a row in its rendered text. Pure functions.

The rendered stand-in of a row (parts.py) shows the scaffold: the text between the parts, and which parts stand where. A
row's own text that is this scaffold, filled with the row's parts, holds each of them exactly where it belongs.
Searching for the parts alone would not show that, since an answer "assistant" also stands in the scaffold.
"""

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from unsloth_ddp.data.chat.parts import JSON_STYLES, REQUIRED, Part, StandIn, name_of
from unsloth_ddp.data.chat.template import Span

WORD = re.compile(r"Z[qn]\d{5,}qZ|(?<![\d.])731\d{5,}(?![\d.])")
SPACE = re.compile(r"\s*")
PYTHON = "as Python prints it"
# Match the tag, or the name of a speaker with a colon, that ends a gap, and the tag that begins one.
LAST_TAG = re.compile(r"(?:[<\[][^<>\[\]\s][^<>\[\]]*[>\]]|[#\w][#\w ]*:)\Z")
FIRST_TAG = re.compile(r"[<\[][^<>\[\]\s][^<>\[\]]*[>\]]")
# (gap of the scaffold, characters from its start).
Position = tuple[int, int]


@dataclass(frozen=True)
class Slot:
    """The place of a part: `style` is an index of JSON_STYLES for whole values, PYTHON, or None for other values."""

    part: Part
    style: int | str | None = None


@dataclass(frozen=True)
class Scaffold:
    """The text between the parts of a rendered row.

    Args:
        gaps: the text before each slot and behind the last one, without white space at its ends, since templates differ
            in whether they keep the white space around a text.
        slots: the parts, in the order of the text.
        missing: the required parts that the text lacks.
        repeated: the texts that it holds more than once.
    """

    gaps: tuple[str, ...]
    slots: tuple[Slot, ...]
    missing: frozenset[Part]
    repeated: frozenset[Part]

    @cached_property
    def around(self) -> list[tuple[str, str]]:
        """The tags directly before and behind each slot, "" where there is none."""
        tags_before = [(match := LAST_TAG.search(gap)) and match[0] for gap in self.gaps[:-1]]
        tags_behind = [(match := FIRST_TAG.match(gap)) and match[0] for gap in self.gaps[1:]]
        return [(tag or "", other or "") for tag, other in zip(tags_before, tags_behind, strict=True)]


@dataclass(frozen=True)
class Places:
    """The places of a scaffold's parts in a text.

    Args:
        gaps: the first character of each gap.
        slots: the characters of each slot.
        python: whether a value of a tool call is printed as Python prints it, and not as JSON.
    """

    gaps: tuple[int, ...]
    slots: tuple[Span, ...]
    python: bool = False


def scaffold_of(text: str, standin: StandIn) -> tuple[Scaffold, Places]:
    """Return the scaffold of a rendered stand-in, and where its parts stand."""
    placed_slots = sorted(_slots(text, standin), key=lambda placed: placed[0])
    spans, slots = [span for span, _ in placed_slots], [slot for _, slot in placed_slots]
    gaps, starts, end = [], [], 0
    for start, following in [*spans, (len(text), len(text))]:
        gap = text[end:start]
        starts.append(_after_space(text, end) if gap.strip() else end)
        gaps.append(gap.strip())
        end = following
    count = Counter(slot.part for slot in slots)
    repeated = frozenset(part for part, times in count.items() if times > 1 and part.kind in ("content", "reasoning"))
    scaffold = Scaffold(tuple(gaps), tuple(slots), frozenset(_missing(standin, count)), repeated)
    return scaffold, Places(tuple(starts), tuple(spans), any(slot.style == PYTHON for slot in slots))


def _slots(text: str, standin: StandIn) -> Iterator[tuple[Span, Slot]]:
    covered: list[Span] = []
    # The outer values come first: an object that is printed as JSON is one slot.
    for part, value in sorted(standin.whole.items(), key=lambda item: len(item[0].place)):
        styles: list[tuple[int | str, str]] = [
            *enumerate(json.dumps(value, ensure_ascii=False, **style) for style in JSON_STYLES),
            (PYTHON, str(value)),
        ]
        for style, printed in styles:
            at = text.find(printed)
            if at >= 0 and not _inside(at, covered):
                while at >= 0:
                    covered.append((at, at + len(printed)))
                    yield (at, at + len(printed)), Slot(part, style)
                    at = text.find(printed, at + len(printed))
                break
    covered.sort()
    for match in WORD.finditer(text):
        part_of_word = standin.words.get(match[0])
        if part_of_word is not None and not _inside(match.start(), covered):
            yield match.span(), Slot(part_of_word)


def _inside(at: int, spans: Iterable[Span]) -> bool:
    return any(start <= at < end for start, end in spans)


def _missing(standin: StandIn, count: Counter[Part]) -> Iterator[Part]:
    """Yield the required parts without a slot; arguments have one, or their keys and values have."""
    inner = {(part.number, part.call) for part in standin.values if part.kind == "argument"}
    for part in standin.values:
        if part.kind not in REQUIRED or count[part]:
            continue
        if part.kind == "arguments" and (part.number, part.call) in inner:
            continue
        if part.kind == "argument" and _has_outer(part, standin, count):
            continue
        yield part


def _has_outer(part: Part, standin: StandIn, count: Counter[Part]) -> bool:
    """Return whether an object around a key or value has a slot, or it is itself an object, whose items are parts."""
    outer = [part._replace(place=part.place[:depth]) for depth in range(1, len(part.place))]
    call = Part("arguments", part.number, part.call)
    return part in standin.whole or any(count[around] for around in (call, *outer))


def places_in(text: str, scaffold: Scaffold, standin: StandIn) -> Places | None:
    """Return the places of a row's parts in its text; None if the text is not the scaffold, filled with the parts."""
    position, python = _after_space(text, 0), False
    gaps: list[int] = []
    slots: list[Span] = []
    end = 0
    for gap, slot in zip(scaffold.gaps, scaffold.slots, strict=False):
        if not text.startswith(gap, position):
            return None
        gaps.append(position if gap else end)
        position = _after_space(text, position + len(gap))
        for printed, as_python in _printed(standin.values[slot.part], slot.style):
            if text.startswith(printed, position):
                python |= as_python and slot.part.kind != "tool"
                break
        else:
            return None
        end = position + len(printed)
        slots.append((position, end))
        position = _after_space(text, end)
    if text[position:].rstrip() != scaffold.gaps[-1]:
        return None
    gaps.append(position if scaffold.gaps[-1] else end)
    return Places(tuple(gaps), tuple(slots), python)


def not_found_in(text: str, scaffold: Scaffold, standin: StandIn) -> frozenset[Part]:
    """Return the required parts that a text lacks, which is not the scaffold of its stand-in.

    A part that also stands in the scaffold does not count as found.
    """
    missing, position = set(scaffold.missing), 0
    for slot in scaffold.slots:
        if slot.part.kind not in REQUIRED:
            continue
        printed = [form for form, _ in _printed(standin.values[slot.part], slot.style)]
        at = [(text.find(form, position), form) for form in printed if not any(form in gap for gap in scaffold.gaps)]
        first = min((form for form in at if form[0] >= 0), default=None)
        if first is None:
            missing.add(slot.part)
        else:
            position = first[0] + len(first[1])
    return frozenset(missing)


def _printed(value: Any, style: int | str | None) -> Iterator[tuple[str, bool]]:
    """Yield the ways in which a value may stand in a text, and whether it is as Python prints it."""
    if isinstance(style, int):
        yield json.dumps(value, ensure_ascii=False, **JSON_STYLES[style]), False
        yield json.dumps(value, **JSON_STYLES[style]), False
        yield str(value), True
    elif style == PYTHON:
        yield str(value), True
    elif isinstance(value, dict):
        # A tool that is not printed as JSON.
        yield name_of(value), False
    elif isinstance(value, str):
        yield value.strip(), False
        # Inside JSON.
        yield json.dumps(value.strip(), ensure_ascii=False)[1:-1], False
        yield json.dumps(value, ensure_ascii=False)[1:-1], False
        yield json.dumps(value.strip())[1:-1], False
    else:
        yield json.dumps(value), False
        yield str(value), True


def _after_space(text: str, position: int) -> int:
    match = SPACE.match(text, position)
    assert match is not None
    return match.end()


def prints_parts(scaffold: Scaffold) -> bool:
    """Return whether content parts stand in a text as objects."""
    return any(re.search(r"""['"]text['"]:\s*['"]$""", gap) for gap in scaffold.gaps)


def unknown_scaffold(standin: StandIn) -> Scaffold:
    """Return the scaffold of a row whose stand-in cannot be rendered: its texts in order, with nothing between them."""
    texts = [part for part in standin.values if part.kind in ("content", "reasoning", "tool call")]
    return Scaffold(("",) * (len(texts) + 1), tuple(Slot(part) for part in texts), frozenset(), frozenset())


def _region(gap: int, places: Places, text: str) -> Span:
    """Return the characters between two slots."""
    start = places.slots[gap - 1][1] if gap else 0
    return start, places.slots[gap][0] if gap < len(places.slots) else len(text)


def position_of(character: int, places: Places, text: str) -> Position | None:
    """Return the gap that a character stands in; None if it stands inside a slot."""
    gap = bisect_left(places.slots, character, key=lambda slot: slot[0])
    start, _ = _region(gap, places, text)
    return (gap, character - places.gaps[gap]) if start <= character else None


def spans_at(spans: Iterable[tuple[Position, Position]], places: Places, text: str) -> list[Span]:
    """Return the characters of spans that are known by their places in the scaffold."""

    def character(position: Position) -> int:
        gap, offset = position
        start, end = _region(gap, places, text)
        return min(max(places.gaps[gap] + offset, start), end)

    return [(character(begin), character(end)) for begin, end in spans]


def parts_with_messages(scaffold: Scaffold, places: Places) -> list[tuple[Span, int]]:
    """Return the slots with the message that each belongs to, with none (-1) where a part stands once more.

    Gemma 4's template prints the name of a call again with its result.
    """
    kinds = ("content", "reasoning", "tool call", "arguments", "argument", "stand-in")
    written: list[tuple[Span, int]] = []
    placed: set[Part] = set()
    for slot, span in zip(scaffold.slots, places.slots, strict=True):
        is_first = slot.part.kind in kinds and slot.part not in placed
        written.append((span, slot.part.number if is_first else -1))
        placed.add(slot.part)
    return written
