"""Load the models that answer: the trained one, and its base model beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from unsloth_ddp.data.messages import Message
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.trained import load_base, load_trained, load_trained_tokenizer, set_stop_tokens
from unsloth_ddp.run.generation import GenerationOptions, generate
from unsloth_ddp.run.result import RunResult


@dataclass
class Speaker:
    """A model with its side of the conversation.

    Args:
        label: names it in front of its answers; empty where only one model answers.
        using: is entered while the model generates.
        history: the messages until now, those of `beginning` included.
    """

    label: str
    model: Any
    tokenizer: Any
    options: GenerationOptions
    beginning: list[Message] = field(default_factory=list)
    using: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    history: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation."""
        self.history = list(self.beginning)

    def answer(self, question: str, write: Callable[[str], None]) -> str:
        """Return the answer to a question, and remember both; `write` is given the pieces as they are generated.

        A question that is refused, or whose answer is interrupted, is not remembered.

        Raises:
            UserError: the chat template refuses the conversation, or it is too long for the model.
        """
        asked = [*self.history, {"role": "user", "content": question}]
        with self.using():
            text = generate(self.model, self.tokenizer, asked, self.options, write)
        if not self.options.plain:
            self.history = [*asked, {"role": "assistant", "content": text}]
        return text


def load_speakers(
    result: RunResult, runtime: Runtime, options: GenerationOptions, *, system: str | None, compare: bool
) -> list[Speaker]:
    """Return the trained model, and before it the base model if `compare` is set; both read the run's chat template.

    With an adapter, one model is both: the base model answers with the adapter switched off.

    Raises:
        UserError: a model cannot be loaded here.
    """
    settings = result.settings
    tokenizer = load_trained_tokenizer(settings, result.folder)
    beginning: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    model = load_trained(settings, result.folder, runtime)
    set_stop_tokens(settings, model, tokenizer)
    speakers = [Speaker(result.run.name if compare else "", model, tokenizer, options, beginning)]
    if compare and result.is_adapter:
        speakers.insert(0, Speaker("base", model, tokenizer, options, beginning, model.disable_adapter))
    elif compare:
        base = load_base(settings, runtime)
        set_stop_tokens(settings, base, tokenizer)
        speakers.insert(0, Speaker("base", base, tokenizer, options, beginning))
    return speakers
