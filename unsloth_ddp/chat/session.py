"""Load the models that answer, read questions from the terminal, and write the answers while they are generated."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from unsloth_ddp.data.images.processing import ImageProcessing, load_processing
from unsloth_ddp.data.images.values import JoinedText
from unsloth_ddp.data.sources.messages import Message
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.loading.load import stop_at
from unsloth_ddp.model.loading.trained import load_base, load_trained, load_trained_tokenizer, stop_tokens
from unsloth_ddp.run.generation import GenerationOptions, generate
from unsloth_ddp.run.result import RunResult
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.redaction import printable_lines

RESET, EXIT, HELP = "/reset", "/exit", "/help"
COMMANDS = f"{RESET} begins a new conversation, {EXIT} ends, Ctrl+C interrupts an answer."


def write_piece(piece: str) -> None:
    """Write a piece of an answer at once, with characters that a terminal would act on written out."""
    print(printable_lines(piece), end="", flush=True)


def answer_once(speakers: list[Speaker], question: str, *, empty: str = "") -> None:
    """Print the answer of each model; a single one without anything else.

    Raises:
        UserError: the chat template refuses the question, or it is too long for the model.
    """
    for speaker in speakers:
        if speaker.label:
            write_piece(f"{speaker.label}: ")
        answer = speaker.answer(question, write_piece)
        print("" if answer else empty, flush=True)


def converse(speakers: list[Speaker], *, terminal: bool) -> None:
    """Answer questions until /exit or the end of the input.

    Args:
        terminal: a person asks, and is told what may be typed.
    """
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() its line editing
        print(COMMANDS, flush=True)
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            if terminal:
                print(flush=True)
            break
        except KeyboardInterrupt:
            print(flush=True)
            continue
        if line == EXIT:
            break
        if line == RESET:
            for speaker in speakers:
                speaker.reset()
            print("Started a new conversation.", flush=True)
        elif line.startswith("/") and (line == HELP or " " not in line):
            print(COMMANDS, flush=True)
        elif line:
            _take_turn(speakers, line)


def _take_turn(speakers: list[Speaker], question: str) -> None:
    """Let each model answer; an error or an interruption ends this turn only, for all of them."""
    histories = [speaker.history for speaker in speakers]
    try:
        answer_once(speakers, question, empty="(nothing)")
        return
    except UserError as error:
        if speakers[0].label:
            # The line began with it.
            print(flush=True)
        print(f"chat: error: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("\nInterrupted. The conversation does not keep this question.", flush=True)
    for speaker, history in zip(speakers, histories, strict=True):
        speaker.history = history


@dataclass
class Speaker:
    """A model with its side of the conversation.

    Args:
        label: names it in front of its answers; empty where only one model answers.
        using: is entered while the model generates.
        history: the messages until now, those of `beginning` included.
        images: paths of images that stand before the first question.
        processing: of these images.
    """

    label: str
    model: Any
    tokenizer: Any
    options: GenerationOptions
    beginning: list[Message] = field(default_factory=list)
    using: Callable[[], AbstractContextManager[Any]] = nullcontext
    history: list[Message] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    processing: ImageProcessing | None = None

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
        first = not any(message["role"] == "user" for message in self.history)
        shown = JoinedText([*[None] * len(self.images), question], self.images) if self.images and first else question
        turns = [*self.history, {"role": "user", "content": shown}]
        with self.using():
            text = generate(self.model, self.tokenizer, turns, self.options, write, self.processing)
        if not self.options.plain:
            self.history = [*turns, {"role": "assistant", "content": text}]
        return text


def load_speakers(
    result: RunResult,
    runtime: Runtime,
    options: GenerationOptions,
    *,
    system: str | None,
    compare: bool,
    images: Sequence[str] = (),
) -> list[Speaker]:
    """Return the trained model, and before it the base model if `compare` is set; both read the run's chat template.

    With an adapter, one model is both: the base model answers with the adapter switched off.

    Raises:
        UserError: a model cannot be loaded here.
    """
    settings = result.settings
    processing = load_processing(settings) if images else None
    tokenizer = load_trained_tokenizer(settings, result.folder)
    beginning: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    stops = stop_tokens(settings, tokenizer)

    def speaker(label: str, model: Any, using: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Speaker:
        stop_at(model, stops)
        return Speaker(label, model, tokenizer, options, beginning, using, images=list(images), processing=processing)

    model = load_trained(settings, result.folder, runtime)
    if not compare:
        return [speaker("", model)]
    base = (
        speaker("base", model, model.disable_adapter)
        if result.is_adapter
        else speaker("base", load_base(settings, runtime))
    )
    return [base, speaker(result.run.name, model)]
