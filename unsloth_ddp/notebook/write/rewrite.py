"""Apply every edit of code to one statement."""

from __future__ import annotations

import re
from collections.abc import Callable

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import Graph, Statement
from unsloth_ddp.notebook.analyse.main_values import send_values
from unsloth_ddp.notebook.analyse.tracked_runs import edit_run
from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import code
from unsloth_ddp.notebook.syntax.effects import Effect, is_remote, is_trainer_call
from unsloth_ddp.notebook.syntax.ipython import (
    IPythonCall,
    as_python_string,
    command_of,
    ipython_call,
    without_installs,
)
from unsloth_ddp.notebook.syntax.lines import Small, comment_line, lead
from unsloth_ddp.notebook.syntax.name_usage import collect
from unsloth_ddp.notebook.syntax.tree import contains, dotted, full_path
from unsloth_ddp.notebook.syntax.usage import CallSite
from unsloth_ddp.notebook.write import load
from unsloth_ddp.notebook.write.calls import edit_command, edit_generator, edit_login, edit_seed
from unsloth_ddp.notebook.write.config import edit_config, edit_trainer, is_config_call
from unsloth_ddp.notebook.write.guards import BlockGuards, elsewhere, guards_inside
from unsloth_ddp.notebook.write.loops import edit_accelerated

_Edit = Callable[[cst.Call, str, ConversionContext], tuple[cst.BaseExpression, list[str]]]
_NOT_TWICE = "the script shares the batch among the processes, so the notebook's own division is left out"


def rewrite(statement: Statement, graph: Graph, context: ConversionContext) -> cst.BaseStatement:
    """Return the statement's syntax tree with its edits, and comments above the changed lines."""
    node = send_values(statement, graph, context)
    guarded, trains = guards_inside(statement, graph)
    context.on_one_process = statement.apart
    editor = _Rewriter(context, graph, guarded, trains, node)
    new = node.visit(editor)
    assert isinstance(new, cst.BaseStatement)
    return lead(new, editor.outer)


class _Rewriter(BlockGuards):
    def __init__(
        self, context: ConversionContext, graph: Graph, guarded: set[Effect], trains: bool, original: cst.CSTNode
    ) -> None:
        super().__init__(context, graph, guarded, trains, original)
        self.formatted = 0
        self.callbacks: list[bool] = []

    # Calls -----------------------------------------------------------------------------------------------------------

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        context = self.context
        magic = ipython_call(updated_node)
        if magic is not None:
            return self._ipython(magic, updated_node)
        edit = edit_config if is_config_call(updated_node, context) else self._edited
        call, notes = edit(updated_node, context)
        self.note(*notes)
        if not isinstance(call, cst.Call):
            return call
        shared = not context.on_one_process and not self.formatted
        if shared and full_path(dotted(call.func), self.graph.imports) in load.DEVICE_COUNTS:
            self.note(context.edit("device", "each process has one GPU"))
            return cst.parse_expression(f"min(1, {code(call)})")  # none on a machine without
        if code(call.func) in ("input", "getpass", "getpass.getpass"):
            return self._ask(call)
        return call

    def _edited(self, call: cst.Call, context: ConversionContext) -> tuple[cst.BaseExpression, list[str]]:
        """Return a call with the first edit that fits it, and its comments."""
        full = full_path(dotted(call.func), self.graph.imports)
        edits: list[_Edit] = [load.edit_load, load.edit_data_parallel, load.edit_dict_call, load.edit_device_number]
        site = CallSite(dotted(call.func), call, frozenset())
        edits += [edit_generator] if self.graph.defines_callee(site) else [edit_seed, edit_generator]
        if is_trainer_call(site, self.graph.trainer_classes) or self.graph.hands_arguments_on(site):
            edits += [] if is_remote(full) else [edit_trainer]
        else:
            edits += [edit_accelerated] if context.accelerated else []
            edits += [edit_run, edit_command, edit_login]
        edited = (edit(call, full, context) for edit in edits)
        return next((result for result in edited if result[1]), (call, []))

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> Small:
        """Let one process on each node open a file to write to: opened again, it would be emptied under the first."""
        opening, line = updated_node.value, cst.SimpleStatementLine(body=[cst.Expr(original_node.value)])
        if (
            not isinstance(opening, cst.Call)
            or code(opening.func) != "open"
            or self.nested
            or self.context.on_one_process
        ):
            return updated_node
        if Effect.FILE not in self.graph.effects_of(collect(line)):
            return updated_node
        self.note(self.context.edit("save", "one process on each node writes this file"))
        return updated_node.with_changes(value=elsewhere(opening, f"{self.context.names['LOCAL_RANK']} == 0"))

    def leave_DictElement(self, original_node: cst.DictElement, updated_node: cst.DictElement) -> cst.DictElement:
        element, notes = load.edit_dict_element(updated_node, self.context)
        self.note(*notes)
        return element

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.callbacks.append(any(dotted(base.value).endswith("Callback") for base in node.bases))

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.BaseStatement:
        self.callbacks.pop()
        return updated_node

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.BaseStatement:
        updated_node = super().leave_FunctionDef(original_node, updated_node)  # type: ignore[assignment]
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
        arguments = (
            re.sub(r"^(-s|--no-raise-error)\b\s*", "", magic.args[1]) if is_body and magic.args[0] != "script" else ""
        )
        if arguments:
            text += f", {as_python_string(arguments, context.bound)}"
        if magic.method in ("getoutput", "sx"):
            self.note(context.edit("shell", "what `!` gave back as lines"))
            return cst.parse_expression(f"{context.names['shell_output']}({text})")
        self.note(context.edit("shell", "a shell command of the notebook"))
        return cst.parse_expression(f"{context.names['run_shell']}({text})")

    def leave_Expr(self, original_node: cst.Expr, updated_node: cst.Expr) -> Small:
        command = command_of(original_node.value)
        rest, requirements = without_installs(command)
        if command and not rest:
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
        """Return whether the notebook divides a batch by the number of processes, as this script does."""
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


def _decides(node: cst.FunctionDef) -> bool:
    """Return whether a callback's method sets a flag of its control (`control.should_training_stop = True`)."""
    return node.name.value.startswith("on_") and contains(node.body, _sets_flag)


def _sets_flag(node: cst.CSTNode) -> bool:
    match node:
        case cst.AssignTarget(target=cst.Attribute(attr=cst.Name(value=name))):
            return name.startswith("should_")
    return False
