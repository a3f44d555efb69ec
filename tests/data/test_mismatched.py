"""Each labelled row gets the answer of another row, in prepared sets and in windows of a stream."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.conftest import DEMO_MODEL, write_jsonl
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.chat.labels import IGNORED
from unsloth_ddp.data.dataset import tokenize_examples
from unsloth_ddp.data.order.collate import Collate, Flatten, PadRight
from unsloth_ddp.data.order.mismatched import answer_start, join_mismatched, partners, with_mismatched
from unsloth_ddp.data.order.stream_windows import streamed_windows
from unsloth_ddp.data.preview import preview_first_row
from unsloth_ddp.data.sources.examples import held_out_examples, read_examples
from unsloth_ddp.utils.errors import UserError

CUT = 30


def row(ids: list[int], start: int) -> dict[str, np.ndarray]:
    return {"input_ids": np.array(ids), "labels": np.array([IGNORED] * start + ids[start:])}


@pytest.mark.parametrize("shuffled", [True, False])
def test_every_answer_is_used_once_and_none_by_its_own_row(shuffled):
    answered = np.arange(50) % 7 != 0
    found = partners(answered, shuffled=shuffled)
    assert sorted(found) == list(range(50)) and (found == np.arange(50)).tolist() == (~answered).tolist()
    assert np.array_equal(found, partners(answered, shuffled=shuffled))


def test_a_prompt_is_followed_by_the_answer_of_the_other_row():
    found = with_mismatched(row([1, 2, 3, 4, 5], 3), row([6, 7, 8, 9], 1), max_length=5)
    assert found["input_ids"].tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 7, 8] and found["parts"].tolist() == [5, 5]
    assert found["labels"].tolist() == [IGNORED] * 3 + [4, 5] + [IGNORED] * 3 + [7, 8]
    # The first token of a row is never predicted, so it is the prompt.
    found = with_mismatched(row([1, 2], 0), row([6, 7], 0), max_length=5)
    assert found["labels"].tolist() == [IGNORED, 2, IGNORED, 7]
    cut = row([1, 2], 2)
    assert answer_start(cut["labels"]) == 2
    assert set(with_mismatched(cut, cut, 5)["labels"].tolist()) == {IGNORED}


@pytest.fixture
def rows(tmp_path):
    """Rows of different lengths, one of which loses its answer."""
    made = [
        {"prompt": f"What is {'very ' * number}{number}? ",
            "completion": f"It is {number}." + " Really." * (number % 3), "label": number % 2}
        for number in range(9)
    ]  # fmt: skip
    return write_jsonl(tmp_path / "rows.jsonl", [*made, {**made[0], "prompt": "many words " * 40}])


def settings_of(rows, **changed):
    return Settings(model=str(DEMO_MODEL), dataset=[str(rows)], task="kto", max_length=CUT, shuffle_buffer=0, **changed)


def test_a_tokenized_set_holds_its_mismatched_rows_and_labels(rows, tmp_path, runtime, capsys):
    settings, tokenizer = settings_of(rows), AutoTokenizer.from_pretrained(DEMO_MODEL)
    folder = tmp_path / "data"
    folder.mkdir()
    read_examples(settings, runtime, folder)
    found, _ = tokenize_examples(settings, runtime, folder, tokenizer)
    assert (
        "4 of 10 training rows are desirable: the weights of the two kinds are 0.67 : 1 in sum"
        in capsys.readouterr().out
    )
    shown = preview_first_row(found, tokenizer, CUT)
    assert "What is 0?[[ It is 0." in shown and shown.count("It is") == 1
    examples = [found.examples[index] for index in range(10)]
    assert [int(one["desirable"][0]) for one in examples] == [number % 2 for number in range(9)] + [0]
    halves = [np.split(one["input_ids"], [one["parts"][0]]) for one in examples]
    starts = [answer_start(one["labels"][: one["parts"][0]]) for one in examples]
    expected = partners(np.array([True] * 9 + [False]), shuffled=True)
    for index, (own, other) in enumerate(halves):
        whole = np.append(own[: starts[index]], halves[expected[index]][0][starts[expected[index]] :])
        assert other.tolist() == whole[:CUT].tolist()
    assert found.counts.longest == CUT and found.examples[10]["parts"].tolist() == [1, 1]
    batch = Collate(PadRight(0), Flatten("positions"), head_chooses=True)(examples)
    assert batch["desirable"].tolist() == [bool(number % 2) for number in range(9)] + [False]
    assert batch["input_ids"].shape == (10, CUT) and batch["mismatched_input_ids"].shape == (10, CUT)
    assert batch["mismatched_attention_mask"].sum(dim=1).tolist() == [one["parts"][1] for one in examples]
    assert (batch["mismatched_labels"] != IGNORED).sum(dim=1).tolist()[9] == 0


def test_a_window_of_a_stream_holds_its_mismatched_rows(rows):
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    windows = streamed_windows(settings_of(rows, streaming=True, max_steps=3), None, tokenizer, seed=1)
    window = next(iter(windows)).rows[:10]
    own = [{name: one[name][: one["parts"][0]] for name in ("input_ids", "labels")} for one in window]
    # The window holds several epochs, so its first rows take the answers of those that follow.
    for index in range(8):
        expected = with_mismatched(own[index], own[index + 1], CUT)
        assert all(np.array_equal(window[index][name], values) for name, values in expected.items())
    assert [one["desirable"].tolist() for one in window[:3]] == [[0], [1], [0]]
    assert join_mismatched([], CUT) == []


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({}, "the weights of the two kinds are 0.67 : 1 in sum"),
        ({"desirable_weight": 1.6}, ""),
        ({"undesirable_weight": 0.0}, "only one of the two kinds has a weight, so kto learns from it alone."),
    ],
)
def test_weights_that_are_far_from_balanced_are_told(weights, expected, rows, tmp_path, runtime, capsys):
    settings, folder = settings_of(rows, **weights), tmp_path / "data"
    folder.mkdir()
    read_examples(settings, runtime, folder)
    tokenize_examples(settings, runtime, folder, AutoTokenizer.from_pretrained(DEMO_MODEL))
    told = [line for line in capsys.readouterr().out.splitlines() if "are desirable" in line]
    assert len(told) == bool(expected) and expected in "".join(told)


def test_weights_are_told_where_both_kinds_have_as_many_rows(rows, tmp_path, runtime, capsys):
    made = [{"prompt": f"a {number} ", "completion": "b", "label": number % 2} for number in range(4)]
    settings = settings_of(write_jsonl(tmp_path / "even.jsonl", made), desirable_weight=10.0)
    folder = tmp_path / "data"
    folder.mkdir()
    read_examples(settings, runtime, folder)
    tokenize_examples(settings, runtime, folder, AutoTokenizer.from_pretrained(DEMO_MODEL))
    assert "the weights of the two kinds are 10 : 1 in sum" in capsys.readouterr().out


def test_one_row_has_no_other(rows, tmp_path, runtime):
    one = write_jsonl(tmp_path / "one.jsonl", [{"prompt": "a ", "completion": "b", "label": True}])
    folder = tmp_path / "data"
    folder.mkdir()
    read_examples(settings_of(one), runtime, folder)
    with pytest.raises(UserError, match="The training set has one row, and --task kto compares each"):
        tokenize_examples(settings_of(one), runtime, folder, AutoTokenizer.from_pretrained(DEMO_MODEL))


def test_undesirable_answers_are_not_expected_of_the_model(rows, tmp_path, runtime):
    folder = tmp_path / "data"
    folder.mkdir()
    read_examples(settings_of(rows, eval_dataset=[str(rows)]), runtime, folder)
    assert [one.text[one.prompt_chars :][:8] for one in held_out_examples(folder, 3)] == [
        "It is 1.",
        "It is 3.",
        "It is 5.",
    ]
    assert len(held_out_examples(folder, 10**9)) == 4 and held_out_examples(folder, 0) == []
