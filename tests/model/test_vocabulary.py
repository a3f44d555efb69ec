"""Tokens beyond a model's weights are refused in every kind of row; new tokens are told, and trained if named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.parse import DEMO_MODEL
from unsloth_ddp.data.chat.tokenize import Encoder, encode_row
from unsloth_ddp.data.dataset import tokenize_examples
from unsloth_ddp.data.order.stream_windows import streamed_windows
from unsloth_ddp.data.sources.examples import read_examples
from unsloth_ddp.data.sources.formats import to_example
from unsloth_ddp.data.sources.preference import to_pair
from unsloth_ddp.data.vocabulary import Vocabulary
from unsloth_ddp.model.adapter.lora import lora_config
from unsloth_ddp.model.vocabulary import vocabulary_of
from unsloth_ddp.utils.errors import UserError

NEW = "<doc>"
CHAT = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": f"{NEW}Ann"}]}
PLAIN = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ann"}]}
PAIR = {"chosen": PLAIN["messages"], "rejected": CHAT["messages"]}
ROWS = 883


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_tokens([NEW, "<other>"])
    return tokenizer


def model_with(rows: int | None = ROWS + 2, *, tied: bool = True, mean: bool = True) -> Any:
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    if rows:
        model.resize_token_embeddings(rows, mean_resizing=mean)
    return model


@pytest.mark.parametrize("row", [CHAT, PAIR, {"text": f"a {NEW}"}], ids=["chat", "pair", "text"])
def test_a_token_without_weights_is_refused_in_every_row(tokenizer: Any, row: dict[str, Any]) -> None:
    encoder = Encoder(tokenizer, supervise_all=False, vocabulary=Vocabulary("model m", ROWS))
    example = to_pair(row) if row is PAIR else to_example(row)
    with pytest.raises(
        UserError, match=rf"the token {NEW} \(883\), and model m has weights for the tokens 0 to 882 only"
    ):
        encode_row(encoder, example, 100)
    encode_row(encoder, to_example(PLAIN), 100)


def test_a_row_of_a_stream_or_of_evaluation_is_refused_by_its_place(tokenizer: Any, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(json.dumps(PLAIN) + "\n")
    bad.write_text(json.dumps(PLAIN) + "\n" + json.dumps(CHAT) + "\n")
    vocabulary = Vocabulary("model m", ROWS)
    settings = Settings(dataset=[str(bad)], streaming=True, shuffle_buffer=0)
    window = next(iter(streamed_windows(settings, None, tokenizer, 1, None, None, vocabulary)))
    assert len(window.rows) == 1 and str(window.problem).startswith(f"{bad}:2: the row has the token {NEW}")
    settings = Settings(dataset=[str(good)], eval_dataset=[str(bad)])
    read_examples(settings, cpu_runtime(), tmp_path)
    with pytest.raises(UserError, match=rf"bad.jsonl:2: the row has the token {NEW}"):
        tokenize_examples(settings, cpu_runtime(), tmp_path, tokenizer, None, vocabulary)


def test_a_reference_with_fewer_rows_counts(tokenizer: Any) -> None:
    settings = Settings(model="m", task="dpo", reference_model=str(DEMO_MODEL))
    found = vocabulary_of(settings, cpu_runtime(), model_with(), tokenizer)
    assert (found.model, found.rows) == (f"reference_model {DEMO_MODEL}", ROWS)


@pytest.mark.parametrize(
    ("options", "untrained"),
    [
        ({}, {NEW, "<other>"}),
        ({"lora_trainable_tokens": [NEW]}, {"<other>"}),
        ({"lora_modules_to_save": ["embed_tokens", "lm_head"]}, set()),
        # The tied head keeps its own rows.
        ({"lora_modules_to_save": ["embed_tokens"]}, {NEW, "<other>"}),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_that_stay_as_they_are_are_found(
    tokenizer: Any, options: dict[str, Any], untrained: set[str], tied: bool
) -> None:
    settings = Settings(model="m", **options)
    model = model_with(tied=tied)
    adapted = get_peft_model(model, lora_config(settings, model, tokenizer))
    found = vocabulary_of(settings, cpu_runtime(), adapted, tokenizer)
    assert set(tokenizer.convert_ids_to_tokens(sorted(found.untrained))) == untrained
    row = Encoder(tokenizer, supervise_all=False, vocabulary=found).encode(to_example(CHAT))
    assert (f"untrained\t'{NEW}'" in row.notes) == (NEW in untrained)
    assert NEW not in row.written_tokens


def test_rows_that_are_trained_or_in_training_are_not_called_new(tokenizer: Any) -> None:
    model = model_with()
    assert vocabulary_of(Settings(model="m"), cpu_runtime(), model, tokenizer).untrained == frozenset()
    model.requires_grad_(False)
    assert len(vocabulary_of(Settings(model="m"), cpu_runtime(), model, tokenizer).untrained) == 2
    with torch.no_grad():
        model.get_input_embeddings().weight[ROWS:] = torch.eye(128)[:2]
    assert vocabulary_of(Settings(model="m"), cpu_runtime(), model, tokenizer).untrained == frozenset()


@pytest.mark.parametrize("tied", [True, False])
def test_a_named_token_is_trained_saved_and_read_by_peft(tokenizer: Any, tmp_path: Path, tied: bool) -> None:
    model = model_with(tied=tied)
    model.save_pretrained(tmp_path / "base")
    before = [end.weight.detach().clone() for end in (model.get_input_embeddings(), model.get_output_embeddings())]
    adapted = get_peft_model(model, lora_config(Settings(model="m", lora_trainable_tokens=[NEW]), model, tokenizer))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    ids = torch.tensor([tokenizer(f"a {NEW} b {NEW}")["input_ids"]])
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    adapted(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    adapted.save_pretrained(tmp_path / "adapter")
    merged = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").merge_and_unload()
    after = [end.weight.detach() for end in (merged.get_input_embeddings(), merged.get_output_embeddings())]
    for old, new in zip(before, after, strict=True):
        changed = (new - old).abs().amax(1)
        assert changed[ROWS] > 1e-3 and changed[:ROWS].max() == changed[ROWS + 1] == 0


@pytest.mark.parametrize(("name", "sentence"), [("<dc>", "has no such token"), (NEW, "has 883 rows of the embedding")])
def test_a_named_token_without_a_row_is_refused(tokenizer: Any, name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=f"lora_trainable_tokens {name}: model m {sentence}; add it to a copy"):
        model = model_with(None)
        lora_config(Settings(model="m", lora_trainable_tokens=[name]), model, tokenizer)
