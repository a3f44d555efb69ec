"""Let code that passes a tracked run on do so on every process: the others have a stand-in that does nothing."""

from __future__ import annotations

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import SEEDS, Graph, Role, Statement
from unsloth_ddp.notebook.analyse.main_values import MainValues
from unsloth_ddp.notebook.syntax.effects import starts_run


def stand_in_for_runs(graph: Graph) -> None:
    """Mark the runs that code on every process passes on: there, the other processes get a stand-in that does nothing."""
    wanted: set[str] = set()
    for statement in graph.statements:
        if statement.needed and statement.role in (Role.ALL, Role.FIRST) and MainValues(graph, statement).leaves_run():
            wanted |= statement.runs
    for statement in graph.statements:
        if statement.role is Role.MAIN and isinstance(statement.node, cst.SimpleStatementLine):
            started = {name for name, site in statement.usage.assigned if starts_run(graph.full_path(site))}
            statement.stands_in = len(statement.node.body) == 1 and bool(started & wanted)


def stand_in_serves(graph: Graph, statement: Statement) -> bool:
    """Return whether a stand-in is as good as the run in a statement: it is only told something, or handed to a training."""
    found = {name for s in graph.statements if s.stands_in for name in s.usage.writes}
    if not statement.runs or not statement.runs <= found:
        return False
    told = MainValues(graph, statement).only_told(statement.node)
    return told or (bool(statement.effects & SEEDS) and not statement.usage.writes and _is_call(statement.node))


def _is_call(node: cst.BaseStatement) -> bool:
    match node:
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.Call(func=cst.Name()))]):
            return True
    return False
