"""Tables that fit their width without breaking words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unsloth_ddp.utils.tables import Column, fit_text, render_pairs, render_table

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
    lines = render_table(["verdict", "one", "two"], [["ok", wide, wide]], width=71).splitlines()
    assert [lines[0].index(name) for name in ("verdict", "one", "two")] == [0, 9, 41]


def test_a_path_is_whole_beside_a_name_and_in_a_sentence_and_broken_in_a_table_only() -> None:
    path = "/scratch/users/somebody/experiments/Qwen3-8B-lora-20261123-231301"
    assert render_pairs({"written to": path}, width=60).splitlines() == [f"written to  {path}"]
    assert fit_text(f"It is in {path} now.", width=40).splitlines() == ["It is in", path, "now."]
    lines = render_table(["row", "found"], [["output folder", path]], width=60).splitlines()
    assert max(map(len, lines)) <= 60 and path in "".join(line.removeprefix("output folder").strip() for line in lines)


def test_an_optional_column_is_left_out_of_a_narrow_table() -> None:
    columns = [Column("a"), Column("b", optional=True), Column("c", optional=True), Column("d")]
    rows = [["x" * 10, "y" * 10, "z" * 10, "w" * 10]]
    headers = [render_table(columns, rows, width=width).splitlines()[0].split() for width in (46, 45, 34, 33)]
    assert headers == [["a", "b", "c", "d"], ["a", "b", "d"], ["a", "b", "d"], ["a", "d"]]


@pytest.mark.parametrize("colour", [False, True])
def test_colours_only_colour(colour: bool) -> None:
    column = Column("verdict", styles={"failure": "bold red"})
    text = render_table(["row", column], [["a", "failure"]], width=80, colour=colour)
    assert "failure" in text and ("\x1b[" in text) is colour


def test_a_sentence_is_wrapped_between_words_only_where_it_is_too_long():
    assert fit_text("  kept  as is\none two three four five", width=14) == "  kept  as is\none two three\nfour five"
