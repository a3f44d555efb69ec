"""Generate one answer of a trained model, written piece by piece while it is generated."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TextStreamer

from unsloth_ddp.data.chat.prompt import example_of, rendered
from unsloth_ddp.data.chat.render_limits import TemplateOverrun, check_length, limited_rendering, overrun_sentence
from unsloth_ddp.data.images.processing import ImageProcessing
from unsloth_ddp.data.sources.messages import Message
from unsloth_ddp.run.answers import Question, end_of_turn, padded_left
from unsloth_ddp.utils.errors import UserError, one_line

# Of models whose generation config does not say how long an answer may be.
MAX_NEW_TOKENS = 512


@dataclass(frozen=True)
class GenerationOptions:
    """Hold the settings of generation; None leaves a value to the model's generation config.

    Args:
        max_new_tokens: the length of an answer at most, in tokens.
        temperature: of sampling; 0 takes the most probable token each time.
        plain: continue the last message's text as it stands, without the chat template.
        template_values: what the chat template is given beside messages and tools.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    plain: bool = False
    template_values: dict[str, Any] = field(default_factory=dict)

    def arguments(self, model: Any, prompt_tokens: int) -> dict[str, Any]:
        """Return the arguments for model.generate.

        Raises:
            UserError: the prompt fills all positions of the model.
        """
        sampling: dict[str, Any] = {}
        if self.temperature == 0:
            # The others would be named as unused, once for each answer.
            sampling = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        elif self.temperature is not None:
            sampling = {"do_sample": True, "temperature": self.temperature}
        length = self.max_new_tokens or model.generation_config.max_new_tokens or MAX_NEW_TOKENS
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if positions and prompt_tokens >= positions:
            raise UserError(
                f"The conversation has {prompt_tokens:,} tokens, and the model reads at most {positions:,}; shorten "
                "the question, or start a new conversation with /reset."
            )
        return {**sampling, "max_new_tokens": min(length, positions - prompt_tokens) if positions else length}


class PieceStreamer(TextStreamer):
    """Hand on generated text in pieces, up to the end of the turn.

    Args:
        write: is given the pieces.
        end: what the chat template writes after an answer. To base models it may be plain text, not one token.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], None], end: str) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.end_of_turn = end
        self.text = ""
        self._unwritten = ""
        self._ended = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Write the text but for what may turn out to be the end of the turn, or white space around the answer."""
        if self._ended:
            return
        text_so_far = self._unwritten + text
        if self.end_of_turn and self.end_of_turn in text_so_far:
            text_so_far, self._ended = text_so_far.partition(self.end_of_turn)[0], True
        self._ended = self._ended or stream_end
        held_back = 0 if self._ended else _beginning_of(self.end_of_turn, text_so_far)
        piece = text_so_far[: len(text_so_far) - held_back].rstrip()
        self._unwritten = text_so_far[len(piece) :]
        if not self.text:
            piece = piece.lstrip()
        if piece:
            self.text += piece
            self.write(piece)


def _beginning_of(end: str, text: str) -> int:
    """Return how many of the last characters of `text` are the first of `end`."""
    return next((n for n in range(min(len(end) - 1, len(text)), 0, -1) if text.endswith(end[:n])), 0)


def render_prompt(
    tokenizer: Any, messages: list[Message], options: GenerationOptions, processing: ImageProcessing | None = None
) -> tuple[str, str]:
    """Return the prompt, and the text that ends the answer to it.

    Args:
        processing: of the images in the messages, if there are some.

    Raises:
        UserError: there is no chat template, or it refuses the messages.
    """
    if options.plain:
        return str(messages[-1]["content"]), ""
    if tokenizer.chat_template is None:
        raise UserError(
            "The run's tokenizer has no chat template, so it trained on plain text; add --plain, which continues a "
            "text."
        )
    try:
        with limited_rendering():
            token = processing.image_token if processing else None
            prompt = rendered(tokenizer, example_of(messages, options.template_values), token, prompt=True)
            question = Question([messages[-1]], "Hi.", template_values=options.template_values)
            return check_length(prompt), end_of_turn(tokenizer, question)
    except TemplateOverrun as error:
        raise UserError(overrun_sentence(error)) from None
    except Exception as error:  # templates raise exceptions of their own
        raise UserError(f"The chat template refuses the conversation: {one_line(error)}.") from None


def generate(
    model: Any,
    tokenizer: Any,
    messages: list[Message],
    options: GenerationOptions,
    write: Callable[[str], None],
    processing: ImageProcessing | None = None,
) -> str:
    """Return the answer to the messages; each piece of it is given to `write` while the rest is generated.

    Args:
        processing: of the images in the messages (JoinedText), if there are some.

    Raises:
        UserError: there is no chat template, it refuses the messages, or they are too long for the model.
    """
    prompt, end = render_prompt(tokenizer, messages, options, processing)
    images = example_of(messages).images
    if processing and images:
        row = {"input_ids": processing.expand(prompt, images).ids, "rendered": prompt, "images": images}
        inputs: Any = padded_left([row], tokenizer.pad_token_id, processing, model)
    else:
        inputs = tokenizer(text=prompt, add_special_tokens=options.plain, return_tensors="pt").to(model.device)
    arguments = options.arguments(model, inputs["input_ids"].shape[1])
    streamer = PieceStreamer(tokenizer, write, end)
    with torch.no_grad():
        model.generate(**inputs, **arguments, streamer=streamer, use_cache=True, pad_token_id=tokenizer.pad_token_id)
    return streamer.text
