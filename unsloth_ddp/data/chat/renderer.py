"""Render an example, check that every part of the row arrives, and find what the assistant wrote.

The tokenizer's own template is used wherever possible, because it renders chats at inference. TRL's training variant is
used instead if the own template leaves out a part of the row that has to arrive, or rewrites earlier turns so that
their spans cannot be found.
"""

import contextlib
import json
import re
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

from unsloth_ddp.data.chat.losses import (
    is_call_with_text,
    notes_on_markup,
    notes_on_texts,
    tool_keys_left_out,
    turns_left_out,
)
from unsloth_ddp.data.chat.parts import REPEATED, Markup, Part, StandIn, stand_in
from unsloth_ddp.data.chat.scaffold import (
    Position,
    Scaffold,
    not_found_in,
    parts_with_messages,
    places_in,
    position_of,
    prints_parts,
    scaffold_of,
    spans_at,
    unknown_scaffold,
)
from unsloth_ddp.data.chat.template import ChatTemplate, Span, TemplatePair, template_pair, variables_of
from unsloth_ddp.data.chat.turn_spans import SpanFinder, same_prompt
from unsloth_ddp.data.chat.variants import variants
from unsloth_ddp.data.sources.formats import Example
from unsloth_ddp.data.sources.messages import REASONING_KEYS
from unsloth_ddp.data.sources.values import is_empty
from unsloth_ddp.data.template_values import COLUMN
from unsloth_ddp.utils.errors import UserError

# Keys of a message that the scaffold covers.
OWN_KEYS = {"role", "content", "tool_calls", "tool_call_id", *REASONING_KEYS}
# Matches the text of a template that expects reasoning in a separate key, if the content contains reasoning too.
SECOND_BLOCK = re.compile(r"</think>\s*<think>")
# Kinds of parts that a template may print as JSON.
WHOLE = ("tool", "arguments")
# Rows may be all different.
MOST_PLANS = 2_000
# They may all give their templates other values, such as tools.
MOST_RENDERERS = 100


@dataclass(frozen=True)
class RenderedChat:
    """The text of a chat, its supervised spans, notes on its rendering, and message keys that were not rendered."""

    text: str
    spans: list[Span]
    # The text before what is supervised.
    prompt: str
    # Markup that the template looks for in texts.
    markup: tuple[str, ...]
    notes: tuple[str, ...] = ()
    unread_keys: tuple[str, ...] = ()
    # How many things another form of the row may render better.
    faults: int = 0


@dataclass(frozen=True)
class Plan:
    """Hold what a template does with all rows of one stand-in.

    Args:
        scaffold: the places of the parts.
        spans: the supervised spans by their place in the scaffold; None if they have to be found in each row.
        notes: remarks on the spans.
        ending: the end of the last turn, which the template itself renders with the next turn.
        unread_keys: keys of messages that do not change the text.
        second_block: whether the text has two blocks of reasoning, one behind the other.
        markup: notes on the markup of the rows.
    """

    scaffold: Scaffold
    spans: tuple[tuple[Position, Position], ...] | None = None
    notes: tuple[str, ...] = ()
    ending: str = ""
    unread_keys: tuple[str, ...] = ()
    second_block: bool = False
    markup: tuple[str, ...] = ()


class RowReader:
    """Render rows with one template, and find their parts and spans; rows with equal stand-ins share a plan."""

    def __init__(
        self,
        template: ChatTemplate,
        training: ChatTemplate | None,
        eos_token: str,
        supervise_all: bool,
        image_token: str | None,
    ) -> None:
        self.template = template
        self.image_token = image_token
        self.looked_for = template.literals()
        self.markup = Markup(self.looked_for)
        self.spans = SpanFinder(template, training, eos_token, supervise_all)
        self._plans: dict[str, Plan | None] = {}

    def read(self, example: Example) -> RenderedChat:
        """Render a row.

        Raises:
            UserError: a part of the row is missing in the text, or the assistant's spans cannot be found.
        """
        text = self.template.render(example.messages, example.tools)
        self._check_images(example, text)
        standin, plan = self._plan_of(example)
        places = places_in(text, plan.scaffold, standin) if plan else None
        if not places and (standin.any_tools or standin.any_arguments):
            standin, plan = self._planned(example, any_tools=False, any_arguments=False)
            places = places_in(text, plan.scaffold, standin) if plan else None
        scaffold = plan.scaffold if plan else unknown_scaffold(standin)
        if any(isinstance(message["content"], list) for message in example.messages) and prints_parts(scaffold):
            raise ValueError("the template prints a list of content parts as Python does")
        missing = scaffold.missing if places else not_found_in(text, scaffold, standin)
        lost = turns_left_out(example, missing, scaffold.repeated, standin.values, self._missing)
        notes = self._notes_on(example, missing, lost)
        if plan and places and plan.spans is not None:
            text += plan.ending
            spans = spans_at(plan.spans, places, text)
            notes += plan.notes
        else:
            text, found_spans, more = self.spans.find(example, text, lost, ())
            spans, notes = found_spans, (*notes, *more)
        python = places is not None and places.python
        second_block = plan.second_block if plan else bool(SECOND_BLOCK.search(text))
        if plan:
            notes += plan.markup
        if places:
            notes += tuple(notes_on_texts(standin, text, scaffold, places))
        notes += ("python",) * python + ("second block",) * second_block
        prompt = text[: spans[0][0]] if spans else text
        unread_keys = plan.unread_keys if plan else ()
        return RenderedChat(text, spans, prompt, self.markup.literals, notes, unread_keys, python + second_block)

    def _check_images(self, example: Example, text: str) -> None:
        if self.image_token is None or (tokens := text.count(self.image_token)) == len(example.images):
            return
        raise UserError(
            f"the rendered row has {tokens} image token(s) ({self.image_token}) for {len(example.images)} image(s); "
            "take the token out of the texts, or give a template that renders every image with --chat_template."
        )

    def _missing(self, example: Example) -> frozenset[Part]:
        """Return the parts of a row that the template leaves out; all of them if it cannot render the row."""
        standin, plan = self._plan_of(example)
        return plan.scaffold.missing if plan else frozenset(standin.values)

    def _notes_on(self, example: Example, missing: frozenset[Part], lost: list[int]) -> tuple[str, ...]:
        contents = {part.number for part in missing if part.kind == "content"}
        without_text = {i for i in lost if i in contents and is_call_with_text(example.messages[i])}
        notes: list[str] = []
        if without_text:
            notes.append("text supervised" if self.spans.supervise_all else "text")
        if set(lost) - without_text:
            notes.append("reasoning supervised" if self.spans.supervise_all else "reasoning")
        return tuple(notes)

    def _plan_of(self, example: Example) -> tuple[StandIn, Plan | None]:
        """Return the stand-in of a row and its plan, which is None if the template cannot render the stand-in.

        Whether tools and arguments are printed as JSON is found with one description and one argument for all.
        """
        standin, plan = self._planned(example, any_tools=True, any_arguments=True)
        styles = {slot.part: slot.style for slot in plan.scaffold.slots} if plan else {}
        as_json = {
            kind: all(styles.get(part) is not None for part in standin.whole if part.kind == kind) for kind in WHOLE
        }
        if all(as_json.values()):
            return standin, plan
        return self._planned(example, any_tools=as_json["tool"], any_arguments=as_json["arguments"])

    def _planned(self, example: Example, *, any_tools: bool, any_arguments: bool) -> tuple[StandIn, Plan | None]:
        standin = stand_in(example, self.markup, any_tools=any_tools, any_arguments=any_arguments)
        key = standin.key
        if key not in self._plans:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            self._plans[key] = self._plan(standin)
        return standin, self._plans[key]

    def _plan(self, standin: StandIn) -> Plan | None:
        example = standin.example
        try:
            text = self.template.render(example.messages, example.tools)
        except Exception:
            return None
        scaffold, places = scaffold_of(text, standin)
        plan = Plan(
            scaffold,
            unread_keys=self._unread(example, text),
            second_block=bool(SECOND_BLOCK.search(text)),
            markup=tuple(sorted(notes_on_markup(standin, scaffold, text, self.looked_for))),
        )
        try:
            lost = turns_left_out(
                example, scaffold.missing, scaffold.repeated, standin.values, lambda other: frozenset(standin.values)
            )
            ended, spans, notes = self.spans.find(example, text, lost, parts_with_messages(scaffold, places))
        except Exception:
            return plan
        positions = [(position_of(begin, places, ended), position_of(end, places, ended)) for begin, end in spans]
        inside = tuple((begin, end) for begin, end in positions if begin is not None and end is not None)
        if len(inside) < len(positions):
            return plan
        return replace(plan, spans=inside, notes=tuple(notes), ending=ended[len(text) :])

    def _unread(self, example: Example, text: str) -> tuple[str, ...]:
        """Return the keys of messages without which the text is the same, and keys of tools that it lacks."""
        keys = {
            key
            for message in example.messages
            for key, value in message.items()
            if key not in OWN_KEYS and not is_empty(value) and not str(value).startswith(REPEATED)
        }
        unread = {key for key in keys if self._same_without(key, example, text)}
        return tuple(sorted(unread | tool_keys_left_out(example.tools or [], text)))

    def _same_without(self, key: str, example: Example, text: str) -> bool:
        messages = [{name: value for name, value in message.items() if name != key} for message in example.messages]
        try:
            return self.template.render(messages, example.tools) == text
        except Exception:
            return False


class ChatRenderer:
    """Render examples with one pair of templates."""

    def __init__(
        self,
        pair: TemplatePair,
        eos_token: str,
        *,
        supervise_all: bool,
        use_training: bool,
        image_token: str | None = None,
        think: tuple[str, str] | None = None,
    ) -> None:
        """Use TRL's variant for every row if `use_training` is set.

        Args:
            think: what begins and ends reasoning that is written into the content where the template leaves it out.
            image_token: what stands for an image in a rendered text, if rows have images.

        Raises:
            UserError: `use_training` is set, the template marks no spans, and TRL has no variant of it.
        """
        if use_training and not pair.training and not pair.template.marked:
            raise UserError(
                "chat_template training: TRL has no training variant of this tokenizer's template; leave the option "
                "out."
            )
        self.pair, self.think = pair, think
        template = pair.training if use_training and pair.training else pair.template
        training = None if use_training else pair.training
        self.reader = RowReader(template, training, eos_token, supervise_all, image_token)
        self.training = RowReader(training, None, eos_token, supervise_all, image_token) if training else None

    def render(self, example: Example) -> RenderedChat:
        """Render an example and find its supervised spans, or with `supervise_all` the spans to leave out.

        Raises:
            UserError: a part of the row is missing in the text, or the assistant's spans cannot be found.
        """
        try:
            return _read_best(self.reader, example, self.think)
        except Exception as error:
            if self.training is None:
                raise
            try:
                rendered = _read_best(self.training, example, self.think)
            except Exception:
                raise error from None
        return self._with_note(rendered, self.training)

    def _with_note(self, rendered: RenderedChat, reader: RowReader) -> RenderedChat:
        """Return a rendered chat with a note if it is TRL's variant that rendered it."""
        return replace(rendered, notes=(*rendered.notes, "training")) if reader is self.training else rendered

    def render_pair(self, chosen: Example, rejected: Example) -> tuple[RenderedChat, RenderedChat]:
        """Render both rows of a pair with one template and in one form, so that they have the same prompt.

        Raises:
            UserError: no form gives both the same prompt.
        """
        rendered_pairs: list[tuple[RenderedChat, RenderedChat]] = []
        for reader in filter(None, (self.reader, self.training)):
            forms = (
                variants(first, reader.template.prints_bare, reader.image_token, beside=second, think=self.think)
                for first, second in ((chosen, rejected), (rejected, chosen))
            )
            for form in zip(*forms, strict=True):
                with contextlib.suppress(Exception):
                    first, second = map(reader.read, form)
                    if same_prompt(first.prompt, second.prompt):
                        rendered_pairs.append((self._with_note(first, reader), self._with_note(second, reader)))
        if not rendered_pairs:
            raise UserError(
                "the chat template renders the prompt differently before the two answers, for example without the "
                "reasoning of earlier turns before one of them; write both answers in the same form (both with "
                "reasoning or none), remove the reasoning from the prompt, or give another template with "
                "--chat_template."
            )
        return min(rendered_pairs, key=lambda pair: pair[0].faults + pair[1].faults)


class Renderers:
    """Choose the renderer of a row."""

    def __init__(self, tokenizer: Any, day: date, options: dict[str, Any]) -> None:
        """Prepare the renderers of the tokenizer's templates.

        Args:
            day: the date that templates print.
            options: of ChatRenderer.
        """
        self._eos_token, self._options = tokenizer.eos_token, options
        with_tools = isinstance(tokenizer.chat_template, dict)
        pairs = [
            template_pair(tokenizer, day, with_tools=tools) for tools in ([False, True] if with_tools else [False])
        ]
        renderers = [self._renderer(pair) if pair else None for pair in pairs]
        self._by_tools = renderers[0], renderers[-1]
        self._with_values: dict[str, ChatRenderer] = {}

    @property
    def plain(self) -> ChatRenderer | None:
        """Return the renderer of rows without tools; None if the tokenizer has no template for them."""
        return self._by_tools[0]

    def render(self, example: Example) -> RenderedChat | None:
        """Render a row, and find its supervised spans; None if the tokenizer has no template for it.

        Raises:
            UserError: see ChatRenderer.render.
        """
        renderer = self.of(example)
        if renderer is None:
            return None
        chat = renderer.render(example)
        if not example.template_values:
            return chat
        read = variables_of(renderer.pair.template.source) | {"documents"}
        unread = tuple(f"{COLUMN}.{name[:100]}" for name in sorted(example.template_values.keys() - read))
        return replace(chat, unread_keys=chat.unread_keys + unread)

    def of(self, example: Example) -> ChatRenderer | None:
        """Return the renderer of a row; None if the tokenizer has no template for it."""
        renderer, values = self._by_tools[bool(example.tools)], example.template_values
        if renderer is None or not values:
            return renderer
        key = json.dumps([bool(example.tools), values], sort_keys=True)
        if key not in self._with_values:
            if len(self._with_values) >= MOST_RENDERERS:
                self._with_values.clear()
            self._with_values[key] = self._renderer(renderer.pair.with_values(values))
        return self._with_values[key]

    def _renderer(self, pair: TemplatePair) -> ChatRenderer:
        return ChatRenderer(pair, self._eos_token, **self._options)


def _read_best(reader: RowReader, example: Example, think: tuple[str, str] | None) -> RenderedChat:
    """Return the row in the first of its forms that the template renders without a fault, or else in the best one."""
    read: list[RenderedChat] = []
    errors: list[Exception] = []
    tried: list[Example] = []
    for variant in variants(example, reader.template.prints_bare, reader.image_token, think=think):
        if variant in tried:
            continue
        tried.append(variant)
        try:
            read.append(reader.read(variant))
        except Exception as error:
            errors.append(error)
            continue
        if not read[-1].faults:
            return read[-1]
    if read:
        return min(read, key=lambda chat: chat.faults)
    # That a template cannot take objects says nothing of the row.
    raise next((error for error in errors if isinstance(error, UserError)), errors[0])
