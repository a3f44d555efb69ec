"""Read a notebook as leniently as Jupyter and Colab do: files with validation errors are read too."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsloth_ddp.notebook.types import Cell, Notebook, NotebookError

# Kernels that name no language in their metadata but are known not to run Python.
_OTHER_KERNELS = ("ir", "julia", "scala", "almond", "javascript", "deno", "bash", "sos", "xcpp", "gonb", "rust", "ruby")


def read_notebook(path: Path) -> Notebook:
    """Read the notebook at `path`, or raise NotebookError saying why not."""
    if path.exists() and not path.is_file() and not path.is_dir():  # a pipe would be waited for
        raise NotebookError(f"{path}: is no file; give the path of an .ipynb notebook.")
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise NotebookError(
            f"{path}: cannot be read ({error.strerror}); give the path of an .ipynb notebook."
        ) from None
    except RecursionError:
        raise NotebookError(
            f"{path}: not a notebook (its JSON is nested too deeply); give one saved as .ipynb."
        ) from None
    except ValueError as error:  # of the encoding, or of JSON
        raise NotebookError(f"{path}: not JSON ({error}); give a notebook saved as .ipynb.") from None
    return from_node(data, str(path))


def from_node(data: Any, name: str) -> Notebook:
    """Check parsed notebook JSON and return its cells. Raises NotebookError where it is not a Python notebook."""
    if not isinstance(data, Mapping) or "nbformat" not in data:
        raise NotebookError(f"{name}: JSON, but not a notebook; give a notebook saved as .ipynb.")
    version = data.get("nbformat")
    if "worksheets" in data or not isinstance(version, int) or version < 4:
        raise NotebookError(
            f"{name}: nbformat {version} is too old; run `jupyter nbconvert --to notebook --nbformat 4` on it first."
        )
    cells = data.get("cells")
    if not isinstance(cells, list):
        raise NotebookError(f"{name}: not a notebook (it has no list of cells); give a notebook saved as .ipynb.")
    language = _language(data.get("metadata"))
    if language is not None:
        raise NotebookError(f"{name}: its kernel runs {language}; only Python notebooks can be converted.")
    return Notebook(name=name, cells=tuple(_cell(name, number, cell) for number, cell in enumerate(cells, 1)))


def quoted_line(source: str, number: int) -> tuple[int, str]:
    """Return the line of a cell that an error is about, and its number: not an empty one or a comment after it."""
    lines = source.splitlines() or [""]
    index = min(number, len(lines)) - 1
    while index > 0 and (not lines[index].strip() or lines[index].lstrip().startswith("#")):
        index -= 1
    return index + 1, lines[index].strip()


def _language(metadata: Any) -> str | None:
    """Return the kernel's language where it is known and is not Python."""
    if not isinstance(metadata, Mapping):
        return None
    parts = [metadata.get(key) for key in ("kernelspec", "language_info")]
    spec, info = (part if isinstance(part, Mapping) else {} for part in parts)
    for value in (spec.get("language"), info.get("name")):
        if isinstance(value, str) and value and "python" not in value.lower():
            return value
    kernel = str(spec.get("name") or "").lower()
    return kernel if kernel.split("-")[0] in _OTHER_KERNELS else None


def _cell(name: str, number: int, cell: Any) -> Cell:
    if not isinstance(cell, Mapping):
        raise NotebookError(f"{name}: cell {number} is not a cell; open the notebook in Jupyter and save it again.")
    source = cell.get("source", "")
    parts = [source] if isinstance(source, str) else source
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise NotebookError(
            f"{name}: the source of cell {number} is not text; open the notebook in Jupyter and fix it there."
        )
    text = "".join(parts)
    return Cell(number, str(cell.get("cell_type", "raw")), text.replace("\r\n", "\n").replace("\r", "\n"))
