"""Rows of every shape and text as token ids and labels, with templates of every kind, hostile ones among them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.conftest import DEMO_MODEL
from tests.fuzz import few, refusal, result_or_sentence
from tests.fuzz.test_rows import nearly_good
from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.chat.template import read_chat_template
from unsloth_ddp.data.chat.tokenize import Encoder
from unsloth_ddp.data.dataset import tokenize_examples
from unsloth_ddp.data.sources.examples import read_examples
from unsloth_ddp.data.sources.formats import to_example

UNMARKED = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}{% if add_generation_prompt "
    "%}{{ 'assistant: ' }}{% endif %}"
)
TRIMMED = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}{% generation %}{{ "
    "m['content'] | trim }}{% endgeneration %}{% else %}{{ m['content'] | trim }}{% endif %}{% endfor %}"
)
NOTHING = "{% for m in messages %}{% endfor %}"
ANSWER = {"role": "assistant", "content": "Hello."}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The demo's, whose template marks the assistant's part."""
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.fixture(scope="module")
def encoders(tokenizer: Any) -> list[Encoder]:
    """One for each template, supervising the assistant and supervising all."""
    made = []
    for template in (tokenizer.chat_template, read_chat_template("chatml"), UNMARKED, TRIMMED, NOTHING):
        mine = copy.deepcopy(tokenizer)
        mine.chat_template = template
        made += [Encoder(mine, supervise_all=False), Encoder(mine, supervise_all=True)]
    return made


SPECIAL = st.sampled_from(
    ["<|im_end|>", "<|im_start|>assistant\n", "</s>", "<s>", "assistant: ", "\u00e9\u0301", "\U0001f600"]
)
TEXTS = st.lists(st.text(max_size=8) | SPECIAL, max_size=4).map("".join)
TURNS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXTS}),
    max_size=5,
)
ROWS = st.one_of(
    nearly_good(),
    st.fixed_dictionaries({"messages": TURNS}),
    st.fixed_dictionaries({"prompt": TURNS, "completion": TURNS}),
    st.fixed_dictionaries({"prompt": TEXTS, "completion": TEXTS}),
    st.fixed_dictionaries({"instruction": TEXTS, "input": TEXTS, "output": TEXTS}),
    st.fixed_dictionaries({"text": TEXTS}),
)


@few
@given(ROWS, st.integers(0, 9))
@example({"text": ""}, 0)
@example({"prompt": "", "completion": ""}, 0)
@example({"messages": [{"role": "assistant", "content": ""}]}, 9)
@example({"messages": [ANSWER, {"role": "user", "content": ""}]}, 9)
def test_any_row_is_labelled_tokens_or_one_sentence(encoders: list[Encoder], row: Any, which: int) -> None:
    encoder = encoders[which]
    encoded = result_or_sentence(lambda: encoder.encode(to_example(json.loads(json.dumps(row)))))
    if encoded is None:
        return
    ids, labels = encoded.input_ids, encoded.labels
    assert len(ids) == len(labels) > 0
    assert all(0 <= token < len(encoder.tokenizer) for token in ids)
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    if encoder.supervise_all:
        assert labels == ids


def test_rows_of_every_fault_end_a_run_by_name_or_are_all_tokenized(tmp_path: Path, tokenizer: Any) -> None:
    runtime = cpu_runtime()
    settings = Settings(dataset=[str(tmp_path / "a.jsonl")], max_length=64)
    odd = ["", " ", "\0", "x" * 100_000, "<|im_end|>" * 500, "\u200b", "\ufeff", "e\u0301" * 1000]
    rows = [{"messages": [{"role": "user", "content": text}, ANSWER]} for text in odd]
    rows += [{"text": text} for text in odd] + [{"prompt": text, "completion": text} for text in odd]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read_examples(settings, runtime, tmp_path)
    tokenized, _ = tokenize_examples(settings, runtime, tmp_path, tokenizer)
    assert tokenized.counts.rows == len(rows) == len(tokenized.dataset) - 1
    assert all(0 < len(row["input_ids"]) <= 64 for row in tokenized.dataset)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('touch ran').read() }}",
        "{{ messages.append(1) }}{{ messages[0].__class__ }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10 ** 12) %}x{% endfor %}",
        "{{ 'x' * (10 ** 15) }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('no\\nsystem \x1b[2J turn') }}",
        "{{ messages[99].content }}",
        "{% for",
    ],
)
def test_a_template_can_do_no_more_than_render(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = copy.deepcopy(tokenizer)
    mine.chat_template = template
    chat = to_example({"messages": [{"role": "user", "content": "Hi"}, ANSWER]})
    for supervise_all in (True, False):
        refusal(lambda supervise_all=supervise_all: Encoder(mine, supervise_all=supervise_all).encode(chat))
    assert not (tmp_path / "ran").exists()
