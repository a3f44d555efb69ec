"""Edit trackers' runs that start inside code that every process runs, or that such code passes on."""

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import SEEDS, Graph, Role, Statement
from unsloth_ddp.notebook.analyse.main_values import MainValues, can_be_disabled
from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import code, keyword, set_keyword
from unsloth_ddp.notebook.syntax.effects import starts_run


def edit_run(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.BaseExpression, list[str]]:
    """Switch off a W&B run on the other processes, or give them a stand-in for another tracker's."""
    if context.on_one_process or not starts_run(full):
        return call, []
    note = context.edit("once", "only the main process's run is tracked; the others' does nothing")
    if not can_be_disabled(call, full):
        return with_stand_in(call, context), [note]
    old = keyword(call, "mode")
    mode = f"({code(old.value)})" if old is not None else "None"
    return set_keyword(call, "mode", f'{mode} if {context.names["IS_MAIN"]} else "disabled"'), [note]


def with_stand_in(run: cst.BaseExpression, context: ConversionContext) -> cst.BaseExpression:
    """Return `run if IS_MAIN else NoRun()`."""
    other = cst.parse_expression(f"{context.names['NoRun']}()")
    return cst.IfExp(
        test=cst.Name(context.names["IS_MAIN"]),
        body=run,
        orelse=other,
        lpar=[cst.LeftParen()],
        rpar=[cst.RightParen()],
    )


def stand_in_for_runs(graph: Graph) -> None:
    """Mark the runs that code on every process passes on: the other processes get a stand-in that does nothing."""
    passed_on: set[str] = set()
    for statement in graph.statements:
        if statement.needed and statement.everywhere and MainValues(graph, statement).leaves_run():
            passed_on |= statement.runs
    for statement in graph.statements:
        if statement.role is Role.MAIN and isinstance(statement.node, cst.SimpleStatementLine):
            started = {name for name, site in statement.usage.assigned if starts_run(graph.full_path(site))}
            statement.stands_in = len(statement.node.body) == 1 and bool(started & passed_on)


def stand_in_serves(graph: Graph, statement: Statement) -> bool:
    """Return whether a stand-in serves a statement as the run does: it is told something, or handed to a training."""
    stand_ins = {name for s in graph.statements if s.stands_in for name in s.usage.writes}
    if not statement.runs or not statement.runs <= stand_ins:
        return False
    only_told = MainValues(graph, statement).only_told(statement.node)
    calls = any(site.bare and not site.is_method and site.root != "?" for site in statement.usage.calls)
    is_call = calls and isinstance(statement.node, cst.SimpleStatementLine) and len(statement.node.body) == 1
    return only_told or (is_call and bool(statement.effects & SEEDS) and not statement.usage.writes)
