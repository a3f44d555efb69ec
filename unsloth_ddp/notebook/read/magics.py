"""Turn a cell's IPython syntax into Python, with IPython's own transformer.

Line magics and shell lines become the `get_ipython()` calls that IPython would run; `normalise.py` and `rewrite.py`
replace those. Cell magics that only wrap Python (%%capture, %%time) lose their first line.
"""

import ast
import re
from dataclasses import dataclass
from functools import cache

from IPython.core import magics
from IPython.core.alias import default_aliases
from IPython.core.inputtransformer2 import TransformerManager

from unsloth_ddp.notebook.syntax.ipython import FILE_CELLS, SHELL_CELLS

# The body of these is ordinary Python that runs as part of the notebook.
PYTHON_CELLS = {"capture", "time", "timeit", "prun", "debug"}
DISPLAY_CELLS = {"html", "HTML", "javascript", "js", "latex", "markdown", "svg", "SVG"}

_CELL_MAGIC = re.compile(r"^%%(?P<name>[\w!]+)[ \t]*(?P<line>.*)$")
# A command in the background, or one whose process or output gets a name.
_BINDS = re.compile(r"(^|\s)--(bg|proc|out|err)\b")
# First words of commands that notebooks have without `!`.
_COMMANDS = {
    "huggingface-cli", "hf", "git", "wget", "curl", "apt", "apt-get", "nvidia-smi", "unzip", "tar", "gdown", "kaggle",
    "wandb", "accelerate", "torchrun", "python", "python3", "npm", "pip3", "uv", "conda", "mamba", "gcloud", "aws",
}  # fmt: skip
# Databricks writes its cell magics with one sign.
_DATABRICKS_CELL = re.compile(r"\A\s*%(sql|md|md-sandbox|sh|scala|r|fs)\b")
_CD = re.compile(r"^cd\s+/[\w./-]*\s*$", re.MULTILINE)
_NEEDS_IPYTHON = re.compile(r"\A\s*^[ \t]+\S|^\s*[!%?,;/]|=\s*[!%]|\?\s*$|^\s*(>>>|In \[)", re.MULTILINE)


@dataclass(frozen=True)
class Lowered:
    """A cell as plain Python, and the cell magics that were taken off it."""

    source: str
    removed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # text that may bind names which later cells use


def lower(source: str) -> Lowered:
    """Return one code cell's text as Python. Raises SyntaxError where IPython's transformer does."""
    head, magic, body = _split_cell_magic(source)
    if magic is None:
        return Lowered(_to_python(source))
    name, line = magic
    if name in PYTHON_CELLS:
        inner = lower(body)
        left_out = (f"%%{name} {line}", *inner.left_out)
        return Lowered(head + inner.source, (f"%%{name}", *inner.removed), inner.unknown, left_out)
    if name == "script" and line.split()[:1] in (["false"], ["echo"], ["true"]):
        return Lowered(head + _commented(name, line, body), (f"%%{name}",), (), (body,))  # a cell switched off
    if name in FILE_CELLS or (name in SHELL_CELLS and not _BINDS.search(line)):
        return Lowered(f"{head}get_ipython().run_cell_magic({name!r}, {line!r}, {body!r})\n")
    unknown = () if name in DISPLAY_CELLS else (f"%%{name}",)
    return Lowered(head + _commented(name, line, body), (f"%%{name}",), unknown, (f"%%{name} {line}\n{body}",))


def _commented(name: str, line: str, body: str) -> str:
    """Return a cell magic and its cell as comments."""
    return "".join(f"# {text}".rstrip() + "\n" for text in (f"%%{name} {line}".rstrip() + "\n" + body).splitlines())


def _split_cell_magic(source: str) -> tuple[str, tuple[str, str] | None, str]:
    """Split a cell into the lines before a cell magic, the magic, and the lines under it.

    Colab allows comments before the magic (`#@title`), where IPython wants it first.
    """
    lines = source.splitlines(keepends=True)
    for index, line in enumerate(lines):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        header = _CELL_MAGIC.match(line.strip())
        if header is None:
            break
        return "".join(lines[:index]), (header["name"], header["line"].strip()), "".join(lines[index + 1 :])
    return "", None, source


def _to_python(source: str) -> str:
    source = _with_cd(source)
    if not _NEEDS_IPYTHON.search(source):
        return source
    return TransformerManager().transform_cell(source)


def _with_cd(source: str) -> str:
    """Put `%` before `cd /folder`, which Python reads as a division and IPython as the magic."""
    if not _CD.search(source):
        return source
    try:
        body = ast.parse(source).body
    except SyntaxError:  # add_automagic does it
        return source
    lines = source.splitlines(keepends=True)
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.BinOp) and _CD.match(lines[node.lineno - 1]):
            lines[node.lineno - 1] = "%" + lines[node.lineno - 1]
    return "".join(lines)


def add_automagic(source: str) -> str:
    """Put `%` or `!` before lines that are no Python and begin with a magic or a command, as automagic does."""
    indent = source[: len(source) - len(source.lstrip(" \t"))]
    # Colab's IPython takes the first line's indent off all lines that have it, a newer one only what they share.
    lines = [line.removeprefix(indent) for line in source.splitlines(keepends=True)]
    if _DATABRICKS_CELL.match(source):
        return "%" + source.lstrip()
    for index, line in enumerate(lines):
        command = re.match(r"(?P<word>[A-Za-z][\w-]*)(?=\s+([^\s=(,.:]|\.([./\s]|$))|\s*$)", line)
        if command is None or _is_python(line):
            continue
        if command["word"] in _line_magics():
            lines[index] = "%" + line
        elif command["word"] in _COMMANDS:
            lines[index] = "!" + line
    return "".join(lines)


def _is_python(line: str) -> bool:
    try:
        compile(line.strip(), "<line>", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


@cache
def _line_magics() -> frozenset[str]:
    """Return the names of IPython's own line magics and aliases."""
    members = [getattr(magics, name) for name in dir(magics) if name.endswith("Magics")]
    classes = [kind for kind in members if isinstance(getattr(kind, "magics", None), dict)]
    names = {name for kind in classes for name in kind.magics.get("line", {})}
    return frozenset(names | {name for name, _ in default_aliases()})
