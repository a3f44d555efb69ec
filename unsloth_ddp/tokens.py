"""One example -> token ids and labels, with proof that exactly what should be supervised is.

Templates that mark the assistant's part with {% generation %} say which tokens those are; for templates that do
not, TRL keeps marked versions of the common ones, and for any other the part is found by rendering the chat up to
and with each assistant turn. The token that ends a turn is always supervised, so the model learns to stop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unsloth_ddp.errors import UserError
from unsloth_ddp.formats import Example, Message
from unsloth_ddp.loss import IGNORED

TEMPLATES = Path(__file__).parent / "templates"


def set_chat_template(tokenizer: Any, wanted: str | None) -> None:
    """Give the tokenizer the template of a file, or one of the kit's own by name.

    Raises:
        UserError: there is no such file or name.
    """
    if wanted is None:
        return
    named = TEMPLATES / f"{wanted}.jinja"
    path = named if named.is_file() else Path(wanted).expanduser()
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in TEMPLATES.glob("*.jinja")))
        raise UserError(f"chat_template {wanted}: there is no such file, and the kit's own are: {names}.")
    tokenizer.chat_template = path.read_text(encoding="utf-8")


class Encoder:
    """Turns examples into `input_ids` and `labels` (-100 where a token is not supervised), both plain lists."""

    def __init__(self, tokenizer: Any, *, supervise_all: bool) -> None:
        from trl.chat_template_utils import get_training_chat_template, has_generation_markers

        self.tokenizer = tokenizer
        self.supervise_all = supervise_all
        self.template = tokenizer.chat_template
        self.marked = False
        if self.template is not None and not supervise_all:
            self.marked = has_generation_markers(self.template)
            if not self.marked:
                try:
                    self.template = get_training_chat_template(tokenizer) or self.template
                    self.marked = True
                except ValueError:
                    # TRL knows no marked version of this template.
                    self.marked = False
        self.stop_ids = {tokenizer.eos_token_id, *tokenizer.all_special_ids} - {None}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.stop_ids |= {token_id for token_id, token in added.items() if token.special}

    def encode(self, example: Example) -> dict[str, list[int]]:
        """Token ids and labels of one example, not yet cut to a length.

        Raises:
            UserError: the chat template cannot render the example, or the assistant's part cannot be told apart.
        """
        if example.text is not None:
            return self._encode_text(example.text, example.prompt_chars)
        return self._encode_chat(example)

    def _encode_text(self, text: str, prompt_chars: int) -> dict[str, list[int]]:
        encoded = self.tokenizer(text, return_offsets_mapping=True)
        ids = list(encoded["input_ids"])
        labels = [
            token if start >= prompt_chars and end > start else IGNORED
            for token, (start, end) in zip(ids, encoded["offset_mapping"], strict=True)
        ]
        # Some tokenizers end every text with EOS themselves; it has no characters, so it is not supervised yet.
        if not ids or ids[-1] != self.tokenizer.eos_token_id:
            ids.append(self.tokenizer.eos_token_id)
            labels.append(IGNORED)
        labels[-1] = ids[-1]
        return {"input_ids": ids, "labels": labels}

    def _encode_chat(self, example: Example) -> dict[str, list[int]]:
        if self.template is None:
            raise UserError("the tokenizer has no chat template; give one with --chat_template (chatml, or a file).")
        try:
            ids, mask = self._render(example)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"the chat template cannot render the row ({' '.join(str(error).split())}).") from None
        mask = self._with_stop_tokens(ids, mask)
        if mask and mask[-1] and ids[-1] not in self.stop_ids and self.tokenizer.eos_token_id is not None:
            ids, mask = [*ids, self.tokenizer.eos_token_id], [*mask, True]
        labels = [token if keep else IGNORED for token, keep in zip(ids, mask, strict=True)]
        return {"input_ids": ids, "labels": labels}

    def _render(self, example: Example) -> tuple[list[int], list[bool]]:
        if self.supervise_all:
            ids = self._ids(self._text(example.messages, example.tools))
            mask = [True] * len(ids)
        elif self.marked:
            encoded = self.tokenizer.apply_chat_template(
                example.messages,
                tools=example.tools,
                chat_template=self.template,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            ids, mask = list(encoded["input_ids"]), [bool(m) for m in encoded["assistant_masks"]]
        else:
            return self._render_unmarked(example)
        if example.prompt_messages:
            prompt = self._text(example.messages[: example.prompt_messages], example.tools, generation_prompt=True)
            skip = len(self._ids(prompt))
            mask = [keep and position >= skip for position, keep in enumerate(mask)]
        return ids, mask

    def _render_unmarked(self, example: Example) -> tuple[list[int], list[bool]]:
        """Find each assistant turn as what the rendered chat gains from it."""
        full = self._text(example.messages, example.tools)
        spans = []
        for index, message in enumerate(example.messages):
            if message["role"] != "assistant" or index < example.prompt_messages:
                continue
            before = self._text(example.messages[:index], example.tools, generation_prompt=True)
            through = self._text(example.messages[: index + 1], example.tools)
            if not (full.startswith(before) and full.startswith(through) and len(before) < len(through)):
                raise UserError(
                    "the chat template rewrites earlier turns, so the assistant's tokens cannot be told apart; "
                    "mark them with {% generation %} in a --chat_template file, or use --loss_on all."
                )
            spans.append((len(before), len(through.rstrip())))
        encoded = self.tokenizer(full, add_special_tokens=False, return_offsets_mapping=True)
        mask = [
            any(start < end_char and end > start_char for start_char, end_char in spans)
            for start, end in encoded["offset_mapping"]
        ]
        return list(encoded["input_ids"]), mask

    def _with_stop_tokens(self, ids: list[int], mask: list[bool]) -> list[bool]:
        """Supervise the special token right behind a supervised part: it ends the turn."""
        extended = list(mask)
        for position in range(1, len(ids)):
            ends = mask[position - 1] and not mask[position]
            if ends and ids[position] in self.stop_ids and ids[position - 1] not in self.stop_ids:
                extended[position] = True
        return extended

    def _text(self, messages: list[Message], tools: list[Any] | None, generation_prompt: bool = False) -> str:
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
