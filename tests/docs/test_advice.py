"""Advice that the kit prints: the options, values and commands in its sentences are taken when they are typed."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator

import pytest

from tests.conftest import REPO
from tests.docs.test_docs import OF_OTHERS, usage
from unsloth_ddp.config.command_line import make_parser
from unsloth_ddp.config.options import OPTIONS, TYPES
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.config.trainer_args import check_trainer_args
from unsloth_ddp.config.values import convert_value
from unsloth_ddp.utils.errors import UserError

COMMANDS = ("chat", "export", "parity", "plan", "port", "preflight", "runs")
# What stands for a value that a sentence has filled in.
FILLED_IN = "VALUE"
# Words that take the place of a value in a sentence.
STAND_INS = re.compile(rf"[A-Z_]+|\.\.\.|.*{FILLED_IN}.*")
# Words of a sentence that may follow an option that has choices.
WORDS = {"and", "at", "or", "with", "for", "instead", "is", "too", "trains", "sets", "alone"}
# Of nvidia-smi, git, pip and other programs that sentences name.
PROGRAMS = {"--gpus", "--no-deps", "--shm-size", "--ipc", "--depth", "--help", "--no-build-isolation",
            "--template", "--directory", "--enable-lora", "--lora-modules"}  # fmt: skip


def sentences() -> Iterator[tuple[str, str]]:
    """Yield the place and text of each string of the package but docstrings, with FILLED_IN for what is computed."""
    for path in sorted((REPO / "unsloth_ddp").rglob("*.py")):
        if "notebook" in path.parts:
            continue
        tree = ast.parse(path.read_text())
        inside = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            for part in ast.walk(node)
            if part is not node
        }
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in inside | docstrings:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            elif isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else FILLED_IN for part in node.values)
            else:
                continue
            if " " in text.strip() and ("--" in text or "unsloth_ddp." in text):
                yield f"{path.relative_to(REPO)}:{node.lineno}", text


SENTENCES = list(sentences())
PARSERS = {name: importlib.import_module(f"unsloth_ddp.{name}.__main__").make_parser() for name in COMMANDS}


def test_the_options_that_sentences_name_exist() -> None:
    parsers = [make_parser(""), *PARSERS.values()]
    known = {name for parser in parsers for action in parser._actions for name in action.option_strings}
    known |= set(re.findall(r"--\w+", usage())) | set().union(*OF_OTHERS.values()) | PROGRAMS
    wrong = [
        f"{place}: {name}"
        for place, text in SENTENCES
        for name in re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", text)
        if name not in known
    ]
    assert len(SENTENCES) > 200 and wrong == []


def test_the_values_that_sentences_give_to_options_are_taken() -> None:
    wrong, taken = [], 0
    for place, text in SENTENCES:
        for name, value in re.findall(r"--([a-z_0-9]+) ([\w.\[\]%/-]+)", text):
            value = value.rstrip(".")
            # Of other options every text is a value.
            has_choices = "Literal" in str(TYPES.get(name)) and value not in WORDS
            if name not in OPTIONS or STAND_INS.fullmatch(value) or not (has_choices or value[:1].isdigit()):
                continue
            try:
                convert_value(name, value, "advice")
                taken += 1
            except UserError as refused:
                wrong.append(f"{place}: {refused}")
    assert taken > 40 and wrong == []


def typed(text: str) -> list[str]:
    """Return the words of a command at the beginning of a text: paths and stand-ins, and options with their values."""
    words: list[str] = []
    for word in text.split():
        of_option = bool(words) and words[-1].startswith("--")
        if not (word.startswith("--") or of_option or STAND_INS.fullmatch(word.rstrip(".,")) or "/" in word):
            break
        if of_option and STAND_INS.fullmatch(word.rstrip(".,")):
            # No value, such as TYPE of --quantize TYPE.
            words.pop()
        else:
            words.append(word.rstrip(".,"))
        if word[-1] in ".,":
            break
    return words


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_that_sentences_name_parse(command: str) -> None:
    for place, text in SENTENCES:
        for following in re.findall(rf"-m unsloth_ddp\.{command} ([^;:()`]*)", text):
            words = typed(following)
            try:
                _, rest = PARSERS[command].parse_known_args(words)
                if PARSERS[command].takes_settings:
                    parse_settings(rest, command=PARSERS[command])
                    rest = []
            except UserError as refused:
                # A sentence may name a command with one option only.
                if not re.search("required|expected one argument|^No (model|training data)", str(refused)):
                    pytest.fail(f"{place}: {words}: {refused}")
                continue
            assert rest == [], f"{place}: {words}"


@pytest.mark.parametrize(
    "words",
    [
        # docs/watching.md: the best checkpoint, and early stopping.
        ["--eval_strategy", "epoch", "--save_strategy", "epoch", "--trainer_args", '{"load_best_model_at_end": true}'],
        ["--early_stopping_patience", "3"],
        ["--eval_steps", "50", "--early_stopping_patience", "3"],
    ],
)
def test_what_is_said_of_the_best_checkpoint_is_taken_by_trl(words: list[str]) -> None:
    from unsloth_ddp.plan.__main__ import check_training_arguments

    settings = parse_settings(["--model", "m", "--dataset", "d", "--eval_fraction", "0.1", *words])
    check_trainer_args(settings)
    check_training_arguments(settings)
