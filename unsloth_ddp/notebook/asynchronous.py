"""Put statements that await in a way that no expression can replace into a coroutine of their own."""

from __future__ import annotations

import libcst as cst

from unsloth_ddp.notebook.name_usage import collect


def as_coroutine(statement: cst.BaseStatement, name: str) -> list[cst.BaseStatement]:
    """Return a top-level `async for`, `async with` or asynchronous comprehension as a coroutine and its `await`.

    Other statements are returned as they are: `await` in them becomes a call.
    """
    finder = _Asynchronous()
    statement.visit(finder)
    if not finder.found:
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


class _Asynchronous(cst.CSTVisitor):
    """Looks for asynchronous blocks and comprehensions outside functions."""

    def __init__(self) -> None:
        self.found = False

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:
        return False

    def visit_For(self, node: cst.For) -> None:
        self.found |= node.asynchronous is not None

    def visit_With(self, node: cst.With) -> None:
        self.found |= node.asynchronous is not None

    def visit_CompFor(self, node: cst.CompFor) -> None:
        self.found |= node.asynchronous is not None
