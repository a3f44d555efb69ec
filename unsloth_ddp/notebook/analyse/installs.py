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
    grown = True
    while grown:
        grown = False
        for statement in statements:
            if statement.role is Role.DROP or statement.role is Role.DEAD or statement.cell not in touched:
                continue
            if _serves_installs(graph, statement):
                statement.role = Role.DROP
                grown = True


def has_install(statement: Statement) -> bool:
    """Return whether a statement installs something anywhere inside."""
    return any(_installs(site.node) is not None for site in statement.usage.calls)


def only_installs(statement: Statement) -> bool:
    """Return whether nothing is left of a statement once its installs are removed."""
    node = statement.node
    if not isinstance(node, cst.SimpleStatementLine):
        return False
    return all(
        isinstance(s, cst.Expr) and isinstance(s.value, cst.Call) and _installs(s.value) == "" for s in node.body
    )


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
            return not isinstance(value, cst.SimpleString) and not (
                isinstance(value, cst.Call) and _installs(value) == ""
            )
        case cst.AssignTarget(target=target):
            return isinstance(target, cst.Attribute | cst.Subscript)
    return isinstance(node, cst.FunctionDef | cst.ClassDef | cst.Raise | cst.Assert | cst.Del | cst.AugAssign)
