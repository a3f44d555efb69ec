"""Columns beside the messages that say what is learned are obeyed or refused, and others are left alone."""

from __future__ import annotations

from typing import Any

import pytest

from unsloth_ddp.data.sources.formats import to_example
from unsloth_ddp.data.sources.preference import to_labelled, to_pair
from unsloth_ddp.utils.errors import UserError

TURNS = [
    {"from": "human", "value": "hi"}, {"from": "gpt", "value": "bad"}, {"from": "human", "value": "again"},
    {"from": "gpt", "value": "good"},
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "left_out"),
    [
        ("loss_mask", [0, 0, 0, 1], [1]), ("loss_mask", "[0, 0, 0, 1]", [1]),
            ("trainable", [False, True, False, False], [3]),
        ("weights", [0, 1, 0, 1], []), ("include_in_loss", [0, 0, 0, 1], [1]), ("weight", 1, []), ("train", "true", []),
    ],
)  # fmt: skip
def test_directions_are_obeyed(name: str, value: Any, left_out: list[int]) -> None:
    example = to_example({"conversations": TURNS, name: value})
    assert (example.left_out, example.unread) == (left_out, [])


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("loss_mask", [0, 1], "has 2 values in loss_mask and 4 messages"),
        ("loss", False, "has loss False, so it is not to be learned; remove it."),
        ("weight", 0, "has weight 0, so it is not to be learned"),
        ("train", "false", "has train false, so it is not to be learned"),
        ("weight", 0.5, "has weight (0.5), which says what is learned and is not read"),
        ("weight", [0.5, 1, 1, 1], "has weight ([0.5, 1, 1, 1]), which says"),
        ("mask", [1, 1, 1, 0], "has mask ([1, 1, 1, 0]), which says"),
        ("mask_history", True, "has mask_history (True), which says"),
        ("exclude_from_training", 1, "has exclude_from_training (1), which says"),
        ("train_on_inputs", True, "has train_on_inputs (True), which says"),
    ],
)
def test_directions_that_are_not_read_are_refused(name: str, value: Any, sentence: str) -> None:
    row = {"conversations": TURNS, name: value}
    with pytest.raises(UserError) as refused:
        to_example(row)
    assert f"the row {sentence}" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train", "Orient Express"),
        ("no", 12),
        ("details", "x"),
        ("skip", False),
        ("mask_history", False),
        ("training", {"a": 1}),
    ],
)
def test_columns_with_such_words_that_direct_nothing_are_not_read(name: str, value: Any) -> None:
    example = to_example({"conversations": TURNS, name: value})
    assert (example.left_out, example.unread) == ([], [name])


@pytest.mark.parametrize("key", ["exclude_from_training", "skip", "is_excluded"])
def test_keys_of_messages_that_leave_out_are_refused_and_others_obeyed(key: str) -> None:
    with pytest.raises(UserError, match=f"a message has {key}, which is not read"):
        to_example({"conversations": [*TURNS[:3], {**TURNS[3], key: True}]})
    assert to_example({"conversations": [TURNS[0], {**TURNS[1], "include_in_loss": 0}, *TURNS[2:]]}).left_out == [1]


def test_directions_of_other_rows_are_refused() -> None:
    pair = {"chosen": TURNS, "rejected": [*TURNS[:3], {"from": "gpt", "value": "x"}]}
    for convert, row in (
        (to_example, {"instruction": "a", "output": "b"}),
        (to_example, {"text": "a"}),
        (to_pair, pair),
        (to_labelled, {"conversations": TURNS, "label": True}),
    ):
        with pytest.raises(UserError, match="train False, so it is not to be learned"):
            convert({**row, "train": False})
        assert convert({**row, "train": True}).unread == []
    with pytest.raises(UserError, match="loss_mask as a list, which is read beside messages only"):
        to_pair({**pair, "loss_mask": [0, 0, 0, 1]})
    with pytest.raises(UserError, match="weight and is_in_loss, which disagree"):
        to_example({"conversations": [TURNS[0], {**TURNS[1], "weight": 1}], "loss_mask": [0, 0]})


def test_keys_of_calls_in_a_rejected_answer_are_reported() -> None:
    call = {"function": {"name": "f", "arguments": {}}, "flavour": 1}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    question = {"role": "user", "content": "q"}
    pair = to_pair({"chosen": [question, {"role": "assistant", "content": "a"}], "rejected": [question, answer]})
    assert pair.unread == ["flavour of tool calls"]
