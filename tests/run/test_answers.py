"""Questions for --compare_answers: which rows are asked, and with what."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.conftest import DEMO_MODEL
from tests.ranks import train
from unsloth_ddp.data.chat.template import set_chat_template
from unsloth_ddp.data.sources.formats import Example
from unsloth_ddp.run.answers import (
    Question,
    _generate,
    _until,
    answer,
    batches,
    end_of_turn,
    is_exact,
    questions,
    say_too_long,
)
from unsloth_ddp.run.documents.files import RECORD_FILE

ASK = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello."}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {}}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL, padding_side="left")


@pytest.fixture
def calls(tokenizer: Any) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Prompts and options of every call of the model's generate()."""
    return []


@pytest.fixture
def model(tokenizer: Any, calls: list[tuple[torch.Tensor, dict[str, Any]]]) -> Any:
    """Stand in for a model that ends every answer at once."""

    def generate(input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append((input_ids, options))
        return torch.nn.functional.pad(input_ids, (0, 1), value=tokenizer.eos_token_id)

    return SimpleNamespace(generate=generate, device="cpu", training=False, eval=lambda: None, train=lambda mode: None)


def test_a_question_names_its_images_but_not_by_the_hash_of_their_bytes() -> None:
    assert (
        Question([ASK], "", images=["/photos/cat.jpg", "/rows/" + "7f" * 32]).shown
        == "Hi (cat.jpg, an image of the row)"
    )


def test_only_rows_with_a_question_and_an_answer_are_asked(capsys: pytest.CaptureFixture[str]) -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = {"role": "tool", "content": "5"}
    examples = [
        Example([ASK, ANSWER], [TOOL]),
        Example([ASK, called, result, ANSWER]),
        Example([ANSWER]), Example([SYSTEM, ANSWER]), Example([ASK, ANSWER, ANSWER]), Example([ASK, ANSWER, ASK]),
        Example([ASK, called]), Example([ASK, {**ANSWER, "content": " "}]), Example(text="Hi: Hello."),
    ]  # fmt: skip
    assert questions(examples) == [Question([ASK], "Hello.", [TOOL]), Question([ASK, called, result], "Hello.")]
    assert "Not compared: 7 of 9 evaluation rows, without a question and an answer." in capsys.readouterr().out


def test_a_question_is_asked_with_its_tools(tokenizer: Any, model: Any, calls: list[Any]) -> None:
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert _generate(model, tokenizer, [Question([ASK], "Hello.", [TOOL]), Question([ASK], "Hello.")], 9) == ["", ""]
    ((asked, _),) = calls
    assert [text.strip() for text in tokenizer.batch_decode(asked, skip_special_tokens=True)] == [
        tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]).strip()
        for text in ("look_up Hi", "Hi")
    ]


def test_a_template_that_takes_calls_as_text_only_is_asked_as_rows_are_tokenized(
    tokenizer: Any, model: Any, calls: list[Any]
) -> None:
    # As DeepSeek-V3's.
    tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ 'call ' + c.function.arguments }}{% endfor %}"
        "{{ m.content or '' }}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "5"}]
    question = Question(turns, "Hello.")
    assert _generate(model, tokenizer, [question], 9) == [""]
    assert calls[0][0][0].tolist() == tokenizer('Hicall {"a": 1}5', add_special_tokens=False)["input_ids"]
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(Exception, match="never"):
        end_of_turn(tokenizer, question)


def test_an_end_of_turn_in_plain_text_is_no_part_of_the_answer(tokenizer: Any) -> None:
    set_chat_template(tokenizer, "chatml")
    end = end_of_turn(tokenizer, Question([ASK], "Hello."))
    assert end == "<|im_end|>"
    assert _until("Hello.<|im_end|>\n and more", end) == "Hello."
    assert _until("Hello.", end) == _until(" Hello. ", "") == "Hello."


@pytest.mark.parametrize("answer", ["e", "im", "|", "user", "<|im_end|>"])
def test_an_answer_that_is_a_part_of_what_ends_it_does_not_shorten_the_end(tokenizer: Any, answer: str) -> None:
    set_chat_template(tokenizer, "chatml")
    assert end_of_turn(tokenizer, Question([ASK], answer)) == "<|im_end|>"


def test_reasoning_before_an_answer_is_not_compared() -> None:
    for expected, text in (("Hello.", "<think>\n\n</think>\n\nHello."), ("<think>\nR\n</think>\n\nHello.", " Hello. ")):
        assert is_exact(Question([ASK], expected), text)
    for text in ("<think>Hello.</think>", "Hello"):
        assert not is_exact(Question([ASK], "Hello."), text)


@pytest.mark.parametrize(("words", "generated", "longer"), [(5, 32, 0), (100, 108, 0), (300, 256, 1)])
def test_an_answer_is_as_long_as_the_longest_expected_one(
    tokenizer: Any, model: Any, calls: list[Any], words: int, generated: int, longer: int, capsys: Any
) -> None:
    asked = [Question([ASK], "Lisbon"), Question([ASK], " ".join(["Lisbon"] * words))]
    runtime: Any = SimpleNamespace(
        backend="transformers", ranks=SimpleNamespace(rank=0, world_size=1), gather=lambda found: [found]
    )
    assert answer(model, tokenizer, asked, runtime) == ["", ""]
    assert [options["max_new_tokens"] for _, options in calls] == [generated]
    say_too_long(tokenizer, asked)
    sentence = "The expected answers of 1 of 2 held-out questions may be longer than the 256 tokens that are generated"
    assert (sentence in capsys.readouterr().out) == bool(longer)


def test_a_model_that_cannot_generate_is_not_compared_on_any_rank(
    tokenizer: Any, model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modes: list[Any] = []
    monkeypatch.setattr(model, "train", lambda mode: modes.append(mode))
    others: dict[bool, Any] = {True: ["of another rank"], False: None}
    runtime: Any = SimpleNamespace(
        backend="transformers",
        ranks=SimpleNamespace(rank=0, world_size=2),
        gather=lambda found: [found, others[isinstance(found, list)]],
    )
    asked = [Question([ASK], "Lisbon")] * 2
    assert answer(model, tokenizer, asked, runtime) == ["", "of another rank"]

    def fail(**_: Any) -> None:
        raise ValueError("no\ncache")

    monkeypatch.setattr(model, "generate", fail)
    assert answer(model, tokenizer, asked, runtime) is None
    assert modes == [False, False]
    assert capsys.readouterr().out == (
        "The answers are not compared, because the model failed to generate (ValueError: no cache).\n"
    )


# On every rank before training, or after it.
@pytest.mark.parametrize(("calls_before", "ranks"), [(0, 2), (1, 1)])
def test_a_run_whose_model_cannot_generate_still_trains_and_saves(
    calls_before: int, ranks: int, place: Path, job: Any
) -> None:
    name, options = f"cannot-generate-{calls_before}", "--max_steps 1 --compare_answers 2 --eval_fraction 0.2"
    done = job(options, name, ranks, target=cannot_generate, args=(calls_before,))
    assert (
        done.output.count("The answers are not compared, because the model failed to generate (RuntimeError: broken).")
        == 1
    )
    folder = place / "outputs" / name
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 1 and "demo_accuracy_after" not in summary
    assert (folder / "adapter_model.safetensors").is_file()
    assert not json.loads((folder / RECORD_FILE).read_text())["answers"]


def cannot_generate(argv: list[str], cwd: str, calls_before: int) -> None:
    """Train with a model that generates so many times."""
    from unsloth_ddp.run import answers

    generate, calls = answers._generate, []

    def broken(*given: Any) -> list[str]:
        calls.append(given)
        if len(calls) > calls_before:
            raise RuntimeError("broken")
        return generate(*given)

    answers._generate = broken
    train(argv, cwd)


def test_long_questions_are_answered_in_smaller_batches(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}"
    short, long = (Question([{"role": "user", "content": " ".join(["Lisbon"] * n)}], "x") for n in (10, 4000))
    prompt = len(tokenizer("Lisbon")["input_ids"])
    assert prompt == 1
    asked = [*[short] * 150, *[long] * 5, short]
    found = list(batches(tokenizer, asked, 96))
    assert [question for batch in found for question in batch] == asked
    # 4,096 tokens a long question, so that four fit.
    assert [len(batch) for batch in found] == [64, 64, 22, 4, 2]
    assert [len(batch) for batch in batches(tokenizer, [long] * 2, 20_000)] == [1, 1]
    assert list(batches(tokenizer, [], 96)) == []
