"""Find the spans of a rendered chat that the assistant wrote: what generation has to produce after the prompt.

The end of a span comes from the first of three sources: a template that marks what the assistant writes with
{% generation %}; TRL's training variant of the template, if it renders the same text; the difference between the chat
rendered up to a turn and through it. A span begins where the generation prompt ends, even if the marks include a part of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from unsloth_ddp.data.chat.parts import THINK_END, closes
from unsloth_ddp.data.chat.template import ChatTemplate, Span
from unsloth_ddp.data.sources.formats import Example
from unsloth_ddp.data.sources.messages import Message
from unsloth_ddp.utils.errors import UserError

NEXT_QUESTION: Message = {"role": "user", "content": "And then?"}
TAG = re.compile(r"[<\[][^<>\[\]]+[>\]]")
# Matches the reasoning block at the end of a generation prompt: its begin, or a whole one without reasoning.
BEGUN_BLOCK = re.compile(r"<think>\s*(</think>\s*)?\Z")


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

    def find(
        self, example: Example, text: str, left_out: set[int], begins: Mapping[int, int]
    ) -> tuple[str, list[Span], list[Literal["own", "unprompted"]]]:
        """Return the text of a rendered chat, the spans in it, and notes on them.

        TRL's variant may add the end of the last turn to the text, which the tokenizer's own template renders with the next
        turn (GLM).

        Args:
            left_out: the messages that are not supervised.
            begins: the first character of what each message wrote, where it is known.

        Raises:
            UserError: the assistant's tokens cannot be told apart.
        """
        if self.supervise_all and not left_out:
            return text, [], []
        turns = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
        learned = [i for i in turns if i >= example.prompt_messages and i not in left_out]
        wanted = [i for i in turns if i in left_out] if self.supervise_all else learned
        notes: list[Literal["own", "unprompted"]] = []
        ended, marked = self._marked(example, text, left_out)
        if marked is None and self.training is not None and not self.template.marked:
            notes.append("own")
        ends: list[int] = []
        unprompted = False
        for turn in wanted:
            end, lacks_prompt = self._prompt_end(example, text, turn, begins.get(turn))
            unprompted |= lacks_prompt
            if end is not None:
                ends.append(min(end, begins.get(turn, end)))
        spans = marked if marked is not None else [self._span_by_difference(example, text, turn) for turn in wanted]
        if unprompted and not self.supervise_all:
            notes.append("unprompted")
        return ended, [_after_prompt(span, ends) for span in spans], notes

    def _marked(self, example: Example, text: str, left_out: set[int]) -> tuple[str, list[Span] | None]:
        """Return the text and the spans that the template marks, or TRL's variant of it, if that renders the same text."""
        if self.template.marked:
            return self._spans_of_marks(self.template, example, left_out)
        if self.training is None:
            return text, None
        try:
            marked_text, spans = self._spans_of_marks(self.training, example, left_out)
        except Exception:
            return text, None
        ends_turn = bool(spans) and spans[-1][1] == len(marked_text) and marked_text.startswith(text)
        return (marked_text, spans) if marked_text == text or ends_turn else (text, None)

    def _spans_of_marks(self, template: ChatTemplate, example: Example, left_out: set[int]) -> tuple[str, list[Span]]:
        text, spans = template.render_marked(example.messages, example.tools)

        def marked(count: int) -> int:
            """Return the number of spans in the first `count` messages."""
            turns = example.messages[:count]
            if count == len(example.messages):
                return len(spans)
            if not any(message["role"] == "assistant" for message in turns):
                return 0
            if turns[-1]["role"] == "assistant":
                # As the last turn, it could end with a span that it lacks when others follow (Phi-3's EOS).
                following = example.messages[count]
                turns = [*turns, NEXT_QUESTION if following["role"] == "assistant" else following]
            return len(template.render_marked(turns, example.tools)[1])

        prompt = range(marked(example.prompt_messages))
        dropped = {number for index in left_out for number in range(marked(index), marked(index + 1))}
        if self.supervise_all:
            return text, [spans[number] for number in sorted(dropped)]
        return text, [span for number, span in enumerate(spans) if number not in dropped and number not in prompt]

    def _prompt_end(self, example: Example, text: str, turn: int, begin: int | None) -> tuple[int | None, bool]:
        """Return where the generation prompt of a turn ends, and whether the turn lacks a part of an open block in it.

        None if the chat before the turn is rendered differently.
        """
        turns = example.messages[:turn]
        if not turns:
            return self._end_without_question(text, begin), False
        try:
            before = self.template.render(turns, example.tools, prompt=True)
            if text.startswith(before):
                return len(before), False
            history = self.template.render(turns, example.tools)
        except Exception:
            return None, False
        same = _common(text, before)
        if same < _common(history, before):
            return None, False
        rest = before[same:]
        return same, bool(rest.strip()) and not any(closes(tag) for tag in TAG.findall(rest))

    def _end_without_question(self, text: str, begin: int | None) -> int | None:
        """Return where the prompt ends of a chat that begins with the assistant, since many templates need a message."""
        if begin is None:
            return None
        try:
            asked, prompted = (self.template.render([NEXT_QUESTION], None, prompt=prompt) for prompt in (False, True))
        except Exception:
            return None
        prompt = prompted[_common(asked, prompted) :]
        at = text.rfind(prompt, 0, begin)
        return at + len(prompt) if prompt and at >= 0 else None

    def _span_by_difference(self, example: Example, text: str, turn: int) -> Span:
        """Return the span of a turn, found as the text that it adds to the rendered chat."""
        before = self.template.render(example.messages[:turn], example.tools, prompt=True)
        through = self.template.render(example.messages[: turn + 1], example.tools)
        span = turn_span(text, before, through, self.eos_token)
        if span is None:
            raise UserError(
                "the chat template rewrites earlier turns, so the assistant's tokens cannot be told apart; "
                "mark them with {% generation %} in a --chat_template file, or use --loss_on all."
            )
        return span


def _common(one: str, other: str) -> int:
    """Return the length of what two texts begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.startswith(other[:middle]) else (low, middle - 1)
    return low


def _after_prompt(span: Span, ends: list[int]) -> Span:
    """Return a span from where the generation prompt ends inside it."""
    start, end = span
    return min((one for one in ends if start < one <= end), default=start), end


def turn_span(full: str, before: str, through: str, eos_token: str) -> Span | None:
    """Return the span of an assistant turn in a rendered chat; None if the full chat renders it differently.

    Only one difference is accepted: the full chat may lack the reasoning block at the start of an earlier turn.

    Args:
        full: the whole chat.
        before: the chat up to the turn, with the generation prompt.
        through: the chat up to and including the turn.
        eos_token: see SpanFinder.
    """
    start = len(before)
    if not full.startswith(before):
        # The generation prompt may begin the reasoning block, which earlier turns lack.
        block = BEGUN_BLOCK.search(before)
        if block is None or not full.startswith(before[: block.start()]):
            return None
        start = block.start()
    for ended in (through, through.removesuffix(eos_token)):
        if full.startswith(ended) and start <= len(ended):
            return start, len(ended)
        if ended.startswith(full[:start]) and (kept := _without_reasoning(ended[start:], full[start:])):
            return start, start + kept
    return None


def _without_reasoning(turn: str, rest: str) -> int | None:
    """Return the length of the turn without its reasoning block, if `rest` begins with it; None otherwise."""
    _block, end, kept = turn.partition(THINK_END)
    if not end:
        return None
    while kept.strip():
        if rest.startswith(kept):
            return len(kept)
        if not kept[0].isspace():
            return None
        kept = kept[1:]
    return None
