"""Leave out the statements that only install packages, and what only they use."""

from __future__ import annotations

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import Graph, Role, Statement
from unsloth_ddp.notebook.syntax.ipython import command_of, without_installs
from unsloth_ddp.notebook.syntax.tree import contains


def drop_installs(graph: Graph) -> None:
    """Drop statements that only install, then what only they used."""
    statements = graph.statements
    touched = {s.cell for s in statements if has_install(s)}
    for statement in statements:
        if only_installs(statement):
            statement.role = Role.DROP
    kept = [s for s in statements if s.role not in (Role.DROP, Role.DEAD) and s.cell in touched]
    while found := next((s for s in kept if s.role is not Role.DROP and _serves_installs(graph, s)), None):
        found.role = Role.DROP


def has_install(statement: Statement) -> bool:
    """Return whether a statement installs something anywhere inside."""
    return any(_installs(site.node) is not None for site in statement.usage.calls)


def only_installs(statement: Statement) -> bool:
    """Return whether nothing is left of a statement once its installs are removed."""
    lines = statement.node.body if isinstance(statement.node, cst.SimpleStatementLine) else [None]
    return all(isinstance(line, cst.Expr) and _is_install(line.value) for line in lines)


def _is_install(value: cst.BaseExpression) -> bool:
    return isinstance(value, cst.Call) and _installs(value) == ""


def _installs(node: cst.Call) -> str | None:
    """Return a call's shell command without its installs; None where it installs nothing."""
    command = command_of(node)
    kept, _ = without_installs(command)
    return None if kept == command else kept


def _serves_installs(graph: Graph, statement: Statement) -> bool:
    """Return whether a statement does nothing but prepare installs."""
    if contains(statement.node, _does_more):
        return False
    users = [graph.statements[i] for i in statement.used_by]
    if any(user.role is not Role.DROP for user in users):
        return False
    if users or has_install(statement):
        return not statement.needed
    names = statement.usage.imports
    return bool(names) and all(path.split(".")[0] in _STDLIB for path in names.values())


_STDLIB = {"os", "re", "sys", "importlib", "subprocess", "shutil", "pathlib", "platform", "warnings"}


def _does_more(node: cst.CSTNode) -> bool:
    """Return whether a part of a statement does more than import, assign plain names and install."""
    match node:
        case cst.Expr(value=value):
            return not isinstance(value, cst.SimpleString) and not _is_install(value)
        case cst.AssignTarget(target=target):
            return isinstance(target, cst.Attribute | cst.Subscript)
    return isinstance(node, cst.FunctionDef | cst.ClassDef | cst.Raise | cst.Assert | cst.Del | cst.AugAssign)
