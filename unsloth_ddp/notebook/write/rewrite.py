"""Apply every edit of code to one statement."""

from __future__ import annotations

import re

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import TOGETHER, Graph, Role, Statement
from unsloth_ddp.notebook.analyse.main_values import send_values
from unsloth_ddp.notebook.analyse.roles import removes_files
from unsloth_ddp.notebook.analyse.tracked_runs import can_be_disabled, edit_run, tells_tracker
from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import code, keyword, with_value
from unsloth_ddp.notebook.syntax.effects import Effect, is_remote, is_trainer_call, starts_run
from unsloth_ddp.notebook.syntax.ipython import (
    IPythonCall,
    as_python_string,
    command_of,
    ipython_call,
    without_installs,
)
from unsloth_ddp.notebook.syntax.lines import LineEditor, Small, comment_line, lead
from unsloth_ddp.notebook.syntax.name_usage import collect
from unsloth_ddp.notebook.syntax.tree import contains, dotted, full_path, is_false, walk
from unsloth_ddp.notebook.syntax.usage import CallSite
from unsloth_ddp.notebook.write import load
from unsloth_ddp.notebook.write.calls import edit_command, edit_generator, edit_login, edit_seed
from unsloth_ddp.notebook.write.config import edit_config, edit_trainer, is_config_call
from unsloth_ddp.notebook.write.loops import edit_accelerated

_NOT_TWICE = "the script shares the batch among the processes, so the notebook's own division is left out"


def rewrite(statement: Statement, graph: Graph, context: ConversionContext) -> cst.BaseStatement:
    """Return the statement's syntax tree with its edits, and comments above the changed lines."""
    node = send_values(statement, graph, context)
    guarded, trains = _guards_inside(statement, graph)
    context.on_one_process = statement.role in (Role.MAIN, Role.NODE)
    editor = _Rewriter(context, graph, guarded, trains, node)
    new = node.visit(editor)
    assert isinstance(new, cst.BaseStatement)
    return lead(new, editor.outer)


class _Rewriter(LineEditor):
    def __init__(
        self, context: ConversionContext, graph: Graph, guarded: set[Effect], trains: bool, original: cst.CSTNode
    ) -> None:
        super().__init__()
        self.context, self.graph, self.guarded, self.trains = context, graph, guarded, trains
        self.objects = _own_objects(original)
        self.of_class = isinstance(original, cst.ClassDef)
        self.nested = 0
        self.dead = 0
        self.formatted = 0
        self.callbacks: list[bool] = []
        self.entered: set[int] = set()  # calls that a `with` enters on the main process only

    # Calls -----------------------------------------------------------------------------------------------------------

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        context = self.context
        magic = ipython_call(updated_node)
        if magic is not None:
            return self._ipython(magic, updated_node)
        if is_config_call(updated_node, context):
            call, notes = edit_config(updated_node, context)
        else:
            call, notes = self._edited(updated_node, entered=id(original_node) in self.entered)
        self.note(*notes)
        shared = not context.on_one_process and not self.formatted
        if shared and full_path(dotted(call.func), self.graph.imports) in load.DEVICE_COUNTS:
            self.note(context.edit("device", "each process has one GPU"))
            return cst.parse_expression(f"min(1, {code(call)})")  # none on a machine without
        if code(call.func) in ("input", "getpass", "getpass.getpass"):
            return self._ask(call)
        return call

    def _edited(self, call: cst.Call, *, entered: bool) -> tuple[cst.Call, list[str]]:
        """Return a call with the first edit that fits it, and its comments."""
        full = full_path(dotted(call.func), self.graph.imports)
        edits = [load.edit_load, load.edit_data_parallel, load.edit_dict_call, load.edit_device_number]
        edits += [edit_seed, edit_generator]
        site = CallSite(dotted(call.func), call, frozenset())
        if is_trainer_call(site, self.graph.trainer_classes) or self.graph.hands_arguments_on(site):
            edits += [] if is_remote(full) else [edit_trainer]
        else:
            edits += [edit_accelerated] if self.context.accelerated else []
            edits += [] if entered else [edit_run, edit_command, edit_login]
        made = (edit(call, full, self.context) for edit in edits)
        return next((found for found in made if found[1]), (call, []))

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> Small:
        """Let one process on each node open a file to write to: opened again, it would be emptied under the first."""
        made, line = updated_node.value, cst.SimpleStatementLine(body=[cst.Expr(original_node.value)])
        if not isinstance(made, cst.Call) or code(made.func) != "open" or self.nested or self.context.on_one_process:
            return updated_node
        if Effect.FILE not in self.graph.effects_of(collect(line)):
            return updated_node
        self.note(self.context.edit("save", "one process on each node writes this file"))
        given = keyword(made, "file") or made.args[0]
        path = f"{code(given.value)} if {self.context.names['LOCAL_RANK']} == 0 else os.devnull"
        return updated_node.with_changes(value=with_value(made, given, cst.parse_expression(path)))

    def leave_DictElement(self, original_node: cst.DictElement, updated_node: cst.DictElement) -> cst.DictElement:
        element, notes = load.edit_dict_element(updated_node, self.context)
        self.note(*notes)
        return element

    def visit_WithItem(self, node: cst.WithItem) -> None:
        if isinstance(node.item, cst.Call) and not self.context.on_one_process:
            full = full_path(dotted(node.item.func), self.graph.imports)
            if starts_run(full) and not can_be_disabled(node.item, full):
                self.entered.add(id(node.item))

    def leave_WithItem(self, original_node: cst.WithItem, updated_node: cst.WithItem) -> cst.WithItem:
        if id(original_node.item) not in self.entered:
            return updated_node
        self.note(self.context.edit("once", "only the main process's run is tracked"))
        if original_node.asname is not None:
            name = code(original_node.asname.name)
            self.note(self.context.warn("tracker", f"{name} is None on the other processes"))
        made = cst.parse_expression(f"{self.context.names['main_only']}(lambda: {code(updated_node.item)})")
        return updated_node.with_changes(item=made)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.callbacks.append(any(dotted(base.value).endswith("Callback") for base in node.bases))

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.BaseStatement:
        self.callbacks.pop()
        return updated_node

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.BaseStatement:
        super().leave_FunctionDef(original_node, updated_node)
        if not (self.callbacks and self.callbacks[-1] and self.depth == 0 and _decides(original_node)):
            return updated_node
        note = comment_line(self.context.edit("callback", "the main process decides for all: each has its own clock"))
        decorator = cst.Decorator(cst.Name(self.context.names["shared_decision"]), leading_lines=[note])
        return updated_node.with_changes(decorators=[decorator, *updated_node.decorators])

    def _ask(self, call: cst.Call) -> cst.BaseExpression:
        context = self.context
        self.note(context.warn("input", "asks whoever starts the script; a launcher may leave nobody to answer"))
        if context.on_one_process or self.depth:
            return call
        return cst.parse_expression(f"{context.names['from_main']}(lambda: {code(call)})")

    def _ipython(self, magic: IPythonCall, call: cst.Call) -> cst.BaseExpression:
        context = self.context
        if magic.args[:1] in (("writefile",), ("file",)):
            path = magic.args[1].replace("-a ", "").strip()
            mode = "a" if magic.args[1].startswith("-a") else "w"
            self.note(context.edit("shell", f"%%writefile {path}"))
            text = magic.computed or as_python_string(magic.args[2], set())
            return cst.parse_expression(f'open({as_python_string(path, context.bound)}, "{mode}").write({text})')
        command, requirements = without_installs(magic.command)
        context.requirements += requirements
        if not command:
            return call  # leave_Expr removes it
        if magic.program:
            self.note(context.edit("shell", f"a cell for {magic.program.split()[0]}"))
            program = as_python_string(magic.program, context.bound)
            body = magic.computed or as_python_string(magic.args[2], set())
            return cst.parse_expression(f"{context.names['run_shell']}({body}, program={program})")
        is_body = magic.method == "run_cell_magic"  # IPython leaves the braces and dollars of a body to the shell
        text = magic.computed or as_python_string(command, set() if is_body else context.bound)
        if magic.computed and command != magic.command:
            self.note(
                context.warn("install", "this command installs something too: install it before, and leave it out")
            )
        given = (
            re.sub(r"^(-s|--no-raise-error)\b\s*", "", magic.args[1]) if is_body and magic.args[0] != "script" else ""
        )
        if given:
            text += f", {as_python_string(given, context.bound)}"
        if magic.method in ("getoutput", "sx"):
            self.note(context.edit("shell", "what `!` gave back as lines"))
            return cst.parse_expression(f"{context.names['shell_output']}({text})")
        self.note(context.edit("shell", "a shell command of the notebook"))
        return cst.parse_expression(f"{context.names['run_shell']}({text})")

    def leave_Expr(self, original_node: cst.Expr, updated_node: cst.Expr) -> Small:
        command = command_of(original_node.value)
        kept, requirements = without_installs(command)
        if command and not kept:
            self.context.requirements += requirements
            self.note(self.context.edit("install", "install left out, see the requirements at the top"))
            return cst.RemoveFromParent()
        return updated_node

    # Division by the number of processes ---------------------------------------------------------------------------

    def leave_BinaryOperation(
        self, original_node: cst.BinaryOperation, updated_node: cst.BinaryOperation
    ) -> cst.BaseExpression:
        divides = isinstance(original_node.operator, cst.FloorDivide | cst.Divide)
        if not divides or not self._shares(original_node.left, original_node.right):
            return updated_node
        self.note(self.context.edit("batch", _NOT_TWICE))
        return updated_node.left

    def leave_AugAssign(self, original_node: cst.AugAssign, updated_node: cst.AugAssign) -> Small:
        divides = isinstance(original_node.operator, cst.FloorDivideAssign | cst.DivideAssign)
        if not divides or not self._shares(original_node.target, original_node.value):
            return updated_node
        self.note(self.context.edit("batch", f"{code(original_node)} left out: {_NOT_TWICE}"))
        return cst.RemoveFromParent()

    def _shares(self, what: cst.BaseExpression, among: cst.BaseExpression) -> bool:
        """Return whether the notebook divides a batch or its accumulation by the number of processes, as this script does."""
        count = isinstance(among, cst.Name) and among.value in self.graph.counts_of_processes
        trainer = any(Effect.TRAINER in statement.effects for statement in self.graph.statements)
        return count and trainer and bool(re.search("accum|batch", code(what), re.IGNORECASE))

    # Strings, await --------------------------------------------------------------------------------------------------

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.BaseExpression:
        if not re.fullmatch(r"""(["'])cuda:\d+\1""", updated_node.value):
            return updated_node
        self.note(self.context.edit("device", f"{updated_node.value} was one GPU for every process"))
        return cst.parse_expression(f'f"cuda:{{{self.context.names["LOCAL_RANK"]}}}"')

    def visit_ConcatenatedString(self, node: cst.ConcatenatedString) -> bool:
        return False

    def visit_FormattedString(self, node: cst.FormattedString) -> bool:
        self.formatted += 1
        return "await" in code(node)  # strings in it are left: their quotes would end it

    def leave_FormattedString(
        self, original_node: cst.FormattedString, updated_node: cst.FormattedString
    ) -> cst.BaseExpression:
        self.formatted -= 1
        return updated_node

    def leave_Await(self, original_node: cst.Await, updated_node: cst.Await) -> cst.BaseExpression:
        if self.depth:
            return updated_node
        self.note(self.context.edit("await", "a script has no running event loop"))
        return cst.parse_expression(f"{self.context.names['run_async']}({code(updated_node.expression)})")

    # Guards inside blocks --------------------------------------------------------------------------------------------

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

    def finish_line(self, original: cst.SimpleStatementLine, line: cst.SimpleStatementLine) -> cst.BaseStatement:
        """Guard a nested line that saves or runs a command, where the block around it runs on every process."""
        if not self.nested or self.dead or self.context.on_one_process:
            return line
        if len(line.body) != 1 or not isinstance(line.body[0], cst.Expr | cst.Assign):
            return line
        names = self.context.names
        if tells_tracker(original.body[0], self.graph):
            return _guard(line, names["IS_MAIN"])
        if isinstance(line.body[0], cst.Assign):
            return line
        magic = ipython_call(original.body[0].value) if isinstance(original.body[0], cst.Expr) else None
        if magic is not None:
            return _guard(line, f"{names['LOCAL_RANK']} == 0") if magic.command and not self.depth else line
        return self._guarded(original, line)

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> cst.BaseStatement:
        """Guard a nested `with open(..., "w")` that leaves nothing behind but its file."""
        if not self.nested or self.dead or self.context.on_one_process:
            return updated_node
        usage = collect(original_node)
        named = {code(item.asname.name) for item in original_node.items if item.asname is not None}
        loops = {name for part in original_node.body.body if isinstance(part, cst.For) for name in collect(part).writes}
        leaves = (usage.writes | usage.mutates) - named - loops
        jumps = contains(
            original_node, lambda part: isinstance(part, cst.Return | cst.Break | cst.Continue | cst.Yield)
        )
        return updated_node if leaves or jumps else self._guarded(original_node, updated_node)

    def _reaches_memory(self, node: cst.BaseStatement) -> bool:
        """Return whether a line writes into an object that the code made: a buffer, or a file opened outside the line."""
        given = {arg.value.value for s in collect(node).calls for arg in s.node.args if isinstance(arg.value, cst.Name)}
        return isinstance(node, cst.SimpleStatementLine) and bool(given & self.objects)

    def _guarded(self, original: cst.BaseStatement, made: _Nested) -> cst.BaseStatement:
        """Return a part of a block under the guard that its effects need, if any."""
        effects = self.graph.effects_of(collect(original))
        if not effects & self.guarded or effects & (TOGETHER | {Effect.STATE}):
            return made
        if self.trains and self.of_class and effects & self.guarded == {Effect.FILE} and not removes_files(original):
            return made  # a method may write what another reads on every process
        if not self.trains and (effects - _ON_ONE - {Effect.PRINT} or self._reaches_memory(original)):
            return made
        on_node = not self.trains and Effect.SAVE not in effects
        who = "one process on each node does this" if on_node else "only the main process does this"
        what = (
            "only the main process saves, inside a block that trains" if self.trains else f"{who}, inside what all run"
        )
        test = f"{self.context.names['LOCAL_RANK']} == 0" if on_node else self.context.names["IS_MAIN"]
        return lead(_guard(made, test), [self.context.edit("save", what)])


_Nested = cst.SimpleStatementLine | cst.With


def _guard(line: _Nested, test: str) -> cst.If:
    body = cst.IndentedBlock(body=[line.with_changes(leading_lines=[])])
    return cst.If(test=cst.parse_expression(test), body=body, leading_lines=line.leading_lines)


def _decides(node: cst.FunctionDef) -> bool:
    """Return whether a callback's method sets a flag of its control (`control.should_training_stop = True`)."""
    return node.name.value.startswith("on_") and contains(node.body, _sets_flag)


def _sets_flag(node: cst.CSTNode) -> bool:
    match node:
        case cst.AssignTarget(target=cst.Attribute(attr=cst.Name(value=name))):
            return name.startswith("should_")
    return False


# What stays on one process ---------------------------------------------------------------------------------------------

_GUARDED = {Effect.SAVE, Effect.FILE, Effect.PAID}
# What one process does of a statement that all run: the others wait for their turn, or do without.
_ON_ONE = {Effect.SAVE, Effect.FILE, Effect.SHELL}


def _guards_inside(statement: Statement, graph: Graph) -> tuple[set[Effect], bool]:
    """Return the effects to guard inside a statement that runs on every process, and whether it trains inside."""
    if statement.role not in (Role.ALL, Role.FIRST) or isinstance(statement.node, cst.SimpleStatementLine):
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
    own = graph.functions[name]
    if any(graph.full_path(site).startswith("tempfile.") for site in own.calls):
        return False
    trains = [s.usage for s in graph.statements if s.effects & TOGETHER]
    trains += [body for body in graph.functions.values() if graph.effects_of(body) & TOGETHER]
    if any(site.path == name and not site.bare for usage in trains for site in usage.calls):
        return True
    return any(
        body is own
        for statement in graph.statements
        if statement.role in (Role.ALL, Role.FIRST) and not statement.effects & TOGETHER
        if statement.needed or Effect.STATE in statement.effects
        for body in graph.bodies_run(statement.usage)
    )


def _own_objects(node: cst.CSTNode) -> set[str]:
    """Return the names that hold an object made by a class other than a path, or a file opened by a `with`."""
    assigned = collect(node).assigned if isinstance(node, cst.BaseStatement) else []
    made = {name for name, site in assigned if site.tail[:1].isupper() and site.tail != "Path"}
    items = [item for item in walk(node) if isinstance(item, cst.WithItem)]
    return made | {code(item.asname.name) for item in items if item.asname is not None}
