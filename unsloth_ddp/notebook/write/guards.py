"""Find what a statement that runs on every process leaves to one of them, and the objects that stay each process's own."""

from __future__ import annotations

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import SEEDS, Graph, Role, Statement
from unsloth_ddp.notebook.syntax.arguments import code
from unsloth_ddp.notebook.syntax.effects import Effect
from unsloth_ddp.notebook.syntax.name_usage import collect

_GUARDED = {Effect.SAVE, Effect.FILE, Effect.PAID}
# What one process does of a statement that all run: the others wait for their turn, or do without.
ON_ONE = {Effect.SAVE, Effect.FILE, Effect.SHELL}


def guards_inside(statement: Statement, graph: Graph) -> tuple[set[Effect], bool]:
    """Return the effects to guard inside a statement that runs on every process, and whether it trains inside."""
    if statement.role not in (Role.ALL, Role.FIRST):
        return set(), False
    together = SEEDS | {Effect.SYNC}
    match statement.node:
        case cst.SimpleStatementLine():
            return set(), False
        case cst.ClassDef(name=cst.Name(value=name)):
            # A trainer asks for itself who saves.
            own_way = name in graph.trainer_classes
            called = any(base.endswith("Callback") for base in graph.functions[name].bases)
            effects = graph.class_effects(name)
            if (called or effects & together) and not own_way:
                return effects & _GUARDED, True
            return effects & ON_ONE if _runs_everywhere(name, graph) and not own_way else set(), False
        case cst.FunctionDef(name=cst.Name(value=name)):
            effects = graph.function_effects.get(name, set())
            if effects & together:
                return _GUARDED if effects & _GUARDED else set(), True
            return effects & ON_ONE if _runs_everywhere(name, graph) else set(), False
    if statement.effects & together:
        return _GUARDED if statement.effects & _GUARDED else set(), True
    reaches = statement.needed or Effect.STATE in statement.effects
    return statement.effects & ON_ONE if reaches else set(), False


def _runs_everywhere(name: str, graph: Graph) -> bool:
    """Return whether a statement that all processes run for what it gives the training runs one of the functions.

    Not one that trains: in it the line that calls the function is under a guard. What makes a temporary folder has one
    on each process, and its files with it.
    """
    own = graph.functions[name]
    if any(graph.full_path(site).startswith("tempfile.") for site in own.calls):
        return False
    return any(
        body is own
        for statement in graph.statements
        if statement.role in (Role.ALL, Role.FIRST) and not statement.effects & (SEEDS | {Effect.SYNC})
        if statement.needed or Effect.STATE in statement.effects
        for body in graph.bodies_run(statement.usage)
    )


def own_objects(node: cst.CSTNode) -> set[str]:
    """Return the names that hold an object made by a class other than a path, or a file opened by a `with`."""
    assigned = collect(node).assigned if isinstance(node, cst.BaseStatement) else []
    made = {name for name, site in assigned if site.tail[:1].isupper() and site.tail != "Path"}
    return made | {code(item.asname.name) for item in _Items.of(node) if item.asname is not None}


class _Items(cst.CSTVisitor):
    """Collects what `with` statements enter."""

    def __init__(self) -> None:
        self.found: list[cst.WithItem] = []

    @classmethod
    def of(cls, node: cst.CSTNode) -> list[cst.WithItem]:
        visitor = cls()
        node.visit(visitor)
        return visitor.found

    def visit_WithItem(self, node: cst.WithItem) -> None:
        self.found.append(node)
