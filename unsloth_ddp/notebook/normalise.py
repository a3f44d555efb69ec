"""Replace line magics and the modules of notebook hosts by what a script has, before statements are classified."""

from __future__ import annotations

import re

import libcst as cst

from unsloth_ddp.notebook.arguments import code
from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.effects import Effect, call_effects
from unsloth_ddp.notebook.ipython import as_python_string, ipython_call
from unsloth_ddp.notebook.lines import LineEditor, is_empty, lead
from unsloth_ddp.notebook.name_usage import collect
from unsloth_ddp.notebook.syntax import dotted

_QUIET = {"matplotlib", "load_ext", "reload_ext", "unload_ext", "autoreload", "config", "pylab", "precision", "gui"}
_QUIET |= {"pinfo", "pinfo2", "psearch", "who", "whos", "ls", "ll", "pwd", "history", "timeit", "reset", "tensorboard"}
_QUIET |= {"xmode", "colors", "automagic", "page", "pdoc", "psource", "lsmagic", "magic", "load", "cat", "less", "more"}
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def normalise(
    body: list[cst.BaseStatement], context: ConversionContext
) -> tuple[list[cst.BaseStatement], list[cst.EmptyLine]]:
    """Return a cell's statements without line magics, and the comment lines left at its end."""
    kept: list[cst.BaseStatement] = []
    pending: list[cst.EmptyLine] = []
    for statement in (part for whole in body for part in _split(whole, context)):
        editor = _Normaliser(context)
        new = statement.visit(editor)
        assert isinstance(new, cst.BaseStatement)
        new = lead(new, editor.outer)
        if is_empty(new) and not is_empty(statement):
            pending += list(new.leading_lines)  # type: ignore[attr-defined]
            continue
        if pending:
            new = new.with_changes(leading_lines=[*pending, *new.leading_lines])  # type: ignore[attr-defined]
            pending = []
        kept.append(new)
    return kept, pending


class _Normaliser(LineEditor):
    def __init__(self, context: ConversionContext) -> None:
        super().__init__()
        self.context = context

    def leave_Expr(
        self, original_node: cst.Expr, updated_node: cst.Expr
    ) -> cst.BaseSmallStatement | cst.RemovalSentinel | cst.FlattenSentinel[cst.BaseSmallStatement]:
        call = ipython_call(updated_node.value)
        if call is not None and call.method == "run_line_magic" and not call.command:
            return self._line_magic(call.args[0], call.args[1], updated_node)
        if isinstance(updated_node.value, cst.Call) and self._is_drive(dotted(updated_node.value.func)):
            self.note(
                self.context.warn("colab", "Google Drive is not mounted here; paths under /content/drive must be yours")
            )
            return cst.RemoveFromParent()
        return updated_node

    def _is_drive(self, path: str) -> bool:
        return self.context.imports.get(path.split(".")[0], "") == "google.colab.drive" and path.endswith(".mount")

    def _line_magic(
        self, name: str, line: str, node: cst.Expr
    ) -> cst.BaseSmallStatement | cst.RemovalSentinel | cst.FlattenSentinel[cst.BaseSmallStatement]:
        context = self.context
        if name in ("env", "set_env"):
            return self._environment(line)
        if name == "cd":
            target = as_python_string(line.strip("\"' "), context.bound)
            self.note(context.edit("magic", f"%cd {line}"))
            return _small(f"os.chdir(os.path.expanduser({target}))")
        if name in ("time", "prun", "memit", "mprun", "lprun") and line:
            self.note(context.edit("magic", f"%{name} left out, what it measured stays"))
            parsed = cst.parse_module(line + "\n").body[0]
            if isinstance(parsed, cst.SimpleStatementLine):
                return cst.FlattenSentinel([s.with_changes(semicolon=node.semicolon) for s in parsed.body])
        if name == "run":
            target = as_python_string(line.split()[0] if line.split() else "", context.bound)
            self.note(context.warn("magic", f"%run {line} runs on every process and is not converted"))
            return _small(f"globals().update(__import__('runpy').run_path({target}, init_globals=globals()))")
        if name in _QUIET:
            self.note(context.edit("magic", f"%{name} is for notebooks"))
        else:
            self.note(
                context.warn("magic", f"%{name} {line} left out: a script has nothing like it".replace("  ", " "))
            )
        return cst.RemoveFromParent()

    def _environment(self, line: str) -> cst.BaseSmallStatement | cst.RemovalSentinel:
        """Replace `%env NAME = 1 # note`: IPython takes everything after the = as the value, the note too."""
        context = self.context
        name, separator, value = line.partition("=" if "=" in line else " ")
        name, value = name.strip(), value.strip()
        if not separator or not re.fullmatch(r"\w+", name):
            self.note(context.edit("magic", f"%env {line}".rstrip() + " only shows a variable"))
            return cst.RemoveFromParent()
        if name == _VISIBLE:
            self.note(self._visible(value))
            return cst.RemoveFromParent()
        comment = " (IPython makes the comment part of the value)" if "#" in value else ""
        self.note(context.edit("environment", f"%env {name}{comment}"))
        return _small(f'os.environ["{name}"] = {as_python_string(value, context.bound)}')

    def _visible(self, value: str) -> str:
        return self.context.edit(
            "environment", f"{_VISIBLE}={value} left out: it would put every process on the same GPU"
        )

    def leave_Assign(
        self, original_node: cst.Assign, updated_node: cst.Assign
    ) -> cst.BaseSmallStatement | cst.RemovalSentinel:
        target = updated_node.targets[0].target
        if isinstance(target, cst.Subscript) and dotted(target.value).endswith("environ"):
            key = code(target.slice[0].slice)
            if key.strip("\"'") == _VISIBLE:
                self.note(self._visible(code(updated_node.value)))
                return cst.RemoveFromParent()
        call = ipython_call(updated_node.value)
        if call is not None and call.method == "run_line_magic" and not call.command:
            self.note(self.context.warn("magic", f"%{call.args[0]} has no value in a script"))
            return updated_node.with_changes(value=cst.Name("None"))
        return updated_node

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        path = dotted(updated_node.func)
        module = self.context.imports.get(path.split(".")[0], "")
        if module == "google.colab.userdata" and path.endswith(".get") and updated_node.args:
            name = code(updated_node.args[0].value)
            self.note(self.context.edit("colab", f"Colab's secret {name} comes from the environment"))
            return cst.parse_expression(f"os.environ.get({name})")
        return updated_node

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.BaseSmallStatement | cst.RemovalSentinel:
        if updated_node.module is None or dotted(updated_node.module) != "google.colab":
            return updated_node
        if isinstance(updated_node.names, cst.ImportStar):
            return updated_node
        kept = [alias for alias in updated_node.names if alias.name.value not in ("userdata", "drive")]
        if len(kept) == len(updated_node.names):
            return updated_node
        self.note(self.context.edit("colab", "google.colab exists only on Colab"))
        if not kept:
            return cst.RemoveFromParent()
        return updated_node.with_changes(names=[*kept[:-1], kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)])


def _split(statement: cst.BaseStatement, context: ConversionContext) -> list[cst.BaseStatement]:
    """Split `a; b` into two lines where one of them may belong on the main process only."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) < 2:
        return [statement]
    sites = collect(statement).calls
    paths = [".".join([context.imports.get(s.root, s.root), *s.path.split(".")[1:]]) for s in sites]
    if not any(call_effects(s, p, set(), set()) - {Effect.LOAD} for s, p in zip(sites, paths, strict=True)):
        return [statement]
    parts = [small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT) for small in statement.body]
    lines: list[cst.BaseStatement] = [cst.SimpleStatementLine(body=[part]) for part in parts]
    lines[0] = lines[0].with_changes(leading_lines=statement.leading_lines)
    lines[-1] = lines[-1].with_changes(trailing_whitespace=statement.trailing_whitespace)
    return lines


def _small(source: str) -> cst.BaseSmallStatement:
    line = cst.parse_statement(source)
    assert isinstance(line, cst.SimpleStatementLine)
    return line.body[0]
