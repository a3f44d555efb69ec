"""Render text tables that fit the terminal, or 100 columns in a file or pipe, without breaking words."""

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

# Files and pipes have no width of their own.
FILE_WIDTH = 100
MIN_WIDTH = 80
GAP = 2
# A column is not narrower than its longest word, unless that word (a path, a list of flags) is longer than this.
LONGEST_WORD = 28


@dataclass(frozen=True)
class Column:
    """A table's column.

    Args:
        styles: of cells by their text; a rich style, which only colours.
        optional: leave the column out of a table that is too wide with it.
    """

    name: str
    align: Literal["left", "right"] = "left"
    styles: Mapping[str, str] | None = None
    optional: bool = False


def output_width() -> int:
    """Return the terminal's width in columns, at least 80; 100 where standard output is not a terminal."""
    if not sys.stdout.isatty():
        return FILE_WIDTH
    return max(MIN_WIDTH, shutil.get_terminal_size((FILE_WIDTH, 24)).columns)


def render_table(
    columns: Sequence[Column | str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    width: int | None = None,
    colour: bool = False,
    rules: bool = False,
) -> str:
    """Return a table as text, at most `width` columns wide where its longest words allow that.

    Args:
        columns: columns, or their names; empty names print no header.
        rows: one text per column; a text may hold line breaks.
        title: printed above the table.
        width: [output_width()]
        colour: write the escape sequences that colour text.
        rules: draw a rule between rows where one of them has several lines.
    """
    table_columns = [column if isinstance(column, Column) else Column(column) for column in columns]
    width = width or output_width()
    texts = [[column.name for column in table_columns], *rows]
    min_widths = [max(map(_min_width, cells)) for cells in zip(*texts, strict=True)]
    shown = list(range(len(table_columns)))
    while sum(min_widths[i] for i in shown) + GAP * (len(shown) - 1) > width and any(
        table_columns[i].optional for i in shown
    ):
        shown.remove(max(i for i in shown if table_columns[i].optional))
    table = Table(
        box=box.HORIZONTALS if rules else box.SIMPLE_HEAD,
        show_header=any(table_columns[i].name for i in shown),
        show_edge=False,
        # With the column that the box itself draws, GAP columns stand between two cells.
        padding=(0, GAP - 1, 0, 0),
        pad_edge=False,
    )
    for i in shown:
        table.add_column(
            Text(table_columns[i].name),
            justify=table_columns[i].align,
            min_width=min_widths[i],
            vertical="top",
            overflow="fold",
        )
    was_tall = False
    for row in rows:
        is_tall = any("\n" in row[i] for i in shown) or sum(cell_len(row[i]) + GAP for i in shown) > width + GAP
        if rules and (is_tall or was_tall):
            table.add_section()
        was_tall = is_tall
        table.add_row(*(Text(row[i], style=(table_columns[i].styles or {}).get(row[i], "")) for i in shown))
    file = StringIO()
    console = Console(file=file, width=width, force_terminal=colour, no_color=not colour, highlight=False)
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines() if line.strip())


def _min_width(text: str) -> int:
    return max((min(cell_len(word), LONGEST_WORD) for word in text.split()), default=0)


def render_pairs(pairs: Mapping[str, str], *, width: int | None = None) -> str:
    """Return names and values as two aligned columns, long values wrapped between words: a path can be copied whole."""
    indent = max(map(cell_len, pairs)) + GAP
    lines = []
    for name, value in pairs.items():
        first, *others = wrap_text(value, (width or output_width()) - indent)
        lines += [f"{name:<{indent}}{first}", *(" " * indent + line for line in others)]
    return "\n".join(line.rstrip() for line in lines)


def wrap_text(text: str, width: int) -> list[str]:
    wrapped = (
        textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines() or [""]
    )
    return [line for lines in wrapped for line in lines or [""]]


def fit_text(text: str, width: int | None = None) -> str:
    """Return text wrapped between words to `width` columns; the words of a line that fits stay as they are."""
    columns = width or output_width()
    return "\n".join(
        part
        for line in text.splitlines()
        for part in ([line] if cell_len(line) <= columns else wrap_text(line, columns))
    )
