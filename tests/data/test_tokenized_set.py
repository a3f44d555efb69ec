"""A set of rows as a run tokenizes it: what is told about the rows, where answers end, which date is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.conftest import DEMO_MODEL
from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data import dataset
from unsloth_ddp.data.dataset import TokenizedRows, make_encoder, tokenize_examples
from unsloth_ddp.data.order.batch_plan import BatchPlan
from unsloth_ddp.data.sources.examples import read_examples
from unsloth_ddp.data.sources.formats import to_example
from unsloth_ddp.data.sources.identity import data_identity

RUNTIME = cpu_runtime()
END_AND_NEWLINE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>\n' }}{% endfor %}{% if "
    "add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
DATED = "{{ strftime_now('%Y-%m-%d') + ' ' }}" + END_AND_NEWLINE
SHORT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
LONG = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello. " * 40}]}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


def tokenize(
    folder: Path, tokenizer: Any, rows: list[dict[str, Any]], template: str | None = None, day: str | None = None,
        **given: Any
) -> tuple[TokenizedRows, Settings]:  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = Settings(dataset=[str(folder / "rows.jsonl")], **({"max_length": 64} | given))
    node_folder = folder / f"node {len(list(folder.glob('node *')))}"
    node_folder.mkdir()
    read_examples(settings, RUNTIME, node_folder)
    if template is not None:
        tokenizer.chat_template = template
    train, _ = tokenize_examples(settings, RUNTIME, node_folder, tokenizer, day)
    return train, settings


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_answers_end_before_the_newline_and_in_rows_that_were_not_cut(
    tmp_path: Path, tokenizer: Any, loss_on: str
) -> None:
    end, eos = tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.eos_token_id
    assert end != eos
    rows = [LONG, SHORT, {"text": "Once."}, SHORT]
    found, _ = tokenize(tmp_path, tokenizer, rows, END_AND_NEWLINE, loss_on=loss_on)
    assert found.stop_tokens == (end, eos)
    only_cut, _ = tokenize(tmp_path, tokenizer, [LONG], END_AND_NEWLINE, loss_on=loss_on)
    assert only_cut.stop_tokens == ()


def test_a_resumed_run_prints_the_date_on_which_it_began(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Today(dataset.date):
        day = "2025-03-04"

        @classmethod
        def today(cls) -> Any:
            return cls.fromisoformat(cls.day)

    def identity(day: str | None = None) -> dict[str, Any]:
        rows, settings = tokenize(tmp_path, tokenizer, [SHORT], DATED, day)
        return data_identity(settings, RUNTIME, BatchPlan(1, 1, 1), rows)

    monkeypatch.setattr(dataset, "date", Today)
    began = identity()
    assert began["chat_template_date"] == "2025-03-04"
    Today.day = "2025-03-05"
    assert identity()["data"] != began["data"]
    assert identity(began["chat_template_date"]) == began
    # Streamed rows are tokenized by another encoder, of the same day.
    encoder = make_encoder(Settings(), tokenizer, began["chat_template_date"])
    assert "2025-03-04" in tokenizer.decode(encoder.encode(to_example(SHORT)).input_ids)


def test_a_template_without_a_date_leaves_no_date(tmp_path: Path, tokenizer: Any) -> None:
    rows, settings = tokenize(tmp_path, tokenizer, [SHORT], END_AND_NEWLINE)
    assert "chat_template_date" not in data_identity(settings, RUNTIME, BatchPlan(1, 1, 1), rows)


def test_what_is_not_read_is_told_once(tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    named = {**SHORT["messages"][0], "name": "Ann"}
    rows = [{"id": n, "source": "x\x1b[2J", "messages": [named, SHORT["messages"][1]]} for n in range(3)]
    tokenize(tmp_path, tokenizer, [*rows, {"prompt": "Hi ", "completion": "Hello."}], END_AND_NEWLINE)
    assert capsys.readouterr().out.splitlines() == [
        f"Columns of {tmp_path}/rows.jsonl that are not read: id (3 rows), source (3 rows).",
        "1 of 4 training rows: prompt and answer are texts, which are joined without the chat template and with "
        "nothing between them; to use the template, give lists of messages, or Alpaca's columns (instruction and "
        f"output; in pairs, instruction in place of prompt). The first is {tmp_path}/rows.jsonl:4.",
        "Keys of training messages that the chat template does not read: name (3 rows).",
    ]


def test_special_tokens_in_the_texts_of_rows_are_told_once(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    looks_for = "{{ '<|pad|>' in messages[0].content and '' }}" + END_AND_NEWLINE
    rows = [chat("a<|end|>"), chat("<|eos|>", "b<|end|>"), {"text": "<|bos|>Once"}, chat("<|pad|>"), SHORT]
    tokenize(tmp_path, tokenizer, rows, looks_for)
    assert capsys.readouterr().out.splitlines() == [
        "2 of 5 training rows: <|end|> is rendered twice, because the rows hold it and the chat template adds it; "
        f"remove it from the rows. The first is {tmp_path}/rows.jsonl:1.",
        "Special tokens in training texts are read as such and not as text; remove them unless that is meant: <|end|> "
        "(2 rows), <|bos|> (1 row), <|eos|> (1 row).",
    ]
    tokenize(
        tmp_path,
        tokenizer,
        [
            {"instruction": "Hi", "chosen": "a<|end|>", "rejected": "b"},
        ],
        END_AND_NEWLINE,
        task="dpo",
    )
    assert capsys.readouterr().out.endswith("meant: <|end|> (1 row).\n")


def chat(*answers: str, **more: Any) -> dict[str, Any]:
    """A row of questions with these answers; `more` are keys of the last answer."""
    turns = [turn for a in answers for turn in ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": a})]
    return {"messages": [*turns[:-1], {**turns[-1], **more}]}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (chat(""), True),
        (chat(" \n\t"), True),
        (chat("", "Hello."), True),
        (chat("<think>Why?</think>\n\n"), True),
        ({"prompt": "Hi", "completion": " "}, True),
        ({"instruction": "Hi", "output": ""}, True),
        ({"text": "\n"}, True),
        (chat("Hello."), False),
        (chat("<think></think>Hello."), False),
        # An answer in the prompt is not learned.
        ({"prompt": chat("")["messages"], "completion": chat("Hello.")["messages"]}, False),
    ],
)  # fmt: skip
def test_rows_with_an_empty_answer_are_counted(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str], row: dict[str, Any], told: bool
) -> None:
    found, _ = tokenize(tmp_path, tokenizer, [SHORT, row, SHORT, row], END_AND_NEWLINE)
    printed = capsys.readouterr().out
    sentence = "2 of 4 training rows: an answer is empty or only white space, so training teaches the model when to "
    assert (sentence in printed) == told
    # They are trained, as TRL trains them.
    assert found.counts.rows == 4 and found.counts.supervised > 0


def test_a_tool_call_and_an_answer_left_out_of_the_loss_are_not_empty(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    left_out = {"messages": [*chat("")["messages"], *chat("Hello.")["messages"]]}
    left_out["messages"][1]["weight"] = 0
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    template = END_AND_NEWLINE.replace(
        "m['content']", "m['content'] + (m['tool_calls'] | string if m['tool_calls'] else '')"
    )
    tokenize(tmp_path, tokenizer, [SHORT, left_out, chat("", tool_calls=[call])], template)
    assert "is empty" not in capsys.readouterr().out
