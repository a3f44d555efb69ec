"""Guard the parts of a block that one process runs, where every process runs the block around them."""

from __future__ import annotations

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import TOGETHER, Graph, Statement
from unsloth_ddp.notebook.analyse.main_values import tells_tracker
from unsloth_ddp.notebook.analyse.roles import removes_files
from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import code, keyword, with_value
from unsloth_ddp.notebook.syntax.effects import Effect
from unsloth_ddp.notebook.syntax.ipython import ipython_call
from unsloth_ddp.notebook.syntax.lines import LineEditor, lead, parse_line
from unsloth_ddp.notebook.syntax.name_usage import collect
from unsloth_ddp.notebook.syntax.tree import contains, dotted, goes_backward, is_false, names_in, walk

_Made = cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]
_JUMPS = cst.Return | cst.Break | cst.Continue | cst.Yield


class BlockGuards(LineEditor):
    """Puts lines and `with` blocks that save or run a command under a guard, and lets the others wait for them.

    They wait right behind the guard, as at the top of a script, or behind the outermost block that not every process
    may enter alike: a condition, or a loop over batches.
    """

    def __init__(
        self, context: ConversionContext, graph: Graph, guarded: set[Effect], trains: bool, original: cst.CSTNode
    ) -> None:
        super().__init__()
        self.context, self.graph, self.guarded, self.trains = context, graph, guarded, trains
        self.objects = _own_objects(original)
        self.of_class = isinstance(original, cst.ClassDef)
        self.nested = 0
        self.dead = 0
        self.whole = 0  # `with` blocks around that are guarded as a whole
        # Of each `with` around: the condition for the file that it writes, whether it is guarded as a whole, and the
        # handles of what it has open on every process.
        self.files: list[tuple[str, bool, set[str]]] = []
        self.apart: list[cst.CSTNode] = []  # blocks around that a process may skip
        self.waits = False  # for a guard inside them

    # Where we are ----------------------------------------------------------------------------------------------------

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        self.nested += 1

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        self.nested -= 1
        return updated_node

    def visit_If_body(self, node: cst.If) -> None:
        self.dead += is_false(node.test)

    def leave_If_body(self, node: cst.If) -> None:
        self.dead -= is_false(node.test)

    def visit_If(self, node: cst.If) -> None:
        self.apart.append(node)

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> _Made:
        self.apart.pop()
        return self._with_wait(updated_node)

    def visit_For(self, node: cst.For | cst.While) -> None:
        if isinstance(node, cst.While) or any(contains(line, goes_backward) for line in node.body.body):
            self.apart.append(node)

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> _Made:
        if self.apart[-1:] == [original_node]:
            self.apart.pop()
        return self._with_wait(updated_node)

    visit_While, leave_While = visit_For, leave_For  # type: ignore[assignment]

    # Guards ----------------------------------------------------------------------------------------------------------

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> _Made:
        return self._with_wait(super().leave_SimpleStatementLine(original_node, updated_node))  # type: ignore[arg-type]

    def finish_line(self, original: cst.SimpleStatementLine, line: cst.SimpleStatementLine) -> cst.BaseStatement:
        """Guard a nested line that saves or runs a command, where the block around it runs on every process."""
        if not self._may_guard() or len(line.body) != 1 or not isinstance(line.body[0], cst.Expr | cst.Assign):
            return line
        names = self.context.names
        if tells_tracker(original.body[0], self.graph):
            return lead(
                _guard(line, names["IS_MAIN"]), [self.context.edit("once", "only the main process has the run")]
            )
        if isinstance(line.body[0], cst.Assign):
            return line
        magic = ipython_call(original.body[0].value) if isinstance(original.body[0], cst.Expr) else None
        if magic is not None:
            return _guard(line, f"{names['LOCAL_RANK']} == 0") if magic.command and not self.depth else line
        handles = set().union(*(opened for _, _, opened in self.files))
        test = "" if names_in(original).keys() & handles else self._test(original)
        return self._guarded(line, test) if test else line

    def visit_With(self, node: cst.With) -> None:
        """Take a `with` that opens a file to write to as one statement, unless something leaves it besides the file."""
        head = collect(node.with_changes(body=cst.IndentedBlock([])))
        writes = self._may_guard() and Effect.FILE in self.graph.effects_of(head)
        test = self._test(node) if writes else ""
        opened: set[str] = set()
        if whole := bool(test) and not self._leaves(node):
            self.whole += 1
        elif test:
            opened = _opened(node)
            opened.update(name for name, site in collect(node).assigned if names_in(site.node).keys() & opened)
        self.files.append((test, whole, opened))

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> _Made:
        test, whole, _ = self.files.pop()
        if whole:
            self.whole -= 1
            return self._with_wait(self._guarded(updated_node, test))
        if not test:
            return updated_node
        note = self.context.edit("save", "one process writes this file")
        block = updated_node.with_changes(items=[_elsewhere(item, test) for item in updated_node.items])
        return lead(block, [note])

    def _may_guard(self) -> bool:
        return bool(self.nested and not self.dead and not self.whole and not self.context.on_one_process)

    def _leaves(self, node: cst.With) -> bool:
        """Return whether a `with` binds or changes what is read outside of it, or jumps out of it."""
        usage = collect(node)
        outside = self.graph.names - names_in(node)
        changed = usage.writes | (usage.mutates - self.graph.imports.keys())
        jumps = contains(node, lambda part: isinstance(part, _JUMPS))
        return jumps or any(outside[name] > 0 for name in changed - _opened(node))

    def _test(self, node: cst.BaseStatement) -> str:
        """Return the condition under which the effects of a part of a block are to happen, or "" for no condition."""
        effects = self.graph.effects_of(collect(node))
        if not effects & self.guarded or effects & (TOGETHER | {Effect.STATE}):
            return ""
        if self.trains and self.of_class and effects & self.guarded == {Effect.FILE} and not removes_files(node):
            return ""  # a method may write what another reads on every process
        if not self.trains and (effects - _ON_ONE - {Effect.PRINT} or self._reaches_memory(node)):
            return ""
        on_node = not self.trains and Effect.SAVE not in effects
        return f"{self.context.names['LOCAL_RANK']} == 0" if on_node else self.context.names["IS_MAIN"]

    def _guarded(self, part: cst.SimpleStatementLine | cst.With, test: str) -> cst.BaseStatement:
        who = "one process on each node does this" if "==" in test else "only the main process does this"
        inside = "only the main process saves, inside a block that trains"
        self.waits |= self.trains and not self.of_class and self.depth < 2
        return lead(
            _guard(part, test), [self.context.edit("save", inside if self.trains else f"{who}, inside what all run")]
        )

    def _with_wait(self, part: cst.BaseStatement) -> _Made:
        """Return a part of a block, and behind it the wait for what the main process has saved in it."""
        if not self.waits or self.apart or not self.nested:
            return part
        self.waits = False
        return cst.FlattenSentinel([part, parse_line(f"{self.context.names['wait_for_everyone']}()")])

    def _reaches_memory(self, node: cst.BaseStatement) -> bool:
        """Return whether a line writes into an object that the code made: a buffer, or a file opened before."""
        arguments = {
            arg.value.value for s in collect(node).calls for arg in s.node.args if isinstance(arg.value, cst.Name)
        }
        return isinstance(node, cst.SimpleStatementLine) and bool(arguments & self.objects)


def _opened(node: cst.With) -> set[str]:
    """Return the names that a `with` binds."""
    return {code(item.asname.name) for item in node.items if item.asname is not None}


def _guard(line: cst.SimpleStatementLine | cst.With, test: str) -> cst.If:
    body = cst.IndentedBlock(body=[line.with_changes(leading_lines=[])])
    return cst.If(test=cst.parse_expression(test), body=body, leading_lines=line.leading_lines)


def elsewhere(call: cst.Call, test: str) -> cst.Call:
    """Return a call of `open` that opens nothing on the processes for which the condition does not hold."""
    path = keyword(call, "file") or call.args[0]
    return with_value(call, path, cst.parse_expression(f"{code(path.value)} if {test} else os.devnull"))


def _elsewhere(item: cst.WithItem, test: str) -> cst.WithItem:
    call = item.item
    if not isinstance(call, cst.Call) or dotted(call.func).split(".")[-1] != "open" or not call.args:
        return item
    return item.with_changes(item=elsewhere(call, test))


# What stays on one process -------------------------------------------------------------------------------------------

_GUARDED = {Effect.SAVE, Effect.FILE, Effect.PAID}
# What one process does of a statement that all run: the others wait for their turn, or do without.
_ON_ONE = {Effect.SAVE, Effect.FILE, Effect.SHELL}


def guards_inside(statement: Statement, graph: Graph) -> tuple[set[Effect], bool]:
    """Return the effects to guard inside a statement that runs on every process, and whether it trains inside."""
    if not statement.everywhere or isinstance(statement.node, cst.SimpleStatementLine):
        return set(), False
    match statement.node:
        case cst.ClassDef(name=cst.Name(value=name)):
            # A trainer asks for itself who saves.
            own_way = name in graph.trainer_classes
            called = any(base.endswith("Callback") for base in graph.functions[name].bases)
            effects = graph.effects_inside(name)
            if (called or effects & TOGETHER) and not own_way:
                return effects & _GUARDED, True
            return effects & _ON_ONE if _runs_everywhere(name, graph) and not own_way else set(), False
        case cst.FunctionDef(name=cst.Name(value=name)):
            effects = graph.function_effects.get(name, set())
            reaches = not effects & TOGETHER and _runs_everywhere(name, graph)
        case _:
            effects, reaches = statement.effects, statement.needed or Effect.STATE in statement.effects
    if effects & TOGETHER:
        return _GUARDED if effects & _GUARDED else set(), True
    return effects & _ON_ONE if reaches else set(), False


def _runs_everywhere(name: str, graph: Graph) -> bool:
    """Return whether a statement that all processes run for what it gives the training runs one of the functions.

    In one that trains, a line that only calls the function is under a guard, and one that takes its value is not. What
    makes a temporary folder has one on each process, and its files with it.
    """
    function = graph.functions[name]
    if any(graph.full_path(site).startswith("tempfile.") for site in function.calls):
        return False
    trains = [s.usage for s in graph.statements if s.effects & TOGETHER]
    trains += [body for body in graph.functions.values() if graph.effects_of(body) & TOGETHER]
    if any(site.path == name and not site.bare for usage in trains for site in usage.calls):
        return True
    return any(
        body is function
        for statement in graph.statements
        if statement.everywhere and not statement.effects & TOGETHER
        if statement.needed or Effect.STATE in statement.effects
        for body in graph.bodies_run(statement.usage)
    )


def _own_objects(node: cst.CSTNode) -> set[str]:
    """Return the names that hold an object made by a class other than a path, or a file opened by a `with`."""
    assigned = collect(node).assigned if isinstance(node, cst.BaseStatement) else []
    objects = {name for name, site in assigned if site.tail[:1].isupper() and site.tail != "Path"}
    items = [item for item in walk(node) if isinstance(item, cst.WithItem)]
    return objects | {code(item.asname.name) for item in items if item.asname is not None}
