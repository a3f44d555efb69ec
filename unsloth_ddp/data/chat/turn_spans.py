"""Find the spans of a rendered chat that the assistant wrote: what generation has to produce after the prompt.

The end of a span comes from the first of three sources: a template that marks what the assistant writes with
{% generation %}; TRL's training variant of the template, if it renders the same text; the difference between the chat
rendered up to a turn and through it. A span begins where the generation prompt ends, even if the marks include a part
of it.
"""

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from unsloth_ddp.data.chat.parts import closes
from unsloth_ddp.data.chat.scaffold import WORD
from unsloth_ddp.data.chat.template import BEGUN_TAG, ChatTemplate, Span
from unsloth_ddp.data.sources.formats import Example
from unsloth_ddp.data.sources.messages import Message
from unsloth_ddp.utils.errors import UserError

NEXT_QUESTION: Message = {"role": "user", "content": "And then?"}
TAG = re.compile(r"[<\[][^<>\[\]]+[>\]]")
# (the characters of a part of a row in its text, the index of the message that it belongs to, -1 for none).
Written = tuple[Span, int]
# (a character of the text, None if it is not found; a note if the turn does not follow the generation prompt, or "").
Place = tuple[int | None, str]


# Gaps of a kind are no longer looked into when something had the same place in so many rows.
ROWS_ALIKE = 3
# Kinds may be all different.
MOST_KINDS = 2_000


class Gap(NamedTuple):
    """The text between the parts of two messages: its first character, and what gaps of its kind have in common."""

    start: int
    kind: Hashable


class PlacesInGaps:
    """Locate something in the gaps of turns, for which a chat has to be rendered up to each of them.

    Chats have few kinds of gaps. So it is located in the first and the last gap of each kind in a row, and not at all
    once several rows had it at one place. Where it has been at two places in gaps of one kind, it is located in each.
    """

    def __init__(self) -> None:
        self._places: dict[Hashable, set[Place]] = defaultdict(set)
        self._rows: Counter[Hashable] = Counter()

    def of(self, turns: Sequence[int], gaps: dict[int, Gap], locate: Callable[[int], Place]) -> list[Place]:
        """Return the place in each turn.

        Args:
            gaps: of turns where they are known.
            locate: returns the place in a turn.
        """
        if len(self._places) > MOST_KINDS:
            self._places.clear()
            self._rows.clear()
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for turn in turns:
            if turn in gaps:
                alike[gaps[turn].kind].append(turn)
        places: dict[int, Place] = {}
        for kind, same in alike.items():
            places_of_kind = self._places[kind]
            if len(places_of_kind) != 1 or self._rows[kind] < ROWS_ALIKE:
                places |= {turn: locate(turn) for turn in {same[0], same[-1]}}
                places_of_kind |= {_moved(places[turn], -gaps[turn].start) for turn in {same[0], same[-1]}}
                self._rows[kind] += 1
            if len(places_of_kind) == 1:
                (place,) = places_of_kind
                places |= {turn: _moved(place, gaps[turn].start) for turn in same}
        return [places[turn] if turn in places else locate(turn) for turn in turns]


def _moved(place: Place, distance: int) -> Place:
    character, mark = place
    return None if character is None else character + distance, mark


@dataclass(frozen=True)
class SpanFinder:
    """Find the supervised spans of chats in one template, or with `supervise_all` the spans to leave out.

    Args:
        training: TRL's variant of the template, if there is one.
        eos_token: the EOS token, with which some templates end the chat but not each turn.
    """

    template: ChatTemplate
    training: ChatTemplate | None
    eos_token: str
    supervise_all: bool
    _begins: PlacesInGaps = field(default_factory=PlacesInGaps, init=False, compare=False, repr=False)
    _ends: PlacesInGaps = field(default_factory=PlacesInGaps, init=False, compare=False, repr=False)

    def find(
        self, example: Example, text: str, lost: Collection[int], written: Sequence[Written]
    ) -> tuple[str, list[Span], list[str]]:
        """Return the text of a rendered chat, the spans in it, and notes on them.

        TRL's variant may add the end of the last turn to the text, which the tokenizer's own template renders with the
        next turn (GLM).

        Args:
            lost: the turns of which the text lacks a part.
            written: the parts of the row in the text, in order, where they are known.

        Raises:
            UserError: the assistant's tokens cannot be told apart.
        """
        left_out = {*example.left_out, *(() if self.supervise_all else lost)}
        if self.supervise_all and not left_out:
            return text, [], []
        turns = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
        learned = [i for i in turns if i >= example.prompt_messages and i not in left_out]
        turns_of_spans = [i for i in turns if i in left_out] if self.supervise_all else learned
        notes: list[str] = []
        ended, marked = self._marked(example, text, left_out, written)
        if marked is None and self.training is not None and not self.template.marked:
            notes.append("own")
        gaps_before, gaps_behind = _gaps(example, text, written)
        begins = self._begins.of(turns_of_spans, gaps_before, lambda turn: self._begin(example, text, turn, written))
        if not self.supervise_all:
            notes += dict.fromkeys(note for _, note in begins if note)
        if marked is not None:
            found_begins = [begin for begin, _ in begins if begin is not None]
            return ended, [_after_prompt(span, found_begins) for span in marked], notes
        ends = self._ends.of(turns_of_spans, gaps_behind, lambda turn: (self._end(example, text, turn, written), ""))
        spans = [(begin, end) for (begin, _), (end, _) in zip(begins, ends, strict=True)]
        whole_spans = [(begin, end) for begin, end in spans if begin is not None and end is not None]
        if len(whole_spans) < len(spans) or any(
            map(_holds_others, whole_spans, turns_of_spans, [written] * len(whole_spans))
        ):
            raise UserError(self._refusal(example))
        return ended, whole_spans, notes

    def _refusal(self, example: Example) -> str:
        """Return why spans are not found; Gemma 4's template writes a turn's text behind its tools' results."""
        for index, message in enumerate(example.messages[:-1]):
            text = message["content"]
            if not (message.get("tool_calls") and isinstance(text, str) and text.strip()):
                continue
            parts = (self.template.render(example.messages[: index + n], example.tools) for n in (1, 2))
            alone, answered = parts
            if not answered.startswith(alone.rstrip()) and answered.rfind(text.strip()) >= len(alone) - len(text):
                return (
                    f"the chat template writes the text of message {index + 1}, which calls tools, behind the answer "
                    "of the tool; write the text into the reasoning of the message (reasoning_content), or remove it."
                )
        return (
            "the chat template rewrites earlier turns, so the assistant's tokens cannot be told apart; mark them with "
            "{% generation %} in a --chat_template file, or use --loss_on all."
        )

    def _marked(
        self, example: Example, text: str, left_out: set[int], written: Sequence[Written]
    ) -> tuple[str, list[Span] | None]:
        """Return the text and the spans that the template marks, or TRL's variant if it renders the same text."""
        if self.template.marked:
            marked_text, spans = self.template.render_marked(example.messages, example.tools)
            return marked_text, self._chosen(self.template, example, spans, left_out, written)
        if self.training is None:
            return text, None
        try:
            marked_text, spans = self.training.render_marked(example.messages, example.tools)
            if not marked_text.startswith(text):
                return text, None
            spans = self._chosen(self.training, example, spans, left_out, written)
        except Exception:
            return text, None
        ends_turn = bool(spans) and spans[-1][1] == len(marked_text)
        return (marked_text, spans) if marked_text == text or ends_turn else (text, None)

    def _chosen(
        self,
        template: ChatTemplate,
        example: Example,
        spans: list[Span],
        left_out: set[int],
        written: Sequence[Written],
    ) -> list[Span]:
        """Return the marked spans that are supervised, or with `supervise_all` those to leave out."""
        owners = _owners(spans, written)
        if owners is not None:
            dropped = {number for number, owner in enumerate(owners) if owner in left_out}
            prompt = {number for number, owner in enumerate(owners) if owner < example.prompt_messages}
        else:
            count = self._count_of_marks(template, example, len(spans))
            dropped = {number for index in left_out for number in range(count(index), count(index + 1))}
            prompt = {*range(count(example.prompt_messages))}
        if self.supervise_all:
            return [spans[number] for number in sorted(dropped)]
        return [span for number, span in enumerate(spans) if number not in dropped | prompt]

    def _count_of_marks(self, template: ChatTemplate, example: Example, of_all: int) -> Callable[[int], int]:
        """Return a function that returns the number of marked spans in so many first messages."""

        def count(messages: int) -> int:
            turns = example.messages[:messages]
            if messages == len(example.messages):
                return of_all
            if not any(message["role"] == "assistant" for message in turns):
                return 0
            if turns[-1]["role"] == "assistant":
                # As the last turn, it could end with a span that it lacks when others follow (Phi-3's EOS).
                following = example.messages[messages]
                turns = [*turns, NEXT_QUESTION if following["role"] == "assistant" else following]
            return len(template.render_marked(turns, example.tools)[1])

        return count

    def _begin(self, example: Example, text: str, turn: int, written: Sequence[Written]) -> Place:
        """Return where the generation prompt of a turn ends, with a note if the text lacks a part of the prompt.

        None if the chat before the turn is rendered differently.
        """
        first = next((span[0] for span, message in written if message == turn), None)
        turns = example.messages[:turn]
        if not turns:
            return self._begin_without_question(text, first), ""
        try:
            prompted = self.template.render(turns, example.tools, prompt=True)
            if text.startswith(prompted):
                return len(prompted) if first is None else min(len(prompted), first), ""
            history = self.template.render(turns, example.tools)
        except Exception:
            return None, ""
        spans_before = [span for span, _ in written if first is not None and span[1] <= first]
        start, end = spans_before[-1] if spans_before else (0, 0)
        tails = [_behind(text[start:end], chat) for chat in (history, prompted)]
        if tails[0] is None or tails[1] is None:
            return None, ""
        agreed, prompted_end = shared(text[end:first], tails[1])
        if prompted_end < len(tails[0].rstrip()):
            return None, ""
        return end + agreed, _note_on_prompt(tails[1][prompted_end:].strip())

    def _begin_without_question(self, text: str, first: int | None) -> int | None:
        """Return where the prompt ends of a chat that begins with the assistant; templates need a message before."""
        if first is None:
            return None
        try:
            question, prompted = (
                self.template.render([NEXT_QUESTION], None, prompt=prompt) for prompt in (False, True)
            )
        except Exception:
            return None
        prompt = prompted[shared(question, prompted)[1] :].strip()
        # The prompt may open a block that the answer lacks.
        for begun in (prompt, *(prompt[: tag.start()] for tag in reversed([*TAG.finditer(prompt)]))):
            at = text.rfind(begun, 0, first)
            if begun and at >= 0:
                return at + shared(text[at:first], prompted[prompted.rfind(prompt) :])[0]
        return None if prompt else first

    def _end(self, example: Example, text: str, turn: int, written: Sequence[Written]) -> int | None:
        """Return where a turn ends; None if the chat up to it is rendered differently."""
        if turn == len(example.messages) - 1:
            return len(text)
        try:
            through = self.template.render(example.messages[: turn + 1], example.tools)
        except Exception:
            return None
        for ended in (through, through.removesuffix(self.eos_token)):
            if text.startswith(ended):
                return len(ended)
        spans = [span for span, message in written if message == turn]
        tail = _behind(text[slice(*spans[-1])], through) if spans else None
        if tail is None:
            return None
        end, *words = spans[-1][1], *WORD.finditer(tail)
        # The id of a call may stand behind its arguments.
        for word in words:
            end = text.index(word[0], end) + len(word[0])
        tail = tail[words[-1].end() :] if words else tail
        following = min((start for (start, _), _ in written if start >= end), default=len(text))
        gap = text[end:following]
        gap_end, tail_end = shared(gap, tail)
        rest = tail[tail_end:].strip().removesuffix(self.eos_token)
        # gpt-oss ends the last turn with another token; other tails that go on differently are no end of this turn.
        ended_otherwise = not tail[:tail_end].strip() and all(
            TAG.match(following_text.lstrip()) for following_text in (gap, tail)
        )
        return end + gap_end if not rest or ended_otherwise else None


def _note_on_prompt(lacking: str) -> str:
    """Return the note on what a text lacks of the generation prompt."""
    opens = TAG.match(lacking) and not any(closes(tag) for tag in TAG.findall(lacking))
    return "unprompted" if opens else f"prompt\t{' '.join(lacking.split())}" if lacking else ""


def _owners(spans: Sequence[Span], written: Sequence[Written]) -> list[int] | None:
    """Return the message that each marked span belongs to; None if the parts in one do not tell."""
    owners = [{message for _, message in _inside(span, written)} - {-1} for span in spans]
    return [owner for (owner,) in owners] if all(len(messages) == 1 for messages in owners) else None


def _gaps(example: Example, text: str, written: Sequence[Written]) -> tuple[dict[int, Gap], dict[int, Gap]]:
    """Return the gap before the first part of each message, and the one behind its last part if a message follows."""
    gaps_before: dict[int, Gap] = {}
    gaps_behind: dict[int, Gap] = {}
    last = len(example.messages) - 1
    # What the template may look for in texts decides how it renders turns, also those behind.
    markup = frozenset(WORD.sub("", str(message["content"])) for message in example.messages)
    of_chat = (bool(example.tools), example.messages[0]["role"], markup)
    for number, ((start, end), message) in enumerate(written):
        if message > 0 and message not in gaps_before:
            (_, gap), other = written[number - 1] if number else ((0, 0), -1)
            role = example.messages[message - 1]["role"]
            gaps_before[message] = Gap(gap, (text[gap:start], message - other if other >= 0 else None, role, *of_chat))
        if 0 <= message < last:
            following = written[number + 1][0][0] if number + 1 < len(written) else len(text)
            gaps_behind[message] = Gap(end, (text[end:following], example.messages[message + 1]["role"], *of_chat))
    return gaps_before, gaps_behind


def _holds_others(span: Span, turn: int, written: Sequence[Written]) -> bool:
    """Return whether parts of other messages stand in a turn's span."""
    return any(message not in (turn, -1) for _, message in _inside(span, written))


def _inside(span: Span, written: Sequence[Written]) -> Sequence[Written]:
    """Return the parts that begin in a span."""
    first, end = (bisect_left(written, character, key=lambda part: part[0][0]) for character in span)
    return written[first:end]


def _behind(part: str, text: str) -> str | None:
    """Return the text behind the last place of a part, all of it behind nothing; None if the text lacks the part."""
    at = text.rfind(part) if part else 0
    return None if at < 0 else text[at + len(part) :]


def shared(text: str, other: str) -> tuple[int, int]:
    """Return how far two texts agree, white space aside, without a begun tag at the end."""
    end = other_end = 0
    while end < len(text) and other_end < len(other):
        if text[end] == other[other_end]:
            end, other_end = end + 1, other_end + 1
        elif text[end].isspace():
            end += 1
        elif other[other_end].isspace():
            other_end += 1
        else:
            begun = BEGUN_TAG.search(text, 0, end)
            length = end - begun.start() if begun else 0
            return end - length, other_end - length
    return end, other_end


def same_prompt(prompt: str, other: str) -> bool:
    """Return whether two texts are the same but for tags at the end, such as a block that one answer lacks."""
    if prompt == other:
        return True
    alike = next((place for place, pair in enumerate(zip(prompt, other, strict=False)) if pair[0] != pair[1]), None)
    end = min(len(prompt), len(other)) if alike is None else alike
    begun = BEGUN_TAG.search(prompt, 0, end)
    end = begun.start() if begun else end
    return not any(TAG.sub("", text[end:]).strip() for text in (prompt, other))


def _after_prompt(span: Span, begins: list[int]) -> Span:
    """Return a span from where the generation prompt ends inside it."""
    start, end = span
    return min((begin for begin in begins if start < begin <= end), default=start), end
