"""Render an example and find the spans that the assistant wrote.

The spans come from the first of three sources: a template that marks them with {% generation %}; TRL's training variant
of the template, if it renders the same text; the difference between the chat rendered up to an assistant turn and the
chat rendered through it.

The tokenizer's own template is used wherever possible, because it renders chats at inference. TRL's variant is used
instead if the own template leaves out the reasoning of the answer, or rewrites earlier turns so that their spans cannot
be found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, Literal

from unsloth_ddp.data.chat_template import ChatTemplate, Span, TemplatePair
from unsloth_ddp.data.formats import Example
from unsloth_ddp.data.messages import LOSS_FLAGS, REASONING_KEYS, Message
from unsloth_ddp.data.rendered_parts import THINK_END, Part, PartChecker, row_shape
from unsloth_ddp.utils.errors import UserError

# Remarks on how a row was rendered; see NOTES.
Note = Literal["own", "training", "reasoning", "reasoning supervised", "text", "text supervised", "plain", "empty"]
NOTES: dict[str, str] = {
    "own": "TRL's training template would render them differently; the tokenizer's own chat template is used, as at "
    "inference (--chat_template training takes TRL's)",
    "training": "TRL's training template is used, because the tokenizer's own leaves out the reasoning of the answer or "
    "rewrites earlier turns",
    "reasoning": "the chat template leaves out the reasoning of earlier turns, as at inference, so these turns are not "
    "supervised; to train them, end a row at each of them, or give --chat_template training",
    "plain": "prompt and completion are texts, which are joined without the chat template and with nothing between them; "
    "to use the template, give lists of messages, or instruction and output",
    "empty": "an answer to learn is empty or only white space, so training teaches the model to answer nothing; remove such "
    "rows unless that is meant",
    "reasoning supervised": "the chat template leaves out the reasoning of earlier turns, as at inference",
    "text": "the chat template leaves out the text of turns that call tools, so these turns are not supervised; to train "
    "their calls, remove the text, or give a template that renders both",
    "text supervised": "the chat template leaves out the text of turns that call tools",
}
# Keys of a message that this package reads itself, or that carry nothing to train.
OWN_KEYS = {"role", "content", "tool_calls", "tool_call_id", *REASONING_KEYS, *LOSS_FLAGS}
NEXT_QUESTION: Message = {"role": "user", "content": "And then?"}
# Matches the text of a template that expects reasoning in a separate key, if the content contains reasoning too.
SECOND_BLOCK = re.compile(r"</think>\s*<think>")
# Matches the reasoning block at the end of a generation prompt: its begin, or a whole one without reasoning.
BEGUN_BLOCK = re.compile(r"<think>\s*(</think>\s*)?\Z")


@dataclass(frozen=True)
class RenderedChat:
    """The text of a chat, its supervised spans, notes on its rendering, and message keys that were not rendered."""

    text: str
    spans: list[Span]
    notes: tuple[Note, ...] = ()
    unread_keys: tuple[str, ...] = ()


class ChatRenderer:
    """Render examples with one pair of templates."""

    def __init__(self, pair: TemplatePair, eos_token: str, *, supervise_all: bool, use_training: bool) -> None:
        """Use TRL's variant for every row if `use_training` is set.

        Raises:
            UserError: `use_training` is set, the template marks no spans, and TRL has no variant of it.
        """
        if use_training and not pair.training and not pair.own.marked:
            raise UserError(
                "chat_template training: TRL has no training variant of this tokenizer's template; leave the option out."
            )
        self.own = pair.training if use_training and pair.training else pair.own
        self.training = None if use_training else pair.training
        # Shapes of rows (see row_shape) that TRL's variant renders differently.
        self._differing: set[Hashable] = set()
        self.eos_token = eos_token
        self.supervise_all = supervise_all
        self.checkers = {template: PartChecker(template) for template in (self.own, self.training) if template}

    def render(self, example: Example) -> RenderedChat:
        """Render an example and find its supervised spans, or with `supervise_all` the spans to leave out.

        Raises:
            UserError: a part of the row is missing in the text, or the assistant's spans cannot be found.
        """
        try:
            rendered = self._render_with_either(self._with_reasoning_apart(example))
        except Exception as error:
            if not any(message.get("tool_calls") for message in example.messages):
                raise
            try:
                return self._render_with_either(_with_calls_as_text(example))
            except Exception as second:
                # That the template cannot take objects says nothing of the row.
                raise second if isinstance(second, UserError) and not isinstance(error, UserError) else error from None
        if not (printed := _printed_by_python(example, rendered.text)):
            return rendered
        try:
            as_text = self._render_with_either(_with_arguments_as_text(example))
        except Exception:
            return rendered
        return as_text if _printed_by_python(example, as_text.text) < printed else rendered

    def _with_reasoning_apart(self, example: Example) -> Example:
        """Move reasoning out of the content if the template would put an empty reasoning block before it."""
        if not any(THINK_END in message["content"] for message in example.messages):
            return example
        if not SECOND_BLOCK.search(self.own.render(example.messages, example.tools)):
            return example
        moved = replace(example, messages=[_with_reasoning_key(message) for message in example.messages])
        return example if SECOND_BLOCK.search(self.own.render(moved.messages, moved.tools)) else moved

    def _render_with_either(self, example: Example) -> RenderedChat:
        """Render with the tokenizer's own template or, if that leaves something out, with TRL's variant."""
        try:
            return self._render_with(self.own, example)
        except UserError as error:
            if self.training is None:
                raise
            first = error
        try:
            rendered = self._render_with(self.training, example)
        except Exception:
            raise first from None
        return RenderedChat(rendered.text, rendered.spans, (*rendered.notes, "training"), rendered.unread_keys)

    def _render_with(self, template: ChatTemplate, example: Example) -> RenderedChat:
        missing = self.checkers[template].missing(example)
        lost = _turns_without_reasoning(example, missing, template)
        left_out = {*example.left_out, *(() if self.supervise_all else lost)}
        notes: list[Note] = []
        spans: list[Span] = []
        without_text = [i for i in lost if Part("content", i) in missing and _is_call_with_text(example.messages[i])]
        if without_text:
            notes.append("text supervised" if self.supervise_all else "text")
        if len(lost) > len(without_text):
            notes.append("reasoning supervised" if self.supervise_all else "reasoning")
        if self.supervise_all and not left_out:
            text = template.render(example.messages, example.tools)
        elif template.marked:
            text, spans = self._marked_spans(template, example, left_out)
        else:
            text = template.render(example.messages, example.tools)
            marked = self._same_text_marked(text, example, left_out)
            text, spans = marked or (text, self._spans_by_difference(template, example, text, left_out))
            if marked is None and self.training is not None:
                notes.append("own")
        keys = {key for message in example.messages for key, value in message.items() if value}
        unread = tuple(sorted(key for key in keys - OWN_KEYS if not template.reads(key)))
        return RenderedChat(text, spans, tuple(notes), unread)

    def _same_text_marked(self, text: str, example: Example, left_out: set[int]) -> tuple[str, list[Span]] | None:
        """Return the text and the spans of TRL's variant, if it renders the same text.

        It may add the end of the last turn, which the tokenizer's own template renders with the next turn (GLM).
        """
        if self.training is None or (shape := row_shape(example)) in self._differing:
            return None
        try:
            marked_text, spans = self._marked_spans(self.training, example, left_out)
        except Exception:
            return None
        ends_turn = bool(spans) and spans[-1][1] == len(marked_text) and marked_text.startswith(text)
        if marked_text == text or ends_turn:
            return marked_text, spans
        self._differing.add(shape)
        return None

    def _marked_spans(self, template: ChatTemplate, example: Example, left_out: set[int]) -> tuple[str, list[Span]]:
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

    def _spans_by_difference(
        self, template: ChatTemplate, example: Example, full: str, left_out: set[int]
    ) -> list[Span]:
        """Return the span of each assistant turn, found as the text that the turn adds to the rendered chat."""
        spans = []
        for index, message in enumerate(example.messages):
            learned = index >= example.prompt_messages and index not in left_out
            wanted = index in left_out if self.supervise_all else learned
            if message["role"] != "assistant" or not wanted:
                continue
            before = template.render(example.messages[:index], example.tools, prompt=True)
            through = template.render(example.messages[: index + 1], example.tools)
            span = turn_span(full, before, through, self.eos_token)
            if span is None:
                raise UserError(
                    "the chat template rewrites earlier turns, so the assistant's tokens cannot be told apart; "
                    "mark them with {% generation %} in a --chat_template file, or use --loss_on all."
                )
            spans.append(span)
        return spans


def turn_span(full: str, before: str, through: str, eos_token: str) -> Span | None:
    """Return the span of an assistant turn in a rendered chat; None if the full chat renders it differently.

    Only one difference is accepted: the full chat may lack the reasoning block at the start of an earlier turn.

    Args:
        full: the whole chat.
        before: the chat up to the turn, with the generation prompt.
        through: the chat up to and including the turn.
        eos_token: the EOS token, with which some templates end the chat but not each turn.
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


def _is_call_with_text(message: Message) -> bool:
    return bool(message.get("tool_calls")) and THINK_END not in (message["content"] or "")


def _turns_without_reasoning(example: Example, missing: frozenset[Part], template: ChatTemplate) -> list[int]:
    """Return the earlier assistant turns whose reasoning, or text beside tool calls, the template leaves out.

    Raises:
        UserError: another part is left out, or the reasoning of the last turn.
    """
    last = max(i for i, message in enumerate(example.messages) if message["role"] == "assistant")
    lost: list[int] = []
    for kind, index, call in sorted(missing):
        if kind == "tool":
            name = _name_of((example.tools or [])[index])
            raise UserError(
                f"the chat template does not render tools, so {name} is not in the rendered row; "
                "give one that does with --chat_template, or remove the row's tools."
            )
        message = example.messages[index]
        if kind == "tool call":
            if call:
                raise UserError(
                    f"the chat template leaves out tool call {call + 1} of the {len(message['tool_calls'])} in message "
                    f"{index + 1}; write each call as a message of its own, or give a template that renders all with "
                    "--chat_template."
                )
            raise UserError(
                f"the chat template does not render tools, so the call of {_name_of(message['tool_calls'][0])} is not in "
                "the rendered row; give one that does with --chat_template, or remove the row's tools."
            )
        if message["role"] != "assistant" or (index == last and kind == "content"):
            raise UserError(
                f"the chat template leaves out message {index + 1} of the row, of role {message['role']}; give one that "
                "renders it with --chat_template, or remove the message."
            )
        if index == last:
            raise UserError(_reasoning_refusal(example, index, template))
        lost.append(index)
    return lost


def _reasoning_refusal(example: Example, index: int, template: ChatTemplate) -> str:
    """Return the message for reasoning that is left out, with a change that makes the template render it."""
    message = example.messages[index]
    given = next((key for key in REASONING_KEYS if message.get(key)), None)
    what, fix = "the reasoning in the answer (<think>)", "remove it"
    if given:
        what, fix = f"the {given} of the answer", "write it into the content as <think>...</think>"
        for key in REASONING_KEYS:
            renamed = {**{name: value for name, value in message.items() if name != given}, key: message[given]}
            candidate = replace(example, messages=[*example.messages[:index], renamed, *example.messages[index + 1 :]])
            if key != given and Part("reasoning", index) not in PartChecker(template).missing(candidate):
                fix = f"rename it to {key}"
                break
    return f"the chat template leaves out {what}; {fix}, or give a template that renders it with --chat_template."


def _with_reasoning_key(message: Message) -> Message:
    reasoning, think, content = message["content"].partition(THINK_END)
    if message["role"] != "assistant" or not think or any(message.get(key) for key in REASONING_KEYS):
        return message
    thought = reasoning.rpartition("<think>")[2].strip("\n")
    return {**message, "reasoning_content": thought, "content": content.lstrip("\n")}


def _printed_by_python(example: Example, text: str) -> int:
    """Count the tool calls whose arguments stand in the text as Python prints an object, not as JSON."""
    calls = [call for message in example.messages for call in message.get("tool_calls") or []]
    given = [call["function"]["arguments"] for call in calls]
    return sum(text.count(str(arguments)) for arguments in given if isinstance(arguments, dict) and arguments)


def _with_calls_as_text(example: Example) -> Example:
    return replace(example, messages=[with_calls_as_text(message) for message in example.messages])


def _with_arguments_as_text(example: Example) -> Example:
    return replace(example, messages=[{**with_calls_as_text(m), "content": m["content"]} for m in example.messages])


def with_calls_as_text(message: Message) -> Message:
    """Write tool calls in OpenAI's form, which some templates need: arguments as JSON text, empty content as null."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def _name_of(tool: dict[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name"))[:100]
