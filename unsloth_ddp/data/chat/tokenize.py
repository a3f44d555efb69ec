"""Tokenize one example into token ids and labels.

The token that ends a supervised turn is supervised too, so that the model learns to stop.
"""

import json
import shlex
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from typing import Any

from unsloth_ddp.data.chat.labels import IGNORED, supervise_from_same_token
from unsloth_ddp.data.chat.parts import THINK_END
from unsloth_ddp.data.chat.render_limits import TemplateOverrun, failure_sentence, overrun_sentence
from unsloth_ddp.data.chat.renderer import RenderedChat, Renderers
from unsloth_ddp.data.chat.template import TRAINING, Span
from unsloth_ddp.data.chat.tokens import Characters, Tokens, stop_tokens
from unsloth_ddp.data.chat.turn_spans import same_prompt
from unsloth_ddp.data.chat.variants import as_list_of_parts, think_tokens
from unsloth_ddp.data.images.processing import ImageProcessing
from unsloth_ddp.data.sources.formats import Example
from unsloth_ddp.data.vocabulary import Vocabulary
from unsloth_ddp.utils.errors import Panic, UserError, panics_raised


@dataclass
class EncodedRow:
    """A tokenized row.

    Args:
        input_ids: token ids.
        labels: the same ids, IGNORED where a token is not supervised.
        stop_tokens: special tokens that end the row's last answer, at which generation has to stop.
        overlong: whether the row was cut.
        notes: keys of row_report.NOTES, some with a tab and what they name.
        unread_keys: keys of messages that the chat template does not read.
        written_tokens: special tokens that the row's own texts hold.
        parts: of a pair, the tokens of its two rows, which the lists above hold one after the other.
        desirable: of a labelled answer, [1] if it is desirable, otherwise [0].
        images: paths or data URIs; the last one ends before token `image_end`, and `rendered` is the chat in which they
            stand, before the expansion of image tokens.
        pixels: numbers of its images, as the model takes them.
        cuts_image: whether the row was cut before the end of its last image.
        prompt: the rendered text before what is supervised, of a row that is not plain text.
    """

    input_ids: list[int]
    labels: list[int]
    stop_tokens: list[int] = field(default_factory=list)
    overlong: bool = False
    notes: tuple[str, ...] = ()
    unread_keys: tuple[str, ...] = ()
    written_tokens: tuple[str, ...] = ()
    parts: list[int] = field(default_factory=list)
    desirable: list[int] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    rendered: str = ""
    image_end: int = 0
    pixels: int = 0
    cuts_image: bool = False
    prompt: str = ""


class Encoder:
    """Turn examples into token ids and labels."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        supervise_all: bool,
        chat_template: str | None = None,
        day: date | None = None,
        processing: ImageProcessing | None = None,
        vocabulary: Vocabulary | None = None,
        reasoning_in_content: bool = False,
    ) -> None:
        """Prepare the renderers.

        Args:
            processing: of images, if a row of the run has some.
            chat_template: --chat_template; a file is already set as the tokenizer's template.
            day: the date that templates print; today by default.
            vocabulary: the tokens that the model has weights for, if they are known.

        Raises:
            UserError: the tokenizer cannot map tokens to characters.
        """
        if not tokenizer.is_fast:
            raise UserError(
                "the tokenizer is a slow one, which cannot map tokens to characters; use a model with a tokenizer.json."
            )
        self.tokenizer, self.processing, self.vocabulary = tokenizer, processing, vocabulary
        self.supervise_all = supervise_all
        options: dict[str, Any] = {"supervise_all": supervise_all, "use_training": chat_template == TRAINING}
        options["image_token"] = processing.image_token if processing else None
        options["think"] = think_tokens(tokenizer.get_added_vocab()) if reasoning_in_content else None
        self.renderers = Renderers(tokenizer, day or date.today(), options)
        added = tokenizer.added_tokens_decoder
        self.characters = Characters(tokenizer)
        self.special_ids = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}

    def encode_pair(self, chosen: Example, rejected: Example) -> tuple[EncodedRow, EncodedRow]:
        """Tokenize both rows of a pair, without cutting them; the tokens before their answers are the same.

        Raises:
            UserError: see encode; the template renders their prompt in two ways.
        """
        rows = self.encode(chosen), self.encode(rejected)
        renderer = self.renderers.of(chosen)
        if chosen.text is None and renderer and not same_prompt(*(row.prompt for row in rows)):
            chats = renderer.render_pair(chosen, rejected)
            rows = self.encode(chosen, chats[0]), self.encode(rejected, chats[1])
        supervise_from_same_token([(row.input_ids, row.labels) for row in rows])
        return rows

    def encode(self, example: Example, chat: RenderedChat | None = None) -> EncodedRow:
        """Tokenize one example, without cutting it.

        Args:
            chat: the example as it is rendered; by default in the form that suits it best.

        Raises:
            UserError: the chat template cannot render the example, or the assistant's spans cannot be found.
        """
        if example.text is not None:
            encoded, markup = self._encode_text(example), tuple[str]()
        else:
            chat = chat or self._rendered(example)
            encoded, markup = self._encode_chat(example, chat), chat.markup
        if not encoded.input_ids:
            raise UserError("the chat template renders the row to nothing; fix the template, or remove the row.")
        if has_empty_answer(example):
            encoded.notes = (*encoded.notes, "empty")
        if repeats_prompt(example):
            encoded.notes = (*encoded.notes, "repeated")
        encoded.written_tokens = self._written_tokens(example, encoded.input_ids, markup)
        if self.vocabulary:
            self._compare(encoded, self.vocabulary)
        return encoded

    def _compare(self, row: EncodedRow, vocabulary: Vocabulary) -> None:
        """Note tokens whose weights stay untrained; refuse one without weights, other than the token of images."""
        ids = set(row.input_ids)
        if row.images and self.processing:
            ids.discard(self.tokenizer.convert_tokens_to_ids(self.processing.image_token))
        if (last := max(ids, default=0)) >= vocabulary.rows:
            raise UserError(vocabulary.refusal(self.tokenizer.convert_ids_to_tokens(last), last))
        untrained = self.tokenizer.convert_ids_to_tokens(sorted(ids & vocabulary.untrained))
        row.notes += tuple(f"untrained\t{shlex.quote(token)}" for token in untrained)
        meant = {*untrained, *vocabulary.trained}
        row.written_tokens = tuple(token for token in row.written_tokens if token not in meant)

    def _written_tokens(self, example: Example, ids: list[int], markup: tuple[str, ...]) -> tuple[str, ...]:
        """Return the special tokens that the row's texts hold, without markup that the template looks for."""
        texts = example.text or json.dumps([example.messages, example.tools], ensure_ascii=False)
        tokens = map(self.tokenizer.convert_ids_to_tokens, sorted(self.special_ids.intersection(ids)))
        return tuple(token for token in tokens if token in texts and token not in markup)

    def _encode_text(self, example: Example) -> EncodedRow:
        text, prompt_chars = str(example.text), 0 if self.supervise_all else example.prompt_chars
        if self.processing and self.processing.image_token in text:
            raise UserError(
                f"the text has the model's image token ({self.processing.image_token}) and no image; take it out."
            )
        bos = self.tokenizer.bos_token
        # Text that was rendered with a chat template already begins with BOS.
        tokens = self._tokenize(text, special=not (bos and text.startswith(bos)))
        # A token across the boundary contains the start of the completion, so it counts as completion.
        prompt = next((i for i, (_, end) in enumerate(tokens.offsets) if end > prompt_chars), len(tokens.ids))
        if not tokens.end_in({self.tokenizer.eos_token_id}):
            tokens.ids.append(self.tokenizer.eos_token_id)
        prompt = min(prompt, len(tokens.ids) - 1)
        encoded = self._encoded(tokens, [IGNORED] * prompt + tokens.ids[prompt:])
        if example.prompt_chars and self.renderers.plain is not None:
            encoded.notes += ("plain",)
        return encoded

    def _tokenize(self, text: str, *, special: bool) -> Tokens:
        # No warning of the tokenizer about long rows: they are cut, or refused, later.
        try:
            with panics_raised():
                encoded = self.tokenizer(
                    text=text, add_special_tokens=special, return_offsets_mapping=True, verbose=False
                )
        except Panic as panic:
            raise UserError(
                f"the model's tokenizer cannot tokenize the row: {panic}; its tokenizer.json is damaged, so download "
                "the model again."
            ) from None
        return Tokens(text, list(encoded["input_ids"]), encoded["offset_mapping"])

    def _rendered(self, example: Example) -> RenderedChat:
        try:
            if chat := self.renderers.render(example):
                return chat
        except UserError:
            raise
        except TemplateOverrun as error:
            raise UserError(overrun_sentence(error)) from None
        except Exception as error:
            raise UserError(failure_sentence(error)) from None
        raise UserError(self._without_template())

    def _encode_chat(self, example: Example, chat: RenderedChat) -> EncodedRow:
        spans, images, pixels = chat.spans, list[Span](), 0
        if self.processing and example.images:
            expanded = self.processing.expand(chat.text, example.images)
            tokens = Tokens(expanded.text, expanded.ids, expanded.offsets)
            images, pixels = [self._with_marks(tokens, after) for _, after in expanded.images], expanded.pixels
            spans = [expanded.moved(span) for span in spans]
        else:
            tokens = self._tokenize(chat.text, special=False)
        labels = self._labels(tokens, spans)
        for first, last in images:
            labels[first:last] = [IGNORED] * (last - first)
        if example.messages[-1]["role"] == "assistant" and not tokens.end_in(self.special_ids):
            tokens.ids.append(self.tokenizer.eos_token_id)
            last_is_trained = len(example.messages) - 1 not in example.left_out
            labels.append(self.tokenizer.eos_token_id if last_is_trained else IGNORED)
        encoded = self._encoded(tokens, labels)
        encoded.notes += chat.notes
        encoded.unread_keys, encoded.prompt = chat.unread_keys, chat.prompt
        if images:
            encoded.images, encoded.rendered, encoded.pixels = example.images, chat.text, pixels
            encoded.image_end = max(last for first, last in images if first < last)
        return encoded

    def _labels(self, tokens: Tokens, spans: list[Span]) -> list[int]:
        """Return the labels of tokens with these spans supervised, or with `supervise_all` all others."""
        labels = tokens.ids[:] if self.supervise_all else [IGNORED] * len(tokens.ids)
        for first, last in (tokens.of_turn(span, self.special_ids) for span in spans):
            labels[first:last] = [IGNORED] * (last - first) if self.supervise_all else tokens.ids[first:last]
        return labels

    def _with_marks(self, tokens: Tokens, image: Span) -> Span:
        """Return the tokens of an image, with the special tokens that the template writes around each."""
        (start, end), (mark_before, mark_behind) = image, self._around_images
        start -= len(mark_before) if tokens.text.endswith(mark_before, 0, start) else 0
        end += len(mark_behind) if tokens.text.startswith(mark_behind, end) else 0
        return tokens.of_span((start, end))

    @cached_property
    def _around_images(self) -> tuple[str, str]:
        """Return what the template writes before and behind the image token of an image part, white space aside."""
        assert self.processing is not None and self.renderers.plain is not None
        token, words = self.processing.image_token, ("Zq00001qZ", "Zq00002qZ")
        parts = [words[0], None, words[1]]
        chat = [{"role": "user", "content": as_list_of_parts(parts)}]
        try:
            text = self.renderers.plain.reader.template.render(chat, None)
            inside = text[text.index(words[0]) + len(words[0]) : text.index(words[1])]
            text_before, text_behind = inside.split(token)
        except Exception:
            # A template that takes texts only.
            return "", ""
        return text_before.strip(), text_behind.strip()

    def _without_template(self) -> str:
        if isinstance(self.tokenizer.chat_template, dict):
            names = ", ".join(sorted(self.tokenizer.chat_template))
            return f"the tokenizer has only named chat templates ({names}), and none named default; give one as a file."
        return "the tokenizer has no chat template; give one with --chat_template (chatml, or a file)."

    def _encoded(self, tokens: Tokens, labels: list[int]) -> EncodedRow:
        unwritable = sorted(self.characters.unwritable_in(tokens))
        notes = tuple(f"unwritten\t{json.dumps(characters, ensure_ascii=False)}" for characters in unwritable)
        return EncodedRow(tokens.ids, labels, stop_tokens(labels, tokens.is_blank, self.special_ids), notes=notes)


def has_empty_answer(example: Example) -> bool:
    """Return whether an answer to learn is empty or only white space: an assistant turn without tool calls, or a text.

    Reasoning alone is no answer.
    """
    if example.text is not None:
        return not example.text[example.prompt_chars :].strip()
    return any(
        message["role"] == "assistant"
        and index >= example.prompt_messages
        and index not in example.left_out
        and not message.get("tool_calls")
        and not message["content"].rpartition(THINK_END)[2].strip()
        for index, message in enumerate(example.messages)
    )


def repeats_prompt(example: Example) -> bool:
    """Return whether the answer to a prompt column begins with the same text, of more than a word such as Hello."""
    if example.text is not None:
        prompt, answer = example.text[: example.prompt_chars], example.text[example.prompt_chars :]
    elif 0 < (first := example.prompt_messages) < len(example.messages):
        prompt, answer = (example.messages[index]["content"] for index in (first - 1, first))
    else:
        return False
    return len(prompt.split()) > 1 and answer.lstrip().startswith(prompt.strip())


def encode_row(encoder: Encoder, example: Example, max_length: int) -> EncodedRow:
    """Tokenize an example and cut it to `max_length` tokens; a row that is cut has no stop tokens.

    Raises:
        UserError: see Encoder.encode.
    """
    if example.rejected is None:
        row = _cut(encoder.encode(example), max_length)
        row.desirable = [] if example.desirable is None else [int(example.desirable)]
        return row
    return _join_pair(*(_cut(row, max_length) for row in encoder.encode_pair(example, example.rejected)))


def _cut(row: EncodedRow, max_length: int) -> EncodedRow:
    if len(row.input_ids) > max_length:
        row.cuts_image = row.image_end > max_length
        row.input_ids, row.labels = row.input_ids[:max_length], row.labels[:max_length]
        row.overlong, row.stop_tokens = True, []
    return row


def _join_pair(chosen: EncodedRow, rejected: EncodedRow) -> EncodedRow:
    """Return both rows of a pair, one after the other.

    Both are cut at the same token, so their prompt stays the same. A pair that loses an answer has nothing to compare,
    so none of its tokens is supervised.
    """
    labels = [IGNORED, *chosen.labels[1:], IGNORED, *rejected.labels[1:]]
    if any(all(label == IGNORED for label in row.labels[1:]) for row in (chosen, rejected)):
        labels = [IGNORED] * len(labels)
    overlong = chosen.overlong or rejected.overlong
    identical = chosen.input_ids == rejected.input_ids and not overlong
    notes = [*chosen.notes, *rejected.notes, *(["identical"] if identical else [])]
    return EncodedRow(
        chosen.input_ids + rejected.input_ids,
        labels,
        chosen.stop_tokens,
        overlong,
        tuple(dict.fromkeys(notes)),
        tuple(dict.fromkeys(chosen.unread_keys + rejected.unread_keys)),
        tuple(dict.fromkeys(chosen.written_tokens + rejected.written_tokens)),
        [len(chosen.input_ids), len(rejected.input_ids)],
    )
