"""Assemble a cell of the script from edited statements, with guards around what not every process may run."""

from dataclasses import dataclass, field

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import Graph, Role, Statement
from unsloth_ddp.notebook.analyse.main_values import from_main
from unsloth_ddp.notebook.analyse.tracked_runs import with_stand_in
from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.effects import Effect
from unsloth_ddp.notebook.syntax.lines import comment_line, is_empty, lead, parse_line
from unsloth_ddp.notebook.syntax.tree import contains
from unsloth_ddp.notebook.syntax.usage import ENVIRONMENT

DEVICE_MARK = "__ddp_device__"
_WAITS = {Effect.SAVE, Effect.FILE, Effect.PAID, Effect.SERVER, Effect.SHELL, Effect.LOGIN, Effect.TRACK}
_WORDS = {
    Effect.SAVE: "saves",
    Effect.FILE: "writes files",
    Effect.SHELL: "runs commands",
    Effect.SERVER: "starts a server",
    Effect.PAID: "calls the service",
    Effect.LOGIN: "logs in",
    Effect.TRACK: "tracks",
    Effect.INFER: "generates",
    Effect.STATS: "reads memory statistics",
    Effect.SHOW: "displays",
    Effect.PRINT: "prints",
}


@dataclass
class EditedStatement:
    """A statement with its edited tree."""

    statement: Statement
    index: int
    node: cst.BaseStatement
    notes: list[str] = field(default_factory=list)


def cell_body(
    placed: list[EditedStatement], graph: Graph, context: ConversionContext
) -> tuple[list[cst.BaseStatement], list[cst.EmptyLine]]:
    """Return the statements of one cell, grouped and guarded; comments of removed ones move to the next or the end."""
    body: list[cst.BaseStatement] = []
    pending: list[cst.EmptyLine] = []
    waits = False
    for group in _groups(placed, graph):
        role = group[0].statement.role
        nodes = [lead(p.node, p.notes) for p in group]
        if role is Role.DROP or all(
            is_empty(n) and not is_empty(p.statement.node) for n, p in zip(nodes, group, strict=True)
        ):
            for p, node in zip(group, nodes, strict=True):
                pending += _comments(p, node, pending, context)
            continue
        first = [line for p in group for line in p.statement.lines_before]
        statements = [*_seeds(group, context), *first, *_guarded_statements(role, group, nodes, graph, context)]
        if body and waits and _saves_together(group):
            body.pop()  # the next one's wait will do
        waits = _saves_together(group)
        if role in (Role.ALL, Role.FIRST) and any(ENVIRONMENT in graph.stores_of(p.statement.usage) for p in group):
            note = context.edit("environment", "the launcher's variables stay as they were")
            statements.append(lead(parse_line(f"{context.names['keep_launched']}()"), [note]))
        if pending:
            top = statements[0]
            statements[0] = top.with_changes(leading_lines=[*pending, *top.leading_lines])  # type: ignore[attr-defined]
            pending = []
        body += statements
    return body, pending


def _saves_together(group: list[EditedStatement]) -> bool:
    """Return whether statements that every process runs leave it to the main one to save."""
    together = [p.statement for p in group if p.statement.effects & {Effect.TRAIN, Effect.LOOP, Effect.SYNC}]
    return group[0].statement.role is Role.ALL and any(statement.effects & _WAITS for statement in together)


def _seeds(group: list[EditedStatement], context: ConversionContext) -> list[cst.BaseStatement]:
    """Return a line that seeds the global generators, before statements that draw from them on every process."""
    seed = group[0].statement.seed
    if seed is None:
        return []
    context.cell = group[0].statement.cell
    note = context.edit("seed", "unseeded random choices: every process must make the same")
    number, generators = seed
    arguments = ", ".join([str(context.options.seed + number), *(f'"{name}"' for name in generators)])
    return [lead(parse_line(f"{context.names['same_draws']}({arguments})"), [note])]


def _comments(
    placed: EditedStatement, node: cst.BaseStatement, pending: list[cst.EmptyLine], context: ConversionContext
) -> list[cst.EmptyLine]:
    """Return the comments above a removed statement, and a note about the removal for the first of several."""
    lines = [line for line in getattr(node, "leading_lines", ()) if line.comment is not None]
    noted = any(
        line.comment and line.comment.value.startswith("# ddp: leave out installs") for line in [*pending, *lines]
    )
    if placed.statement.role is Role.DROP and not noted:
        context.cell = placed.statement.cell
        note = context.edit("install", "leave out installs and what only they needed; see the requirements at the top")
        lines.append(comment_line(note))
    return lines


def _groups(placed: list[EditedStatement], graph: Graph) -> list[list[EditedStatement]]:
    """Group statements that share a guard, together with imports and dead blocks between them."""
    groups: list[list[EditedStatement]] = []
    for position, item in enumerate(placed):
        role = item.statement.role
        alone = item.statement.share_value or item.statement.stands_in or item.statement.seed is not None
        open_group = groups[-1] if groups and not groups[-1][0].statement.stands_in else None
        first = open_group[0].statement.role if open_group else None
        shares = any(p.statement.share or p.statement.share_value for p in open_group or ())
        same = role is first and role is not Role.ALL and not alone and not shares
        if open_group and (same or (first is Role.MAIN and _joins(item, placed[position + 1 :], graph))):
            open_group.append(item)
        else:
            groups.append([item])
    return groups


def _joins(item: EditedStatement, following: list[EditedStatement], graph: Graph) -> bool:
    """Return whether a statement between two of the main process's may be in their guard with them."""
    if not _serves_main(item.statement, graph, defines=True):
        return False
    for later in following:
        if later.statement.role is Role.MAIN:
            return True
        if not _serves_main(later.statement, graph, defines=False):
            return False
    return False


def _serves_main(statement: Statement, graph: Graph, *, defines: bool) -> bool:
    """Return whether a statement is dead, or an import (or a definition, if asked) that only the main process uses."""
    if statement.role is Role.DEAD:
        return True
    users = {graph.statements[i].role for i in statement.used_by}
    binds = bool(statement.usage.imports) or (defines and bool(statement.usage.defines))
    needless = statement.role is Role.ALL and not statement.needed
    return needless and binds and bool(users) and users <= {Role.MAIN, Role.DEAD}


def _guarded_statements(
    role: Role, group: list[EditedStatement], nodes: list[cst.BaseStatement], graph: Graph, context: ConversionContext
) -> list[cst.BaseStatement]:
    names = context.names
    context.cell = group[0].statement.cell
    if role in (Role.MAIN, Role.NODE):
        free = all(needs_no_guard(p.statement, graph) for p in group)
        return nodes if free else _guard(role, group, nodes, graph, context)
    if role is Role.FIRST:
        note = context.edit("data", "one process on each node goes first, the others use its caches")
        block = cst.With(
            items=[cst.WithItem(cst.parse_expression(f"{names['main_process_first']}()"))],
            body=cst.IndentedBlock(body=_unled(nodes)),
            leading_lines=_leading(nodes),
        )
        return [lead(block, [note])]
    wait = [parse_line(f"{names['wait_for_everyone']}()")] if _saves_together(group) else []
    return [*nodes, *wait]


def needs_no_guard(statement: Statement, graph: Graph) -> bool:
    """Return whether a statement of the main process may run on all: it prints plain values, or does nothing.

    Other processes do not print. What it reads must exist there.
    """
    if statement.effects - {Effect.PRINT, Effect.SHOW} or statement.share or not _is_plain(statement.node):
        return False
    return not any(
        definition.apart and not definition.share for definition in (graph.statements[i] for i in statement.uses)
    )


def _is_plain(node: cst.BaseStatement) -> bool:
    """Return whether a statement prints plain values, assigns a constant, or does nothing."""
    match node:
        case cst.SimpleStatementLine(body=[cst.Pass()]):
            return True
        case cst.SimpleStatementLine(body=[cst.Expr(value=cst.Call(func=cst.Name("print"), args=args))]):
            parts: list[cst.CSTNode] = list(args)
        case cst.SimpleStatementLine(body=[cst.Assign(value=value)]):
            return _is_constant(value)
        case cst.SimpleStatementLine(body=[cst.Expr(value=value)]) if not isinstance(value, cst.Call):
            parts = [value]
        case _:
            return False
    return not any(contains(part, _may_act) for part in parts)


def _is_constant(value: cst.BaseExpression) -> bool:
    """Return whether an expression is a text, a number, or a list or dict of these."""
    match value:
        case cst.SimpleString() | cst.BaseNumber() | cst.Name(value="None" | "True" | "False"):
            return True
        case cst.List(elements=elements) | cst.Tuple(elements=elements):
            return all(_is_constant(element.value) for element in elements)
        case cst.Dict(elements=elements):
            return all(
                isinstance(e, cst.DictElement) and _is_constant(e.key) and _is_constant(e.value) for e in elements
            )
    return False


_PLAIN_CALLS = {"len", "str", "int", "float", "round", "type", "sorted", "list", "repr", "min", "max", "sum", "format"}
_PLAIN_METHODS = {"join", "format", "upper", "lower", "strip", "title", "center", "keys", "values", "items", "get"}


def _may_act(node: cst.CSTNode) -> bool:
    """Return whether a part of an expression may take long, draw, or change something."""
    match node:
        case cst.Call(func=cst.Name(value=name)):
            return name not in _PLAIN_CALLS
        case cst.Call(func=cst.Attribute(attr=cst.Name(value=method))):
            return method not in _PLAIN_METHODS
    return isinstance(node, cst.Call | cst.NamedExpr | cst.Await | cst.Lambda | cst.ListComp | cst.GeneratorExp)


def _guard(
    role: Role, group: list[EditedStatement], nodes: list[cst.BaseStatement], graph: Graph, context: ConversionContext
) -> list[cst.BaseStatement]:
    names = context.names
    effects: set[Effect] = set().union(*(p.statement.effects for p in group))
    share = sorted(set().union(*(p.statement.share for p in group)))
    test = names["IS_MAIN"] if role is Role.MAIN else f"{names['LOCAL_RANK']} == 0"
    words = [word for effect, word in _WORDS.items() if effect in effects] or ["uses this"]
    shared = _shared_value(group, nodes, share, context)
    who = "only the main process" if role is Role.MAIN or shared is not None else "one process on each node"
    listed = " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
    kind = "save" if Effect.SAVE in effects else "once" if effects & _WAITS else "main process"
    note = context.edit(kind, f"{who} {listed}")
    if group[0].statement.stands_in:
        return [lead(_with_stand_in(nodes[0], context), [note])]
    if shared is not None:
        return [lead(shared, [note])]
    block = cst.If(
        test=cst.parse_expression(test), body=cst.IndentedBlock(body=_unled(nodes)), leading_lines=_leading(nodes)
    )
    statements: list[cst.BaseStatement] = [lead(block, [note])]
    for name in share:
        # A block may leave a name unbound: a loop over nothing, a branch not taken.
        bound = any(name in p.statement.usage.writes and not p.statement.conditional for p in group)
        value = name if bound or any(name in p.statement.usage.mutates for p in group) else f'globals().get("{name}")'
        statements.append(parse_line(f"{name} = {names['from_main']}(lambda: {value})"))
    slow = Effect.INFER in effects and group[-1].index < graph.last_seed
    if not share and (effects & _WAITS or slow):
        statements.append(parse_line(f"{names['wait_for_everyone']}()"))
    return statements


def _with_stand_in(node: cst.BaseStatement, context: ConversionContext) -> cst.BaseStatement:
    """Return `run = start() if IS_MAIN else NoRun()`."""
    assert isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], cst.Assign)
    small = node.body[0]
    value = with_stand_in(small.value, context).with_changes(lpar=[], rpar=[])
    return node.with_changes(body=[small.with_changes(value=value)])


def _shared_value(
    group: list[EditedStatement], nodes: list[cst.BaseStatement], share: list[str], context: ConversionContext
) -> cst.BaseStatement | None:
    """Return `x = from_main(lambda: value)` for a single assignment whose value every process needs."""
    first = group[0].statement
    whole = first.share_value
    on_each = first.role is Role.NODE and Effect.FILE in first.effects  # its files have to be on each node
    if len(group) != 1 or not (whole or (len(share) == 1 and not on_each)):
        return None
    match nodes[0]:
        case cst.SimpleStatementLine(body=[cst.Assign(targets=[cst.AssignTarget(target)]) as small]):
            if whole or (isinstance(target, cst.Name) and target.value == share[0]):
                return nodes[0].with_changes(body=[small.with_changes(value=from_main(small.value, context))])
    return None


def _leading(nodes: list[cst.BaseStatement]) -> list[cst.EmptyLine]:
    return list(nodes[0].leading_lines)  # type: ignore[attr-defined]


def _unled(nodes: list[cst.BaseStatement]) -> list[cst.BaseStatement]:
    tidy = [node.visit(_NoBlankIndent()) for node in nodes]
    return [tidy[0].with_changes(leading_lines=[]), *tidy[1:]]  # type: ignore[union-attr, list-item]


class _NoBlankIndent(cst.CSTTransformer):
    """Keeps blank lines blank when a block is indented."""

    def leave_EmptyLine(self, original_node: cst.EmptyLine, updated_node: cst.EmptyLine) -> cst.EmptyLine:
        return updated_node if updated_node.comment else updated_node.with_changes(indent=False)
