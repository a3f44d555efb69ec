"""Refuse code that is too long or nested too deeply: the largest notebooks of people have a quarter of that."""

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from unsloth_ddp.notebook.syntax.ipython import FILE_CELLS, RUNNERS, SHELL_METHODS
from unsloth_ddp.notebook.types import NotebookError

CHARACTERS = 1_000_000
NODES = 20_000  # of the syntax trees; a second converts about a thousand of them
DEPTH = 200
COMMAND = 20_000


class Bounds:
    """Count the code of a notebook as its cells are read."""

    def __init__(self, name: str, sources: list[str]) -> None:
        """Refuse a notebook whose code is too long to be parsed."""
        self.name, self.nodes = name, 0
        if (length := sum(map(len, sources))) > CHARACTERS:
            why = f"has {length:,} characters of code, more than {CHARACTERS:,}"
            raise NotebookError(f"{name}: {why}; put its data into a file.")

    def check(self, cell: int, tree: ast.AST) -> None:
        """Refuse a cell that is nested too deeply, has too long a command, or is too much with those before it."""
        queue = [(tree, 0)]
        while queue:
            node, depth = queue.pop()
            self.nodes += 1
            if self.nodes > NODES:
                why = f"has more than {NODES:,} expressions and statements up to cell {cell}"
                raise NotebookError(f"{self.name}: {why}; put its data into a file, or split it.")
            if depth > DEPTH:
                raise too_deep(self.name, cell)
            if (length := _command(node)) > COMMAND:
                why = f"cell {cell} has a command of {length:,} characters, more than {COMMAND:,}"
                raise NotebookError(f"{self.name}: {why}; put it into a script and run that.")
            queue += [(child, depth + 1) for child in ast.iter_child_nodes(node)]


def too_deep(name: str, cell: int) -> NotebookError:
    """Return the error of a cell that is nested too deeply."""
    return NotebookError(
        f"{name}: cell {cell} nests its code more than {DEPTH} deep; split it into several statements."
    )


@contextmanager
def room_for_nesting() -> Iterator[None]:
    """Let the converter call itself often enough for code that is nested as deeply as allowed."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 50 * DEPTH))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def _command(node: ast.AST) -> int:
    """Return the length of the text that a call gives to a shell, 0 for other nodes."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name), args=args) if name in SHELL_METHODS | RUNNERS:
            texts = [
                argument.value
                for argument in args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
            return 0 if texts and texts[0] in FILE_CELLS else max(map(len, texts), default=0)
    return 0
