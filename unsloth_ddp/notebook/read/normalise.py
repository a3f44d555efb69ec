"""Replace line magics and the modules of notebook hosts by what a script has, before statements are classified."""

import re

import libcst as cst

from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.read import hosts
from unsloth_ddp.notebook.read.displayed import print_value
from unsloth_ddp.notebook.read.host_folders import change_folder, edit_chdir
from unsloth_ddp.notebook.syntax.arguments import code
from unsloth_ddp.notebook.syntax.commands import is_launcher_variable, variable_of
from unsloth_ddp.notebook.syntax.effects import ONCE, Effect, TrainerClasses, call_effects
from unsloth_ddp.notebook.syntax.ipython import SHELL_METHODS, as_python_string, ipython_call
from unsloth_ddp.notebook.syntax.lines import LineEditor, Small, is_empty, lead, parse_line
from unsloth_ddp.notebook.syntax.name_usage import collect
from unsloth_ddp.notebook.syntax.tree import dotted, full_path

_QUIET = {"matplotlib", "load_ext", "reload_ext", "unload_ext", "autoreload", "config", "pylab", "precision", "gui"}
_QUIET |= {"pinfo", "pinfo2", "psearch", "who", "whos", "ls", "ll", "pwd", "history", "timeit", "reset", "tensorboard"}
_QUIET |= {"xmode", "colors", "automagic", "page", "pdoc", "psource", "lsmagic", "magic", "load", "cat", "less", "more"}
_ALIASES = {"mkdir", "rmdir", "mv", "rm", "cp"}
# What looks for the running event loop, where a coroutine's call alone does not.
_MAKES_TASKS = re.compile(r"^asyncio\.(gather|create_task|ensure_future|as_completed|get_running_loop)$")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def normalise(
    body: list[cst.BaseStatement], context: ConversionContext
) -> tuple[list[cst.BaseStatement], list[cst.EmptyLine]]:
    """Return a cell's statements without line magics, and the comment lines left at its end."""
    statements: list[cst.BaseStatement] = []
    pending: list[cst.EmptyLine] = []
    parts = [part for number, whole in enumerate(body) for part in _parts(whole, number, context)]
    for statement in parts:
        editor = _Normaliser(context)
        new = statement.visit(editor)
        assert isinstance(new, cst.BaseStatement)
        new = lead(new, editor.outer)
        if statement is parts[-1]:
            new = print_value(new, context)
        if is_empty(new) and not is_empty(statement):
            pending += list(new.leading_lines)  # type: ignore[attr-defined]
            continue
        if pending:
            new = new.with_changes(leading_lines=[*pending, *new.leading_lines])  # type: ignore[attr-defined]
            pending = []
        statements.append(new)
    return statements, pending


class _Normaliser(LineEditor):
    def __init__(self, context: ConversionContext) -> None:
        super().__init__()
        self.context = context
        self.tries = 0
        self.shells: set[int] = set()  # calls of get_ipython() for a method that has a counterpart

    def visit_Try_body(self, node: cst.Try) -> None:
        self.tries += 1

    def leave_Try_body(self, node: cst.Try) -> None:
        self.tries -= 1

    def leave_Del(self, original_node: cst.Del, updated_node: cst.Del) -> Small:
        return self._without_launchers(updated_node.target, updated_node)

    def _without_launchers(self, node: cst.BaseExpression, statement: cst.BaseSmallStatement) -> Small:
        """Leave out what sets or removes a variable of the launcher."""
        name = variable_of(node)
        if name != _VISIBLE and not is_launcher_variable(name):
            return statement
        self.note(self.context.edit("environment", f"{code(statement)} left out: {name} is the launcher's to set"))
        return cst.RemoveFromParent()

    def leave_Expr(self, original_node: cst.Expr, updated_node: cst.Expr) -> Small:
        magic = ipython_call(updated_node.value)
        if magic is not None and magic.method == "run_line_magic" and not magic.command:
            name, line, *_ = (*magic.args, "", "")
            if magic.computed or name == "{}":
                return self._without_magic(name, line, "its text is known only when it runs, so write it in Python")
            return self._line_magic(name, line, updated_node)
        if isinstance(original_node.value, cst.Call) and hosts.is_dropped(original_node.value, self.context):
            self.note(hosts.note_dropped(original_node.value, self.context))
            return cst.RemoveFromParent()
        changed = edit_chdir(updated_node.value, self.context) if isinstance(updated_node.value, cst.Call) else None
        if changed is not None:
            call, note = changed
            self.note(note)
            return updated_node.with_changes(value=call) if call is not None else cst.RemoveFromParent()
        if isinstance(updated_node.value, cst.Call) and variable_of(updated_node.value):
            return self._without_launchers(updated_node.value, updated_node)
        name = updated_node.value.value if isinstance(updated_node.value, cst.Name) else ""
        if name in _QUIET and name not in self.context.bound:
            self.note(self.context.edit("magic", f"%{name} is for notebooks"))
            return cst.RemoveFromParent()
        return updated_node

    def _line_magic(self, name: str, line: str, node: cst.Expr) -> Small:
        context = self.context
        if name in ("env", "set_env"):
            return self._environment(line)
        if name == "cd":
            target = line.strip("\"' ")
            folder: str | None = f"os.path.expanduser({as_python_string(target, context.bound)})"
            changed = change_folder(target, f"%cd {line}", lambda rest: as_python_string(rest, context.bound), context)
            folder, note = changed or (folder, context.edit("magic", f"%cd {line}"))
            self.note(note)
            return parse_line(f"os.chdir({folder})").body[0] if folder is not None else cst.RemoveFromParent()
        if name in ("time", "prun", "memit", "mprun", "lprun") and line:
            self.note(context.edit("magic", f"%{name} left out, what it measured stays"))
            parsed = cst.parse_module(line + "\n").body[0]
            if isinstance(parsed, cst.SimpleStatementLine):
                return cst.FlattenSentinel([s.with_changes(semicolon=node.semicolon) for s in parsed.body])
        if name == "run":
            target = as_python_string(line.split()[0] if line.split() else "", context.bound)
            self.note(context.warn("magic", f"%run {line} runs on every process and is not converted"))
            return parse_line(f"globals().update(__import__('runpy').run_path({target}, init_globals=globals()))").body[
                0
            ]
        if name in _ALIASES:
            return cst.Expr(cst.parse_expression(f"get_ipython().system({name + ' ' + line!r})"))
        return self._without_magic(name, line, "a script has nothing like it")

    def _without_magic(self, name: str, line: str, why: str) -> Small:
        missing = f"%{name} {line} left out: {why}".replace("  ", " ")
        quiet = f"%{name} is for notebooks"
        self.note(self.context.edit("magic", quiet) if name in _QUIET else self.context.warn("magic", missing))
        return cst.RemoveFromParent()

    def _environment(self, line: str) -> Small:
        """Replace `%env NAME = 1 # note`: IPython takes everything after the = as the value, the note too."""
        context = self.context
        name, separator, value = line.partition("=" if "=" in line else " ")
        name, value = name.strip(), value.strip()
        if not separator or not re.fullmatch(r"\w+", name):
            self.note(context.edit("magic", f"%env {line}".rstrip() + " only shows a variable"))
            return cst.RemoveFromParent()
        if name == _VISIBLE or is_launcher_variable(name):
            self.note(self._visible(name, value))
            return cst.RemoveFromParent()
        comment = " (IPython makes the comment part of the value)" if "#" in value else ""
        self.note(context.edit("environment", f"%env {name}{comment}"))
        return parse_line(f'os.environ["{name}"] = {as_python_string(value, context.bound)}').body[0]

    def _visible(self, name: str, value: str) -> str:
        why = "would put every process on the same GPU" if name == _VISIBLE else "is the launcher's to set"
        return self.context.edit("environment", f"{name}={value} left out: it {why}")

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> Small:
        target = updated_node.targets[0].target
        if isinstance(target, cst.Subscript) and dotted(target.value).endswith("environ"):
            key = code(target.slice[0].slice).strip("\"'")
            if key == _VISIBLE or is_launcher_variable(key):
                self.note(self._visible(key, code(updated_node.value)))
                return cst.RemoveFromParent()
            if hosts.is_secret(updated_node.value, self.context):
                return updated_node.with_changes(value=cst.parse_expression(f'{code(updated_node.value)} or ""'))
        if isinstance(target, cst.Name):
            secret = hosts.is_secret(updated_node.value, self.context)
            (self.context.secrets.add if secret else self.context.secrets.discard)(target.value)
            root = dotted(original_node.value.func).split(".")[0] if isinstance(original_node.value, cst.Call) else ""
            if self.context.imports.get(root, "").startswith("kaggle_secrets."):
                self.note(self.context.edit("host", "secrets come from the environment"))
                return cst.RemoveFromParent()
        if self._is_left_out(original_node.value, updated_node.value):
            name = code(original_node.value).partition("(")[0]
            self.note(self.context.warn("host", f"{name} exists only on the host, so its value is None here"))
            return updated_node.with_changes(value=cst.Name("None"))
        call = ipython_call(updated_node.value)
        if call is not None and call.method == "run_line_magic" and not call.command:
            self.note(self.context.warn("magic", f"%{call.args[0]} has no value in a script"))
            return updated_node.with_changes(value=cst.Name("None"))
        return updated_node

    def _is_left_out(self, original: cst.BaseExpression, updated: cst.BaseExpression) -> bool:
        """Return whether a value is a call that only the host has, and that nothing replaces."""
        if not isinstance(original, cst.Call) or not isinstance(updated, cst.Call):
            return False
        return hosts.is_dropped(original, self.context) and code(original.func) == code(updated.func)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        if self._is_shell(node.value) and node.attr.value in SHELL_METHODS:
            self.shells.add(id(node.value))

    def visit_Expr(self, node: cst.Expr) -> bool:
        # A statement of the host is left out whole: its value is not replaced first.
        return not isinstance(node.value, cst.Call) or not hosts.is_dropped(node.value, self.context)

    def _is_shell(self, node: cst.BaseExpression) -> bool:
        """Return whether an expression is `get_ipython()`, by whatever name it was imported."""
        if not isinstance(node, cst.Call) or node.args:
            return False
        return full_path(dotted(node.func), self.context.imports).split(".")[-1] == "get_ipython"

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        if self._is_shell(updated_node):
            has_counterpart = id(original_node) in self.shells
            return updated_node.with_changes(func=cst.Name("get_ipython")) if has_counterpart else cst.Name("None")
        direct, notes = hosts.call_directly(updated_node, self.context)
        if notes:
            self.note(*notes)
            return direct
        value, notes = hosts.edit_value(updated_node, self.context)
        self.note(*notes)
        return updated_node if value is None else value

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        name = updated_node.attr.value
        if self._is_shell(original_node.value) and name not in SHELL_METHODS and not name.startswith("__"):
            return cst.Name("None")
        return self.leave_Subscript(original_node, updated_node)  # type: ignore[arg-type]

    def leave_Subscript(self, original_node: cst.Subscript, updated_node: cst.Subscript) -> cst.BaseExpression:
        """Return an item or a method of a name for `os.environ` by its own name, by which the later steps know it."""
        if isinstance(updated_node.value, cst.Name) and updated_node.value.value in self.context.environ_names:
            return updated_node.with_changes(value=cst.parse_expression("os.environ"))
        return updated_node

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> Small:
        """Leave out an import of a host's module; in a `try` it stays, where it asks which host this is."""
        node: cst.Import | cst.ImportFrom = updated_node
        rest = hosts.without_host_names(node)
        if rest is node or self.tries:
            return node
        still = hosts.imported_names(rest) if rest is not None else set()
        self.context.host_names |= hosts.imported_names(node) - still - {"get_ipython"}
        self.note(self.context.edit("host", f"{code(node)}: only the notebook's host has it"))
        return rest if rest is not None else cst.RemoveFromParent()

    leave_ImportFrom = leave_Import  # type: ignore[assignment]


def _parts(whole: cst.BaseStatement, number: int, context: ConversionContext) -> list[cst.BaseStatement]:
    """Return the statements that one of the notebook's becomes, each on lines of its own."""
    inside = whole.visit(_OneALine(context))
    assert isinstance(inside, cst.BaseStatement)
    split = _split(inside, context, set(Effect) - {Effect.LOAD})
    return [part for line in split for part in _as_coroutine(line, f"cell_{context.cell}_part_{number + 1}", context)]


def _may_need_a_guard(statement: cst.CSTNode, context: ConversionContext, guarded: set[Effect]) -> bool:
    sites = ((site, full_path(site.path, context.imports)) for site in collect(statement).calls)
    return any(call_effects(site, full, set(), TrainerClasses()) & guarded for site, full in sites)


class _OneALine(cst.CSTTransformer):
    """Write `a; b` and `if x: a` of a block on several lines where one may belong on the main process only."""

    def __init__(self, context: ConversionContext) -> None:
        self.context = context
        self.blocks = 0

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.blocks += 1

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        self.blocks -= 1
        return updated_node

    visit_IndentedBlock = visit_FunctionDef  # type: ignore[assignment]

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        self.blocks -= 1
        parts = [_split(statement, self.context, ONCE) for statement in updated_node.body]
        return updated_node.with_changes(body=[line for lines in parts for line in lines])

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> cst.BaseSuite:
        if not self.blocks or not _may_need_a_guard(original_node, self.context, ONCE):
            return updated_node
        line = cst.SimpleStatementLine(updated_node.body, trailing_whitespace=updated_node.trailing_whitespace)
        return cst.IndentedBlock(_split(line, self.context, ONCE))


def _split(statement: cst.BaseStatement, context: ConversionContext, guarded: set[Effect]) -> list[cst.BaseStatement]:
    """Split `a; b` into two lines where one of them has one of these effects."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) < 2:
        return [statement]
    if not _may_need_a_guard(statement, context, guarded):
        return [statement]
    parts = [small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for small in statement.body]
    lines: list[cst.BaseStatement] = [cst.SimpleStatementLine(body=[part]) for part in parts]
    lines[0] = lines[0].with_changes(leading_lines=statement.leading_lines)
    lines[-1] = lines[-1].with_changes(trailing_whitespace=statement.trailing_whitespace)
    return lines


def _as_coroutine(statement: cst.BaseStatement, name: str, context: ConversionContext) -> list[cst.BaseStatement]:
    """Return a top-level statement that needs a running event loop as a coroutine and its `await`.

    Other statements are returned as they are: `await` in them becomes a call.
    """
    if not _is_asynchronous(statement, context):
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


def _is_asynchronous(node: cst.CSTNode, context: ConversionContext) -> bool:
    """Return whether a node holds an asynchronous block or comprehension, or makes a task, outside functions."""
    if isinstance(node, cst.FunctionDef | cst.Lambda):
        return False
    if isinstance(node, cst.Call) and _MAKES_TASKS.match(full_path(dotted(node.func), context.imports)):
        return True
    if isinstance(node, cst.For | cst.With | cst.CompFor) and node.asynchronous is not None:
        return True
    return any(_is_asynchronous(part, context) for part in node.children)
