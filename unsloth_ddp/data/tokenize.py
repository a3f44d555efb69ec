"""One example -> token ids and labels, with proof that exactly what should be supervised is.

What the assistant writes is a list of spans of the rendered chat. Templates that mark it with {% generation %} say
where the spans are; for templates that do not, TRL keeps marked versions of the common ones, and for any other the
chat is rendered up to and with each assistant turn. The token that ends a turn is always supervised, so the model
learns to stop.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Any

from unsloth_ddp.data.formats import Example, Message
from unsloth_ddp.data.labels import IGNORED
from unsloth_ddp.utils.errors import UserError

TEMPLATES = Path(__file__).parent / "templates"

Span = tuple[int, int]


def read_chat_template(wanted: str) -> str:
    """The template of a Jinja file, or one of the kit's own by name.

    Raises:
        UserError: there is no such file or name, or it cannot be read.
    """
    own = {path.stem: path for path in TEMPLATES.glob("*.jinja")}
    try:
        path = own.get(wanted) or Path(wanted).expanduser()
        if not path.is_file():
            raise UserError(
                f"chat_template {wanted[:200]}: there is no such file, and the kit's own are: {', '.join(sorted(own))}."
            )
        return path.read_text(encoding="utf-8")
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"chat_template {wanted[:200]} cannot be read: {reason}; give a Jinja file in UTF-8.") from None


def set_chat_template(tokenizer: Any, wanted: str | None) -> None:
    """Give the tokenizer the template that --chat_template asks for, if it does."""
    if wanted is not None:
        tokenizer.chat_template = read_chat_template(wanted)


class Encoder:
    """Turns examples into `input_ids` and `labels` (-100 where a token is not supervised), both plain lists."""

    def __init__(self, tokenizer: Any, *, supervise_all: bool) -> None:
        """Raises UserError for a tokenizer that cannot say which characters a token stands for."""
        if not tokenizer.is_fast:
            raise UserError(
                "the tokenizer is a slow one, which cannot say which characters a token stands for; "
                "use a model with a tokenizer.json."
            )
        self.tokenizer = tokenizer
        self.supervise_all = supervise_all
        self.template, self.marked = _template(tokenizer, wants_marks=not supervise_all)
        added = tokenizer.added_tokens_decoder
        self.stop_ids = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}

    def encode(self, example: Example) -> dict[str, list[int]]:
        """Token ids and labels of one example, not yet cut to a length.

        Raises:
            UserError: the chat template cannot render the example, or the assistant's part cannot be told apart.
        """
        if example.text is not None:
            ids, keep = self._encode_text(example.text, 0 if self.supervise_all else example.prompt_chars)
        else:
            ids, keep = self._encode_chat(example)
        if not ids:
            raise UserError("the chat template renders the row to nothing; fix the template, or remove the row.")
        return {"input_ids": ids, "labels": [i if kept else IGNORED for i, kept in zip(ids, keep, strict=True)]}

    def _encode_text(self, text: str, prompt_chars: int) -> tuple[list[int], list[bool]]:
        bos = self.tokenizer.bos_token
        # A text that was rendered with a chat template begins with BOS already.
        special = not (bos and text.startswith(bos))
        encoded = self._encode(text, special)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        # A token over the border holds the completion's first characters, so it counts as the completion's.
        prompt = next((i for i, (_, end) in enumerate(offsets) if end > prompt_chars), len(ids))
        if not self._ended(ids, offsets, text, {self.tokenizer.eos_token_id}):
            ids.append(self.tokenizer.eos_token_id)
        return ids, [position >= min(prompt, len(ids) - 1) for position in range(len(ids))]

    def _encode(self, text: str, special: bool) -> Any:
        # Rows are cut later, and what a model cannot hold is refused then, so the tokenizer's warning would be untrue.
        return self.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)

    def _encode_chat(self, example: Example) -> tuple[list[int], list[bool]]:
        if self.template is None:
            raise UserError("the tokenizer has no chat template; give one with --chat_template (chatml, or a file).")
        try:
            text, spans = self._marked_spans(example) if self.marked else self._unmarked_spans(example)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"the chat template cannot render the row ({' '.join(str(error).split())}).") from None
        _check_tools(example, text)
        encoded = self._encode(text, special=False)
        ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        keep = [self.supervise_all or kept for kept in self._keep(ids, offsets, text, spans)]
        if example.messages[-1]["role"] == "assistant" and not self._ended(ids, offsets, text, self.stop_ids):
            ids, keep = [*ids, self.tokenizer.eos_token_id], [*keep, True]
        return ids, keep

    def _keep(self, ids: list[int], offsets: list[Span], text: str, spans: list[Span]) -> list[bool]:
        """Which tokens the spans stand for, each with the token that ends its turn and nothing behind that."""
        keep = [False] * len(ids)
        starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
        for start, end in spans:
            first = bisect_right(ends, start)
            last = max(first, bisect_left(starts, start + len(text[start:end].rstrip())))
            if last == first or ids[last - 1] not in self.stop_ids:
                behind = last
                while behind < len(ids) and not text[slice(*offsets[behind])].strip():
                    behind += 1
                if behind == len(ids):
                    last = behind
                elif ids[behind] in self.stop_ids:
                    last = behind + 1
            keep[first:last] = [True] * (last - first)
        return keep

    @staticmethod
    def _ended(ids: list[int], offsets: list[Span], text: str, stops: set[int]) -> bool:
        """Whether the last token that is more than white space is one of `stops`."""
        for token, offset in zip(reversed(ids), reversed(offsets), strict=True):
            if token in stops or text[slice(*offset)].strip():
                return token in stops
        return False

    def _marked_spans(self, example: Example) -> tuple[str, list[Span]]:
        # apply_chat_template gives a mask of tokens only, and a wrong one where a span begins with trimmed space.
        from transformers.utils.chat_template_utils import render_jinja_template

        def render(messages: list[Message]) -> tuple[str, list[Span]]:
            rendered: Any = render_jinja_template(
                conversations=[messages],
                tools=example.tools,
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
            (text,), (spans,) = rendered
            return text, list(spans)

        text, spans = render(example.messages)
        prompt = example.messages[: example.prompt_messages]
        answered = any(message["role"] == "assistant" for message in prompt)
        return text, spans[len(render(prompt)[1]) :] if answered else spans

    def _unmarked_spans(self, example: Example) -> tuple[str, list[Span]]:
        """Each assistant turn as what the rendered chat gains from it."""
        full = self._text(example.messages, example.tools)
        spans: list[Span] = []
        for index, message in enumerate(example.messages):
            if self.supervise_all or message["role"] != "assistant" or index < example.prompt_messages:
                continue
            before = self._text(example.messages[:index], example.tools, add_generation_prompt=True)
            through = self._text(example.messages[: index + 1], example.tools)
            if not full.startswith(through):
                # Some templates end the chat, and not each turn, with EOS.
                through = through.removesuffix(self.tokenizer.eos_token)
            if not (full.startswith(before) and full.startswith(through) and len(before) <= len(through)):
                raise UserError(
                    "the chat template rewrites earlier turns, so the assistant's tokens cannot be told apart; "
                    "mark them with {% generation %} in a --chat_template file, or use --loss_on all."
                )
            spans.append((len(before), len(through)))
        return full, spans

    def _text(self, messages: list[Message], tools: list[Any] | None, **options: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=self.template, tokenize=False, **options
        )


def encode_row(encoder: Encoder, example: Example, max_length: int) -> dict[str, Any]:
    """Return `input_ids` and `labels` of an example, at most `max_length` of each, and whether it was `overlong`.

    Raises:
        UserError: as Encoder.encode.
    """
    encoded = encoder.encode(example)
    cut = {name: values[:max_length] for name, values in encoded.items()}
    return {**cut, "overlong": len(encoded["input_ids"]) > max_length}


def _template(tokenizer: Any, *, wants_marks: bool) -> tuple[str | None, bool]:
    """The template to train with, and whether it marks what the assistant writes."""
    from jinja2 import TemplateSyntaxError
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template is None or not wants_marks:
        return template, False
    try:
        return (template, True) if has_generation_markers(template) else (get_training_chat_template(tokenizer), True)
    except TemplateSyntaxError as error:
        raise UserError(f"the chat template is not valid Jinja ({error}); fix it.") from None
    except Exception:
        # TRL knows no marked version of this template, or could not render its own test rows with it.
        return template, False


def _check_tools(example: Example, text: str) -> None:
    """Refuse a template that leaves tools out: the row would teach empty answers."""
    calls = [call for message in example.messages for call in message.get("tool_calls", [])]
    for tool in [*(example.tools or []), *calls]:
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name not in text:
            raise UserError(
                f"the chat template has no place for tools, so {name} is not in the rendered row; "
                "give one that has with --chat_template, or remove the row's tools."
            )
