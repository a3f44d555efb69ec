"""The first row of a run as it is shown."""

from __future__ import annotations

import datasets
import pytest

from unsloth_ddp.data.dataset import Counts, TokenizedRows
from unsloth_ddp.data.preview import MOST_CHARACTERS, preview_first_row, preview_row

FIRST = "The first training row"


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(map(chr, token_ids))


def preview(text: str, cut_at: int | None = None) -> list[str]:
    """Capitals are supervised."""
    labels = [ord(one) if one.isupper() else -100 for one in text]
    return preview_row(Letters(), [ord(one) for one in text], labels, cut_at, FIRST).split("\n", 1)


def test_supervised_parts_stand_in_brackets() -> None:
    head, shown = preview("user\nhi ASSISTANT|user AGAIN")
    assert head == "The first training row as the model sees it (28 tokens; [[supervised]], 14 tokens):"
    assert shown == "user\nhi [[ASSISTANT]]|user [[AGAIN]]"


class Trimming(Letters):
    """As tokenizers of SentencePiece's kind, it drops the space that a text begins with."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return super().decode(token_ids, skip_special_tokens).removeprefix(" ")


def test_a_part_keeps_the_space_that_it_begins_with() -> None:
    text = "pet: cat"
    labels = [-100] * 4 + [ord(one) for one in text[4:]]
    assert preview_row(Trimming(), [ord(one) for one in text], labels, None, FIRST).endswith("\npet:[[ cat]]")


def test_the_first_token_of_a_text_is_not_counted() -> None:
    head, shown = preview("TEXT")
    assert "(4 tokens; [[supervised]], 3 tokens):" in head
    assert shown == "T[[EXT]]"


def test_a_row_that_was_cut_says_where() -> None:
    head, shown = preview("user ASSIS", cut_at=10)
    assert "(10 tokens, cut at --max_length 10; [[supervised]], 5 tokens):" in head
    assert shown == "user [[ASSIS]]"


def test_a_long_row_is_shortened_in_the_middle_and_nothing_moves_the_cursor() -> None:
    _, shown = preview("a" * MOST_CHARACTERS + "\x1b[2k" + "b" * 500)
    assert shown.startswith("a" * 700) and shown.endswith("b" * 500)
    assert len(shown) < MOST_CHARACTERS + 50
    assert "\n... 507 characters ...\n" in shown and "\x1b" not in shown


def test_image_tokens_in_a_row_are_counted() -> None:
    _, shown = preview("u <boi>" + "<img>" * 300 + "<eoi> hi</s></s></s> " + "[i]" * 4 + " OK")
    assert shown == "u <boi><img> x 300 <eoi> hi</s></s></s> [i] x 4  [[OK]]"


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ({}, [f"{FIRST} with its chosen answer as", "u [[GOOD]]", f"{FIRST} with its rejected answer as", "u [[BAD]]"]),
        ({"desirable": [[1]]}, [f"{FIRST}, desirable, as", "u [[GOOD]]"]),
        ({"desirable": [[0]]}, [f"{FIRST}, undesirable, as", "u [[GOOD]]"]),
    ],
)
def test_both_answers_of_a_pair_are_shown_and_the_label_of_one(
    label: dict[str, list[list[int]]], expected: list[str]
) -> None:
    text, parts = "u GOODu BAD", [6, 5]
    ids = [ord(one) for one in text]
    labels = [token if chr(token).isupper() else -100 for token in ids]
    columns = {"input_ids": [ids], "labels": [labels], "parts": [parts], "overlong": [True], **label}
    rows = TokenizedRows(datasets.Dataset.from_dict(columns), Counts(rows=1))
    shown = preview_first_row(rows, Letters(), 6).splitlines()
    assert [line.split(" the model sees it")[0] for line in shown] == expected
    # Only the longer one was cut.
    assert [", cut at --max_length 6" in line for line in shown[::2]] == [True, False][: len(shown) // 2]
