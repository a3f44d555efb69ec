"""A conversation in the terminal, with models that say what they were asked."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from unsloth_ddp.chat import session
from unsloth_ddp.chat.__main__ import main
from unsloth_ddp.chat.session import COMMANDS, Speaker, answer_once, converse, write_piece
from unsloth_ddp.run.generation import GenerationOptions
from unsloth_ddp.utils.errors import UserError

SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(autouse=True)
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer with the number of messages and the last of them; refuse, fall silent and stop on request."""

    def generate(
        model: Any,
        tokenizer: Any,
        messages: list[Any],
        options: Any,
        write: Callable[[str], None],
        processing: Any = None,
    ) -> str:
        asked = messages[-1]["content"]
        if asked == "refuse":
            raise UserError("Too long.")
        text = "" if asked == "silence" else f"{model}{len(messages)} {asked}"
        write(text)
        if asked == "stop" and model != "base":
            raise KeyboardInterrupt
        return text

    monkeypatch.setattr(session, "generate", generate)


def speaker(label: str = "", model: str = "", *, plain: bool = False) -> Speaker:
    return Speaker(label, model, None, GenerationOptions(plain=plain), [] if plain else [SYSTEM])


def said(capsys: pytest.CaptureFixture[str], *lines: str, speakers: list[Speaker] | None = None) -> list[str]:
    with patch("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines))):
        converse(speakers or [speaker()], terminal=False)
    return capsys.readouterr().out.splitlines()


def test_the_history_is_kept_until_it_is_reset(capsys: pytest.CaptureFixture[str]) -> None:
    # Messages: the system prompt, and two for each question before.
    assert said(capsys, "one", "two", "", "/reset", "three") == [
        "2 one",
        "4 two",
        "Started a new conversation.",
        "2 three",
    ]


def test_exit_ends_and_an_unknown_command_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "/what", "/etc/hosts is what?", "/exit", "more") == [COMMANDS, "2 /etc/hosts is what?"]


def test_each_model_keeps_a_history_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    both = [speaker("base", "base"), speaker("run", "run")]
    assert said(capsys, "one", "two", speakers=both) == [
        "base: base2 one",
        "run: run2 one",
        "base: base4 two",
        "run: run4 two",
    ]
    assert both[0].history[2] == {"role": "assistant", "content": "base2 one"}


@pytest.mark.parametrize("question", ["stop", "refuse"])
def test_a_question_without_a_whole_answer_is_forgotten_by_all(
    question: str, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [speaker("base", "base"), speaker("run", "run")]
    assert said(capsys, question, "next", speakers=both)[-2:] == ["base: base2 next", "run: run2 next"]


def test_an_empty_answer_is_named_in_a_conversation_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "silence") == ["(nothing)"]
    answer_once([speaker()], "silence")
    assert capsys.readouterr().out == "\n"


def test_plain_text_has_no_history(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "one", "two", speakers=[speaker(plain=True)]) == ["1 one", "1 two"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("nowhere", "nowhere: there is no such folder; give the folder of a run"),
        ("x --max_new_tokens 0", "--max_new_tokens is 0, but it has to be above 0."),
        ("x --temperature -1", "--temperature is -1, but it has to be 0 or more."),
        ("x --temperature nan", "--temperature is nan, but it has to be 0 or more."),
        ("x --plain --system S", "--system has no place in --plain"),
        ("x --ask=", "--ask is empty; give the question."),
        ("x --max_tokens 5", "there is no option max_tokens; did you mean max_new_tokens?"),
        ("", "the following arguments are required: RUN"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    options: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("chat: error: ") and sentence in printed.err
    assert printed.err.count("\n") == 1


def test_an_answer_cannot_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """A model from elsewhere may have learned to write a title, a link or a clipboard's content."""
    write_piece("a\tb\n\x1b]0;owned\x07\x9b2J\u202e\r\n")
    assert capsys.readouterr().out == "a\tb\n\\x1b]0;owned\\x07\\x9b2J\\u202e \n"
