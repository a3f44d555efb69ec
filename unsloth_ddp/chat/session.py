"""Read questions from the terminal and write the answers while they are generated."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from unsloth_ddp.chat.speakers import Speaker
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.redaction import printable_lines

RESET, EXIT, HELP = "/reset", "/exit", "/help"
COMMANDS = f"{RESET} begins a new conversation, {EXIT} ends, Ctrl+C interrupts an answer."


def write_piece(piece: str) -> None:
    """Write a piece of an answer at once, with characters that a terminal would act on written out."""
    print(printable_lines(piece), end="", flush=True)


def answer_once(speakers: list[Speaker], question: str, *, empty: str = "") -> None:
    """Print the answer of each model; a single one without anything else.

    Args:
        empty: printed in place of an empty answer.

    Raises:
        UserError: the chat template refuses the question, or it is too long for the model.
    """
    for speaker in speakers:
        if speaker.label:
            write_piece(f"{speaker.label}: ")
        answer = speaker.answer(question, write_piece)
        print("" if answer else empty, flush=True)


def converse(speakers: list[Speaker], *, terminal: bool, read: Callable[[str], str] = input) -> None:
    """Answer questions until /exit or the end of the input.

    Args:
        terminal: a person asks, and is told what may be typed.
        read: returns the next line; raises EOFError at the end.
    """
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() its line editing
        print(COMMANDS, flush=True)
    while True:
        try:
            line = read("> " if terminal else "").strip()
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
    before = [speaker.history for speaker in speakers]
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
    for speaker, history in zip(speakers, before, strict=True):
        speaker.history = history
