"""The surface of the kit and its size: a change that needs more of either changes this file, in sight of its reader."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPO
from unsloth_ddp.config.options import OPTIONS

SURFACE = Path(__file__).parent / "surface.txt"
PACKAGE = REPO / "unsloth_ddp"


def listed(section: str) -> list[str]:
    """Return the lines of a section of surface.txt."""
    blocks = dict(re.findall(r"^\[(.+)\]\n((?:[^\[\n].*\n)*)", SURFACE.read_text(), flags=re.MULTILINE))
    return blocks[section].split("\n")[:-1]


def test_options_are_those_that_are_listed() -> None:
    assert sorted(OPTIONS) == listed("options")


def test_commands_are_those_that_are_listed() -> None:
    modules = sorted(str(path.parent.relative_to(REPO)).replace("/", ".") for path in PACKAGE.rglob("__main__.py"))
    assert modules == listed("python -m")


def test_environment_variables_are_those_that_are_listed() -> None:
    read = {name for path in PACKAGE.rglob("*.py") for name in re.findall(r"\bUNSLOTH_DDP_[A-Z_]+\b", path.read_text())}
    assert sorted(read) == listed("environment variables")


BUDGETS = {name: int(lines) for name, lines in (line.split() for line in listed("lines of Python"))}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_package_stays_within_its_budget(name: str) -> None:
    folder = REPO / name if name == "tests" else PACKAGE / name
    lines = sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))
    assert lines <= BUDGETS[name], f"{name} has {lines} lines; take something away, or change its budget in surface.txt"


def test_every_package_has_a_budget() -> None:
    packages = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert packages | {"tests"} == set(BUDGETS)


# Names that do not say what they hold.
EMPTY_WORDS = {
    "found", "one", "given", "own", "kept", "before", "reason", "known", "got", "left", "taken", "wanted", "asked",
    "seen", "told", "said", "held", "made", "most", "here", "there", "done", "least",
}  # fmt: skip


def stored_names(path: Path) -> Iterator[str]:
    """Yield what a module gives a name: variables, parameters, attributes, functions and classes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name


def test_names_say_what_they_hold() -> None:
    names = [(path, name) for path in sorted(PACKAGE.rglob("*.py")) for name in stored_names(path)]
    empty = [(path, name) for path, name in names if name.strip("_") in EMPTY_WORDS]
    listed_names = "\n".join(f"{path.relative_to(REPO)}: {name}" for path, name in empty)
    assert len(empty) < 0.005 * len(names), f"{len(empty)} of {len(names)} names say nothing:\n{listed_names}"
