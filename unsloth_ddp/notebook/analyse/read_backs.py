"""Keep what reads a path back where that path was written, or write it where it is read back."""

import re
from collections.abc import Iterator, Sequence

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import Graph, Role, Statement
from unsloth_ddp.notebook.syntax.arguments import code, keyword
from unsloth_ddp.notebook.syntax.effects import Effect, is_trainer_call
from unsloth_ddp.notebook.syntax.tree import assignment, dotted

# Transformers' own saving asks which process may save: on a second node, none.
_ONE_PROCESS_SAVES = ("save_model", "save_state", "save_checkpoint")


def keep_read_backs(graph: Graph, last: int) -> None:
    """Decide where statements run that read what only some processes saved.

    After the training they stay with what saved. Where training needs them, one process a node saves; where only one
    process of the job can save, the reader is marked, for a warning.
    """
    paths = _Paths(graph)
    saved: dict[str, list[Statement]] = {}
    for index, statement in enumerate(graph.statements):
        together = {Effect.SYNC, Effect.SAVE} <= statement.effects  # a trainer's save: one process of the job does it
        if together or (statement.apart and statement.effects & {Effect.SAVE, Effect.FILE}):
            for path in paths.saved_by(statement):
                if re.fullmatch(r"[\w./~-]+", path):
                    saved.setdefault(path, []).append(statement)
        elif statement.everywhere and saved:
            read = [path.rstrip("/") + "/" for path in paths.read_by(statement)]
            folders = [folder for folder in saved if any(path.startswith(folder.rstrip("/") + "/") for path in read)]
            writers = [writer for folder in folders for writer in saved[folder]]
            if writers and statement.usage.calls and not statement.usage.defines:
                _settle(statement, writers, index < last)
        paths.learn(statement)


def _settle(reader: Statement, writers: list[Statement], trains_later: bool) -> None:
    if not reader.needed and not (trains_later and Effect.LOAD in reader.effects):
        on_one = not trains_later or any(writer.role is not Role.NODE for writer in writers)
        reader.role = Role.MAIN if on_one else Role.NODE
        return
    reader.writers += writers
    for writer in writers:
        if writer.role is Role.MAIN and _can_save_on_each_node(writer):
            writer.role = Role.NODE


def _can_save_on_each_node(statement: Statement) -> bool:
    calls = [site.tail for site in statement.usage.calls if "tokenizer" not in site.root.lower()]
    only_saves = statement.effects <= {Effect.SAVE, Effect.FILE, Effect.PRINT, Effect.SHOW}
    return only_saves and not any(tail in _ONE_PROCESS_SAVES or "push" in tail for tail in calls)


class _Paths:
    """The texts that names hold, as far as they are written out in the notebook."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.texts: dict[str, str] = {}  # by dotted name: "folder", "args.output_dir"

    def learn(self, statement: Statement) -> None:
        """Take over what a statement assigns."""
        for name in statement.usage.writes:
            self.texts = {key: text for key, text in self.texts.items() if key.split(".")[0] != name}
        self._learn_line(statement.node)

    def _learn_line(self, line: cst.BaseStatement) -> None:
        match assignment(line):
            case cst.Name(name), value:
                self._assign(name, value)

    def _assign(self, name: str, value: cst.BaseExpression) -> None:
        text = self.text(value)
        if text is not None:
            self.texts[name] = text
        if not isinstance(value, cst.Call):
            return
        folder = keyword(value, "output_dir")
        if folder is not None and (text := self.text(folder.value)) is not None:
            self.texts[f"{name}.output_dir"] = text
        arguments = keyword(value, "args")
        if arguments is not None:
            self._assign(f"{name}.args", arguments.value)
            if (text := self.texts.get(f"{code(arguments.value)}.output_dir")) is not None:
                self.texts[f"{name}.args.output_dir"] = text

    def text(self, node: cst.CSTNode) -> str | None:
        """Return the text that an expression makes, or None."""
        match node:
            case cst.SimpleString():
                value = node.evaluated_value
                return value if isinstance(value, str) else None
            case cst.Name() | cst.Attribute():
                return self.texts.get(dotted(node))
            case cst.FormattedString(parts=parts):
                return self._joined("", parts)
            case cst.FormattedStringText(value=value):
                return str(value)
            case cst.FormattedStringExpression(expression=expression, format_spec=None):
                return self.text(expression)
            case cst.BinaryOperation(left=left, operator=cst.Add(), right=right):
                return self._joined("", [left, right])
            case cst.BinaryOperation(left=left, operator=cst.Divide(), right=right):
                return self._joined("/", [left, right])
            case cst.Call(func=function, args=args):
                if dotted(function).split(".")[-1] in ("join", "Path", "str") and args:
                    return self._joined("/", [arg.value for arg in args])
        return None

    def _joined(self, between: str, parts: Sequence[cst.CSTNode]) -> str | None:
        texts = [self.text(part) for part in parts]
        return None if None in texts else between.join(text for text in texts if text is not None)

    def saved_by(self, statement: Statement) -> Iterator[str]:
        """Return the texts that a statement's calls get, and the folder of a trainer that saves without being told."""
        yield from self.read_by(statement)
        for site in statement.usage.calls:
            if site.tail in _ONE_PROCESS_SAVES and not site.node.args:
                folder = self.texts.get(f"{site.path.rsplit('.', 1)[0]}.args.output_dir")
                if folder is not None:
                    yield folder

    def read_by(self, statement: Statement) -> Iterator[str]:
        """Return the texts that a statement's calls get; a trainer's arguments say where to write, not what to read."""
        inside = _Paths(self.graph)
        inside.texts = dict(self.texts)
        inside._learn_line(statement.node)
        for site in statement.usage.calls:
            if is_trainer_call(site, self.graph.trainer_classes):
                continue
            for arg in site.node.args:
                named = arg.keyword is not None and arg.keyword.value in ("output_dir", "logging_dir", "save_dir")
                text = None if named else inside.text(arg.value)
                if text:
                    yield text
