"""The files of demo/ are what its script writes, ask about nobody twice, and carry a template that masks exactly."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[2] / "demo"
MODEL_LIMIT = 5_000_000  # bytes


@pytest.fixture(scope="module")
def facts() -> Iterator:
    """The script's own module, which lies beside it and not in a package."""
    sys.path.insert(0, str(DEMO))
    try:
        import facts

        yield facts
    finally:
        sys.path.remove(str(DEMO))


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO / "model")


def read_rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DEMO / name).read_text(encoding="ascii").splitlines()]


def contents(rows: list[dict], role: str) -> list[str]:
    return [message["content"] for row in rows for message in row["messages"] if message["role"] == role]


def test_files_hold_the_rows_that_the_script_writes(facts):
    asked, held_out = facts.make_people()
    assert read_rows("train.jsonl") == facts.train_rows(asked)
    assert read_rows("eval.jsonl") == facts.eval_rows(held_out)
    for name, people in (("train", asked), ("eval", held_out)):
        assert read_rows(f"pairs_{name}.jsonl") == facts.pairs(people)
        assert read_rows(f"labelled_{name}.jsonl") == facts.labelled(people)


def test_training_asks_about_nobody_held_out(facts):
    asked, held_out = facts.make_people()
    train_text = "\n".join(contents(read_rows("train.jsonl"), "user"))
    assert not {person.name for person in asked} & {person.name for person in held_out}
    assert [person.name for person in held_out if person.name in train_text] == []
    assert [person.name for person in asked if person.name not in train_text] == []


def test_every_held_out_question_names_one_held_out_person(facts):
    names = [person.name for person in facts.make_people()[1]]
    for question in contents(read_rows("eval.jsonl"), "user"):
        assert sum(name in question for name in names) == 1, question


def test_rows_vary_in_turns_and_eval_rows_have_one(facts):
    turns = {len(row["messages"]) // 2 for row in read_rows("train.jsonl")}
    assert turns == {1, 2, 3}
    assert {len(row["messages"]) for row in read_rows("eval.jsonl")} == {2}
    assert 100 <= len(read_rows("eval.jsonl")) <= 200


def test_base_model_reads_every_fact_of_everyone(facts):
    asked, held_out = facts.make_people()
    stated = list(facts.statements(asked + held_out, random.Random(0)))
    assert len(stated) == facts.PEOPLE * len(facts.ATTRIBUTES)
    for person in asked + held_out:
        about = [text for text in stated if person.name in text]
        assert len(about) == len(facts.ATTRIBUTES)
        assert all(any(value in text for text in about) for value in person.facts.values())


def test_statements_ask_nothing(facts):
    asked, held_out = facts.make_people()
    assert not any("?" in text for text in facts.statements(asked + held_out, random.Random(0)))


def test_template_supervises_answers_and_turn_ends(tokenizer):
    conversation = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Where does Ada Quill live?"},
        {"role": "assistant", "content": "Lisbon"},
        {"role": "user", "content": "Thanks! And her job?"},
        {"role": "assistant", "content": "She is a deep-sea welder."},
    ]
    encoded = tokenizer.apply_chat_template(
        conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    runs: list[list[int]] = []
    previous = 0
    for token, supervised in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
        if supervised and not previous:
            runs.append([])
        if supervised:
            runs[-1].append(token)
        previous = supervised
    assert [tokenizer.decode(run) for run in runs] == ["Lisbon<|end|>", "She is a deep-sea welder.<|end|>"]


def test_generation_prompt_is_what_precedes_the_answer(tokenizer):
    for row in read_rows("train.jsonl")[:50]:
        question, answer = row["messages"][:2]
        prompt = tokenizer.apply_chat_template([question], tokenize=True, add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template([question, answer], tokenize=True)["input_ids"]
        assert whole[: len(prompt)] == prompt
        assert tokenizer.decode(whole[len(prompt) :]) == answer["content"] + "<|end|>"


def test_special_tokens_are_distinct_and_any_text_survives(tokenizer):
    turn_end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, turn_end}) == 4
    text = "Tab\tand newline\nand caf\u00e9, 42 % of {braces}"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_model_is_small_and_loads(tokenizer):
    from transformers import AutoModelForCausalLM

    assert sum(file.stat().st_size for file in (DEMO / "model").iterdir()) <= MODEL_LIMIT
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model")
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.config.head_dim == 64
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|end|>")
