"""The packages of unsloth_ddp import downward only, and each says what it is for; read from the syntax trees."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPO

KIT = REPO / "unsloth_ddp"
# From the top down. The public commands stand side by side: none of them imports another.
COMMANDS = ("preflight", "parity", "plan", "chat", "export", "runs", "port", "notebook")
LAYERS = ("run", "training", "checkpoints", "sizing", "model", "data", "distributed", "config", "utils")


def modules_in(root: Path) -> list[Path]:
    """Every module below `root` but the one that makes it a package."""
    return sorted(path for path in root.rglob("*.py") if path.parent != root)


def imported(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every module of the kit that a module imports, in functions and for types too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("unsloth_ddp"))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "unsloth_ddp":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_module = (root.parent / full.replace(".", "/")).with_suffix(".py").exists()
                yield node.lineno, full if is_module else str(node.module)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "a relative import"


def may_import(importer: str, other: str) -> bool:
    """Return whether a package may import another one."""
    if importer == other:
        return True
    if importer in COMMANDS:
        return other in LAYERS
    return other in LAYERS and LAYERS.index(importer) < LAYERS.index(other)


def wrong_imports(root: Path) -> list[str]:
    """Each import that runs upward or sideways, by file and line."""
    wrong = []
    for path in modules_in(root):
        package = path.relative_to(root).parts[0]
        for line, name in imported(path, root):
            parts = name.split(".")
            if len(parts) < 2 or not may_import(package, parts[1]):
                wrong.append(f"{path.relative_to(root.parent)}:{line} imports {name}")
    return wrong


def cycles(root: Path) -> list[str]:
    """Each circle of modules that import each other, type-only imports counted."""
    graph = {
        ".".join(path.relative_to(root.parent).with_suffix("").parts): {name for _, name in imported(path, root)}
        for path in modules_in(root)
    }
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            found.append(" -> ".join([*trail[trail.index(name) :], name]))
        elif name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())
    return found


def test_imports_run_downward_only() -> None:
    assert wrong_imports(KIT) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert cycles(KIT) == []


def test_the_top_level_holds_the_packages_and_nothing_else() -> None:
    held = {path.name for path in KIT.iterdir() if path.name != "__pycache__"}
    assert held == {"__init__.py", *COMMANDS, *LAYERS}


@pytest.mark.parametrize("package", [*COMMANDS, *LAYERS])
def test_a_package_says_in_one_sentence_what_it_is_for_and_hands_nothing_on(package: str) -> None:
    tree = ast.parse((KIT / package / "__init__.py").read_text(encoding="utf-8"))
    said = ast.get_docstring(tree) or ""
    assert said.endswith(".") and said.count(". ") == 0, f"{package}: {said!r}"
    assert len(tree.body) == 1, f"{package}/__init__.py holds more than its docstring"


def test_an_import_that_runs_upward_is_named(tmp_path: Path) -> None:
    root = tmp_path / "unsloth_ddp"
    for package in ("utils", "run"):
        (root / package).mkdir(parents=True)
    (root / "run" / "context.py").write_text("")
    (root / "utils" / "units.py").write_text("def f():\n    from unsloth_ddp.run.context import Run\n")
    assert wrong_imports(root) == ["unsloth_ddp/utils/units.py:2 imports unsloth_ddp.run.context"]


def test_a_circle_is_named(tmp_path: Path) -> None:
    package = tmp_path / "unsloth_ddp" / "utils"
    package.mkdir(parents=True)
    (package / "a.py").write_text("from unsloth_ddp.utils import b\n")
    (package / "b.py").write_text("from unsloth_ddp.utils.a import x\n")
    assert cycles(package.parent) == ["unsloth_ddp.utils.a -> unsloth_ddp.utils.b -> unsloth_ddp.utils.a"]


def test_no_folder_has_more_than_a_dozen_modules() -> None:
    counts = Counter(path.parent for path in KIT.rglob("*.py") if path.stem not in ("__init__", "__main__"))
    assert {str(folder.relative_to(REPO)): count for folder, count in counts.items() if count > 12} == {}
