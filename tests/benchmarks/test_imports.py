"""Check what benchmarks import from the kit and from each other, by their syntax trees: most need a GPU to run."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.conftest import REPO


def defined_in(path: Path) -> set[str]:
    """Return the names at the top level of a module."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            names |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return names


def test_names_that_are_imported_exist() -> None:
    missing = []
    for script in sorted((REPO / "benchmarks").rglob("*.py")):
        for node in ast.walk(ast.parse(script.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                ("unsloth_ddp", "benchmarks")
            ):
                continue
            place = REPO / str(node.module).replace(".", "/")
            module = place.with_suffix(".py")
            names = defined_in(module) if module.exists() else set()
            for alias in node.names:
                submodule = place / alias.name
                if alias.name not in names and not submodule.with_suffix(".py").exists() and not submodule.is_dir():
                    missing.append(f"{script.relative_to(REPO)}:{node.lineno}: {node.module}.{alias.name}")
    assert missing == []
