"""Render text tables that fit the terminal, or 100 columns in a file or pipe, without breaking words."""

from __future__ import annotations

import re
import shutil
import sys
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
LEAST_WIDTH = 80
GAP = 2
# In a column of a table a longer word (a path, a list of flags) may be broken after one of these characters, and anywhere
# in a part that is still longer than LONGEST_PART.
LONGEST_WORD, LONGEST_PART = 28, 40
BREAK_AFTER = re.compile(r"(?<=[/\\,])")


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
    return max(LEAST_WIDTH, shutil.get_terminal_size((FILE_WIDTH, 24)).columns)


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
    made = [column if isinstance(column, Column) else Column(column) for column in columns]
    width = width or output_width()
    while (extra := next((i for i in reversed(range(len(made))) if made[i].optional), None)) is not None:
        if sum(_least_widths([[column.name for column in made], *rows])) + GAP * (len(made) - 1) <= width:
            break
        made = made[:extra] + made[extra + 1 :]
        rows = [[*cells[:extra], *cells[extra + 1 :]] for cells in rows]
    texts = [[column.name for column in made], *rows]
    widths = column_widths(texts, width - GAP * (len(made) - 1))
    show_header = any(column.name for column in made)
    table = Table(
        box=box.HORIZONTALS if rules else box.SIMPLE_HEAD,
        show_header=show_header,
        show_edge=False,
        # With the column that the box itself draws, GAP columns stand between two cells.
        padding=(0, GAP - 1, 0, 0),
        pad_edge=False,
    )
    for column, size in zip(made, widths, strict=True):
        header = Text("\n".join(wrap_text(column.name, size)))
        table.add_column(header, justify=column.align, width=size, vertical="top")
    was_tall = False
    for index, row in enumerate(rows):
        wrapped = ["\n".join(wrap_text(text, size)) for text, size in zip(row, widths, strict=True)]
        is_tall = any("\n" in text for text in wrapped)
        if rules and index and (is_tall or was_tall):
            table.add_section()
        was_tall = is_tall
        styles = [(column.styles or {}).get(text, "") for column, text in zip(made, row, strict=True)]
        table.add_row(*(Text(text, style=style) for text, style in zip(wrapped, styles, strict=True)))
    file = StringIO()
    console = Console(file=file, width=sum(widths) + GAP * len(made), force_terminal=colour, highlight=False)
    if not colour:
        console.no_color = True
    if title:
        console.print(Text(title, style="bold"))
    console.print(table)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines() if line.strip())


def render_pairs(pairs: Mapping[str, str], *, width: int | None = None) -> str:
    """Return names and values as two aligned columns, long values wrapped between words: a path can be copied whole."""
    indent = max(map(cell_len, pairs)) + GAP
    lines = []
    for name, value in pairs.items():
        first, *others = wrap_text(value, (width or output_width()) - indent, whole=True)
        lines += [f"{name:<{indent}}{first}", *(" " * indent + line for line in others)]
    return "\n".join(line.rstrip() for line in lines)


def column_widths(rows: Sequence[Sequence[str]], available: int) -> list[int]:
    """Return each column's width: that of its longest line where there is room, never below its longest word.

    Narrow columns get their full width first; the wide ones share the rest equally.
    """
    natural, least = _natural_widths(rows), _least_widths(rows)
    widths = list(least)
    room = available - sum(least)
    order = sorted(range(len(widths)), key=natural.__getitem__)
    for position, index in enumerate(order):
        share = (room + sum(least[i] for i in order[position:])) // (len(order) - position)
        widths[index] = min(natural[index], max(least[index], share))
        room -= widths[index] - least[index]
    return widths


def _natural_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [
        max(cell_len(line) for cell in cells for line in cell.splitlines() or [""]) for cells in zip(*rows, strict=True)
    ]


def _least_widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of the longest word that is not broken, for each column."""
    columns = zip(*rows, strict=True)
    return [
        max((cell_len(p) for cell in cells for w in cell.split() for p in _pieces(w)), default=0) for cells in columns
    ]


def wrap_text(text: str, width: int, *, whole: bool = False) -> list[str]:
    """Return the lines of `text`, wrapped between words; only words over LONGEST_WORD may be broken, with `whole` none."""
    lines = []
    for line in text.splitlines() or [""]:
        current = ""
        for word in line.split():
            joined = f"{current} {word}" if current else word
            if cell_len(joined) <= width:
                current = joined
                continue
            if current and (whole or cell_len(word) <= width):
                lines.append(current)
                current = word
                continue
            # Fill the current line with as many pieces of the long word as fit.
            current = f"{current} " if current else ""
            for piece in [word] if whole else _pieces(word):
                if current.strip() and cell_len(current + piece) > width:
                    lines.append(current.rstrip())
                    current = ""
                current += piece
        lines.append(current)
    return lines


def fit_text(text: str, width: int | None = None) -> str:
    """Return text wrapped between words to `width` columns; the words of a line that fits stay as they are.

    Args:
        width: [output_width()]
    """
    columns = width or output_width()
    lines = [
        [line] if cell_len(line) <= columns else wrap_text(line, columns, whole=True) for line in text.splitlines()
    ]
    return "\n".join(part for parts in lines for part in parts)


def _pieces(word: str) -> list[str]:
    """Return the parts that a word may be broken into; the word itself unless it is long."""
    if cell_len(word) <= LONGEST_WORD:
        return [word]
    pieces: list[str] = []
    for part in BREAK_AFTER.split(word):
        size = LONGEST_PART if cell_len(part) <= LONGEST_PART else LONGEST_WORD
        pieces += [part[i : i + size] for i in range(0, len(part), size)]
    return [piece for piece in pieces if piece]
