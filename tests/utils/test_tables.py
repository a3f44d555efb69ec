"""Tables that fit their width without breaking words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsloth_ddp.utils.tables import (
    LONGEST_WORD,
    Column,
    column_widths,
    fit_text,
    render_pairs,
    render_table,
    wrap_text,
)

WORDS = st.lists(st.text("abcdefgh", min_size=1, max_size=12), min_size=1, max_size=30).map(" ".join)


def test_a_table_is_aligned_and_has_no_trailing_spaces() -> None:
    text = render_table(["name", Column("GiB", "right")], [["a", "1.5"], ["long", "10.0"]], width=100)
    assert text.splitlines() == ["name   GiB", "\u2500" * 10, "a      1.5", "long  10.0"]


def test_names_and_values_have_no_header_and_long_values_are_wrapped() -> None:
    text = render_pairs({"model": "m", "rows": "one two three"}, width=15)
    assert text.splitlines() == ["model  m", "rows   one two", "       three"]


@given(st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=5), st.integers(60, 120))
def test_every_table_fits_and_keeps_its_words(rows: list[tuple[str, str, str]], width: int) -> None:
    text = render_table(["first", "second", "third"], rows, width=width, rules=True)
    assert max(map(len, text.splitlines())) <= width
    shown = set(text.split())
    assert {word for row in rows for cell in row for word in cell.split()} <= shown


def test_narrow_columns_keep_their_width_and_wide_ones_share_the_rest() -> None:
    wide = "word " * 30
    assert column_widths([["verdict", wide, wide], ["ok", "a", "b"]], 67) == [7, 30, 30]
    # Nothing is narrower than its longest word, even where that is too wide.
    assert column_widths([["a" * 20, "b" * 20]], 30) == [20, 20]


def test_a_path_is_whole_beside_a_name_and_in_a_sentence_and_broken_in_a_table_only() -> None:
    path = "/scratch/users/somebody/experiments/Qwen3-8B-lora-20261123-231301"
    assert render_pairs({"written to": path}, width=60).splitlines() == [f"written to  {path}"]
    assert fit_text(f"It is in {path} now.", width=40).splitlines() == ["It is in", path, "now."]
    lines = render_table(["row", "found"], [["output folder", path]], width=60).splitlines()
    assert max(map(len, lines)) <= 60 and lines[-1].strip() == "Qwen3-8B-lora-20261123-231301"


def test_an_optional_column_is_left_out_of_a_narrow_table() -> None:
    columns = [Column("a"), Column("b", optional=True), Column("c", optional=True), Column("d")]
    rows = [["x" * 10, "y" * 10, "z" * 10, "w" * 10]]
    headers = [render_table(columns, rows, width=width).splitlines()[0].split() for width in (46, 45, 34, 33)]
    assert headers == [["a", "b", "c", "d"], ["a", "b", "d"], ["a", "b", "d"], ["a", "d"]]


def test_only_a_long_word_is_broken_and_after_a_separator() -> None:
    path = "/a/folder/with/a/long/name/that/does/not/fit"
    assert len(path) > LONGEST_WORD
    lines = wrap_text(f"at {path} now", 20)
    assert "".join(lines).replace("at ", "").replace(" now", "") == path
    assert all(len(line) <= 20 for line in lines) and lines[0].endswith("/")
    assert wrap_text("a " + "b" * LONGEST_WORD, 10) == ["a", "b" * LONGEST_WORD]


@pytest.mark.parametrize("colour", [False, True])
def test_colours_only_colour(colour: bool) -> None:
    column = Column("verdict", styles={"failure": "bold red"})
    text = render_table(["row", column], [["a", "failure"]], width=80, colour=colour)
    assert "failure" in text and ("\x1b[" in text) is colour


def test_a_sentence_is_wrapped_between_words_only_where_it_is_too_long():
    assert fit_text("  kept  as is\none two three four five", width=14) == "  kept  as is\none two three\nfour five"
