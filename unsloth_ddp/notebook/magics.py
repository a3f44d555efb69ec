"""Turn a cell's IPython syntax into Python, with IPython's own transformer.

Line magics and shell lines become the `get_ipython()` calls that IPython would run; `normalise.py` and `rewrite.py`
replace those. Cell magics that only wrap Python (%%capture, %%time) lose their first line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.inputtransformer2 import TransformerManager

# The body of these is ordinary Python that runs as part of the notebook.
PYTHON_CELLS = {"capture", "time", "timeit", "prun", "debug"}
SHELL_CELLS = {"bash", "sh", "script", "shell", "system", "sx", "!"}
FILE_CELLS = {"writefile", "file"}
DISPLAY_CELLS = {"html", "HTML", "javascript", "js", "latex", "markdown", "svg", "SVG"}

_CELL_MAGIC = re.compile(r"^%%(?P<name>[\w!]+)[ \t]*(?P<line>.*)$")
_NEEDS_IPYTHON = re.compile(r"^\s*[!%?,;/]|=\s*[!%]|\?\s*$|^\s*(>>>|In \[)", re.MULTILINE)


@dataclass(frozen=True)
class Lowered:
    """A cell as plain Python, and the cell magics that were taken off it."""

    source: str
    removed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


@cache
def _transformer() -> TransformerManager:
    from IPython.core.inputtransformer2 import TransformerManager

    return TransformerManager()


def lower(source: str) -> Lowered:
    """Return one code cell's text as Python. Raises SyntaxError where IPython's transformer does."""
    head, magic, body = _split_cell_magic(source)
    if magic is None:
        return Lowered(_to_python(source))
    name, line = magic
    if name in PYTHON_CELLS:
        inner = lower(body)
        return Lowered(head + inner.source, (f"%%{name}", *inner.removed), inner.unknown)
    if name in SHELL_CELLS or name in FILE_CELLS:
        return Lowered(f"{head}get_ipython().run_cell_magic({name!r}, {line!r}, {body!r})\n")
    comment = "".join(f"# {text}".rstrip() + "\n" for text in (f"%%{name} {line}".rstrip() + "\n" + body).splitlines())
    unknown = () if name in DISPLAY_CELLS else (f"%%{name}",)
    return Lowered(head + comment, (f"%%{name}",), unknown)


def _split_cell_magic(source: str) -> tuple[str, tuple[str, str] | None, str]:
    """Split a cell into the lines before a cell magic, the magic, and the lines under it.

    Colab allows comments before the magic (`#@title`), where IPython wants it first.
    """
    lines = source.splitlines(keepends=True)
    for index, line in enumerate(lines):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        found = _CELL_MAGIC.match(line.strip())
        if found is None:
            break
        return "".join(lines[:index]), (found["name"], found["line"].strip()), "".join(lines[index + 1 :])
    return "", None, source


def _to_python(source: str) -> str:
    if not _NEEDS_IPYTHON.search(source):
        return source
    return str(_transformer().transform_cell(source))
