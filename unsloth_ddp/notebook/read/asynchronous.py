"""Put statements that await in a way that no expression can replace into a coroutine of their own."""

from __future__ import annotations

import libcst as cst

from unsloth_ddp.notebook.syntax.name_usage import collect


def as_coroutine(statement: cst.BaseStatement, name: str) -> list[cst.BaseStatement]:
    """Return a top-level `async for`, `async with` or asynchronous comprehension as a coroutine and its `await`.

    Other statements are returned as they are: `await` in them becomes a call.
    """
    if not _is_asynchronous(statement):
        return [statement]
    written = sorted(collect(statement).writes)
    leading = statement.leading_lines  # type: ignore[attr-defined]
    inside = statement.with_changes(leading_lines=[])
    names = [cst.NameItem(cst.Name(name)) for name in written]
    head = [cst.SimpleStatementLine(body=[cst.Global(names)])] if names else []
    coroutine = cst.FunctionDef(
        name=cst.Name(name),
        params=cst.Parameters(),
        body=cst.IndentedBlock(body=[*head, inside]),
        asynchronous=cst.Asynchronous(),
        leading_lines=leading,
    )
    call = cst.parse_expression(f"{name}()")
    return [coroutine, cst.SimpleStatementLine(body=[cst.Expr(cst.Await(call))])]


def _is_asynchronous(node: cst.CSTNode) -> bool:
    """Return whether a node holds an asynchronous block or comprehension outside functions."""
    if isinstance(node, cst.FunctionDef):
        return False
    if isinstance(node, cst.For | cst.With | cst.CompFor) and node.asynchronous is not None:
        return True
    return any(_is_asynchronous(part) for part in node.children)
