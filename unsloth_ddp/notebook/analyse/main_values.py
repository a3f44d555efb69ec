"""Find values that only the main process has, or that differ by process, and send the main process's to all.

The first are those of a tracked run (`wandb.config.lr`, `run.name`); the second come from the clock, random names
and process numbers.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import TOGETHER, Graph, Role, Statement
from unsloth_ddp.notebook.analyse.plain import gives_plain_values
from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import splats
from unsloth_ddp.notebook.syntax.effects import Effect, differs_by_process, starts_run
from unsloth_ddp.notebook.syntax.lines import LineEditor, lead
from unsloth_ddp.notebook.syntax.name_usage import collect
from unsloth_ddp.notebook.syntax.tree import BUILTINS, NamesRead, assignment, dotted, full_path, walk
from unsloth_ddp.notebook.syntax.usage import CallSite, NameUsage

_GUARDED = {Effect.SAVE, Effect.FILE, Effect.PAID, Effect.SHELL}
# Taken as a whole where a part of them is the main process's: what they ask may not exist elsewhere.
_WHOLE = cst.IfExp | cst.BooleanOperation | cst.Comparison | cst.UnaryOperation
_VIEWS = (["items", "()"], ["keys", "()"], ["values", "()"])


def can_be_disabled(call: cst.Call, full: str) -> bool:
    """Return whether a run takes an argument that switches it off: `mode` of W&B."""
    return full == "wandb.init" and not splats(call)


def tells_tracker(small: cst.BaseSmallStatement, graph: Graph) -> bool:
    """Return whether a line only tells a tracker something: it does nothing else, and what it gives is not taken."""
    match small:
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Attribute() | cst.Subscript() as target)]):
            base, steps = chain(target)
            root = base.value if isinstance(base, cst.Name) else "?"
            path = full_path(".".join([root, *(step for step in steps if step != "[]")]), graph.imports)
            return path.startswith(("wandb.run.", "wandb.summary", "wandb.config")) or root in graph.run_names
        case cst.Expr():
            usage = collect(cst.SimpleStatementLine(body=[small]))
            tells = [site for site in usage.calls if _tells(site, graph)]
            return bool(tells) and not graph.effects_of(usage) - {Effect.TRACK, Effect.FILE, Effect.SAVE, Effect.RANDOM}
    return False


def _tells(site: CallSite, graph: Graph) -> bool:
    full = graph.full_path(site)
    on_run = site.is_method and site.root in graph.run_names
    return (on_run or Effect.TRACK in graph.effects_of(NameUsage(calls=[site]))) and not can_be_disabled(
        site.node, full
    )


# Trackers: roles -----------------------------------------------------------------------------------------------------


def keep_trackers(graph: Graph) -> None:
    """Keep statements that hold or change a tracked run on the main process."""
    runs: set[str] = set()
    configs: set[str] = set()
    for statement in graph.statements:
        if statement.role in (Role.DEAD, Role.DROP):
            continue
        statement.runs, statement.configs = frozenset(runs), frozenset(configs)
        if not statement.conditional:
            runs -= statement.usage.writes
            configs -= statement.usage.writes
        statement.handles |= runs | configs
        if statement.effects & TOGETHER:
            continue
        started = {name for name, site in statement.usage.assigned if starts_run(graph.full_path(site))}
        if statement.role is Role.MAIN:
            runs |= started
            statement.handles |= started
        values = MainValues(graph, statement)
        name, kind = values.alias()
        if kind:
            (runs if kind == "run" else configs).add(name)
            statement.handles |= {name}
            statement.role = Role.MAIN
        elif values.changes_tracker():
            statement.role = Role.MAIN


# Which expressions ---------------------------------------------------------------------------------------------------


class MainValues:
    """Finds the main process's values in one statement."""

    def __init__(self, graph: Graph, statement: Statement, timed: frozenset[str] | None = None) -> None:
        """Prepare the search. `timed` holds names of clock readings used for durations only; None ignores clocks."""
        self.graph, self.statement, self.timed = graph, statement, timed
        blocks = cst.BaseComp if statement.effects & {Effect.TRAIN, Effect.TRAINER} else cst.BaseComp | cst.For
        # Calls made once per row: they name rows, not folders, and sending each would take long.
        parts = (part for part in walk(statement.node) if isinstance(part, blocks)) if timed is not None else ()
        rows = [part.body if isinstance(part, cst.For) else part for part in parts]
        self.repeated = {id(call) for part in rows for call in walk(part) if isinstance(call, cst.Call)}

    def tracked(self, node: cst.CSTNode) -> tuple[str, list[str]]:
        """Return what of a tracker an expression is ("run", "config", "value", or ""), and its last steps."""
        root, steps = chain(node)
        if not isinstance(root, cst.Name):
            return "", []
        kind = "run" if root.value in self.statement.runs else "config" if root.value in self.statement.configs else ""
        path = [*self.graph.imports.get(root.value, "").split("."), *steps]
        if not kind and path[:3] == ["wandb", "use_artifact", "()"]:
            kind, steps = "run", path[3:]
        if not kind and path[0] == "wandb" and path[1:2] in (["run"], ["config"], ["summary"]):
            kind, steps = ("run" if path[1] == "run" else "config"), path[2:]
        if kind == "run" and steps[:2] == ["use_artifact", "()"]:  # a handle, as the run is
            steps = steps[2:]
        if kind == "run" and steps[:1] == ["config"]:
            kind, steps = "config", steps[1:]
        return ("value" if kind and steps else kind), steps

    def is_fresh(self, node: cst.CSTNode) -> bool:
        """Return whether a value starts with a call that returns another value on every process."""
        while self.timed is not None and isinstance(node, cst.Attribute | cst.Subscript | cst.Call):
            if isinstance(node, cst.Call):
                if id(node) not in self.repeated and self._differs(CallSite(dotted(node.func), node, frozenset())):
                    return True
                node = node.func
                if not isinstance(node, cst.Attribute):
                    return False
            node = node.value
        return False

    def _differs(self, site: CallSite) -> bool:
        body = self.graph.functions.get(site.path)
        if body is None:
            return site.root in self.graph.imports and bool(differs_by_process(self.graph.full_path(site)))
        if body.is_class or body.writes:
            return False
        paths = [(inner, self.graph.full_path(inner)) for inner in body.calls]
        libraries = sys.stdlib_module_names | BUILTINS | {"?"}
        plain = all(
            path.split(".")[0] in libraries or (inner.is_method and inner.root not in body.reads)
            for inner, path in paths
        )
        return plain and any(differs_by_process(path) for _, path in paths)

    def is_sent(self, node: cst.CSTNode) -> bool:
        """Return whether an expression is one that the main process evaluates and sends."""
        if isinstance(node, _WHOLE) and self.reads_tracker(node):
            return self._may_run_once(node)
        if isinstance(node, cst.FormattedString | cst.ConcatenatedString) and self._any(node, self._is_part):
            return self._may_run_once(node)
        return isinstance(node, cst.BaseExpression) and self._is_part(node) and self._may_run_once(node)

    def is_paid(self, node: cst.CSTNode) -> bool:
        """Return whether a plain value is paid for: every process would pay."""
        if not isinstance(node, cst.Call | cst.BaseComp) or not self.statement.needed:
            return False
        usage = collect(cst.SimpleStatementLine(body=[cst.Expr(node)]))
        return Effect.PAID in self.graph.effects_of(usage) and gives_plain_values(self.graph, self.statement, usage)

    def _is_part(self, node: cst.CSTNode) -> bool:
        return self.tracked(node)[0] in ("value", "config") or self.is_fresh(node) or self.is_paid(node)

    def _may_run_once(self, node: cst.BaseExpression) -> bool:
        line = cst.SimpleStatementLine(body=[cst.Expr(node)])
        return not self.graph.effects_of(collect(line)) & TOGETHER

    def any_sent(self) -> bool:
        """Return whether the statement has an expression that the main process sends."""
        return self._any(self.statement.node, self.is_sent)

    def leaves_run(self) -> bool:
        """Return whether a run is used where its values cannot be sent: passed on whole, or read inside a function."""
        node = self.statement.node
        if isinstance(node, cst.FunctionDef):
            calls = self.graph.functions[node.name.value].calls if node.name.value in self.graph.functions else []
            starts = any(starts_run(self.graph.full_path(site)) for site in calls)
            return not starts and self.reads_tracker(node.body)
        return self._hands_on(node)

    def _hands_on(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.WithItem) and self.tracked(node.item)[0]:
            return True
        if self.is_sent(node):
            return False
        handed_on = self.tracked(node)[0] == "run" or self._trains_within(node)
        return handed_on or any(self._hands_on(part) for part in self.parts(node))

    def _trains_within(self, node: cst.CSTNode) -> bool:
        """Return whether a tracker gets the result of a training, which every process must take part in."""
        return isinstance(node, cst.Call) and self.tracked(node)[0] == "value" and not self._may_run_once(node)

    def only_told(self, node: cst.CSTNode) -> bool:
        """Return whether every use of a run is a call for its own sake, a context to enter, or an argument of those."""
        parts: Iterable[cst.CSTNode] = node.children
        match node:
            case cst.SimpleStatementLine(body=[cst.Expr(value=cst.Call(args=args))]) if not self._trains_within(
                node.body[0].value  # type: ignore[attr-defined]
            ):
                return not any(self.reads_tracker(arg) and self.tracked(arg.value)[0] != "run" for arg in args)
            case cst.WithItem(item=item) if self.tracked(item)[0]:
                return True
            case cst.FunctionDef(body=part) | cst.Attribute(value=part) | cst.Arg(value=part):
                parts = [part]  # without names that are not read: parameters, attributes, keywords
        return not self.tracked(node)[0] and all(self.only_told(part) for part in parts)

    def reads_tracker(self, node: cst.CSTNode) -> bool:
        """Return whether an expression reads anything of a tracker."""
        return self._any(node, lambda part: bool(self.tracked(part)[0]))

    def _any(self, node: cst.CSTNode, matches: Callable[[cst.CSTNode], bool]) -> bool:
        return matches(node) or any(self._any(part, matches) for part in self.parts(node))

    def parts(self, node: cst.CSTNode) -> Iterable[cst.CSTNode]:
        """Return the parts of a node that are evaluated in place, on every process, and may be sent."""
        match node:
            case cst.Call() if self._trains_within(node):
                return node.args
            case cst.Lambda() | cst.FunctionDef() | cst.ClassDef() | cst.While() | cst.AssignTarget() | cst.Del():
                return []
            case cst.Import() | cst.ImportFrom() | cst.AsName():
                return []
            case cst.WithItem(item=item) if self.tracked(item)[0]:
                return []  # a context is entered, not sent
            case cst.ConcatenatedString():  # a part of one has to stay a string
                return [part for piece in node.children for part in piece.children]
            case cst.Attribute() | cst.Arg() | cst.NamedExpr() | cst.AugAssign():
                return [node.value]
            case cst.AnnAssign():
                return [node.value] if node.value else []
            case cst.For() | cst.CompFor():
                return [part for part in node.children if part is not node.target]
            case cst.BinaryOperation(operator=cst.Subtract()) | cst.Comparison():
                return [part for part in node.children if not self.is_fresh(getattr(part, "comparator", part))]
            case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))]) if name in (self.timed or ()):
                return node.children if self.reads_tracker(node.value) else []
            case cst.SimpleStatementLine(body=[small]) if tells_tracker(small, self.graph):
                return []  # the main process alone runs it
            case cst.SimpleStatementLine(body=[cst.Expr()]):
                return [] if self.graph.effects_of(collect(node)) & _GUARDED else node.children
        return node.children

    def alias(self) -> tuple[str, str]:
        """Return the name that the statement gives to a run or its config, and which of the two it is."""
        match assignment(self.statement.node):
            case cst.Name(name), value if (kind := self.tracked(value)[0]) in ("run", "config"):
                return name, kind
        return "", ""

    def changes_tracker(self) -> bool:
        """Return whether the statement writes something to a tracker."""
        match self.statement.node:
            case cst.SimpleStatementLine(body=[cst.Expr(value=cst.Call() as value)]):
                return bool(self.tracked(value)[0])
        target, _ = assignment(self.statement.node) or (None, None)
        return isinstance(target, cst.Attribute | cst.Subscript) and bool(self.tracked(target)[0])


def chain(node: cst.CSTNode) -> tuple[cst.CSTNode, list[str]]:
    """Return the root of a chain of attributes, items and method calls, and the chain's steps from there."""
    steps: list[str] = []
    while True:
        match node:
            case cst.Attribute():
                steps.append(node.attr.value)
                node = node.value
            case cst.Subscript():
                steps.append("[]")
                node = node.value
            case cst.Call(func=cst.Attribute()):
                steps.append("()")
                node = node.func
            case _:
                return node, steps[::-1]


# Which statements ----------------------------------------------------------------------------------------------------


def mark_sent(graph: Graph) -> None:
    """Mark the statements on every process that need values of the main one; these run on all at the same time."""
    timed = timed_names(graph)
    # What training, seeds, folders and environment variables depend on.
    settings = graph.with_used(i for i, s in enumerate(graph.statements) if s.needed or Effect.STATE in s.effects)
    for index, statement in enumerate(graph.statements):
        if not statement.everywhere or Effect.SYNC in statement.effects:
            continue  # who waits for others inside must not wait for the main process as well
        named = timed if index in settings else None
        if MainValues(graph, statement, named).any_sent():
            statement.role, statement.takes_sent, statement.timed = Role.ALL, True, named


def timed_names(graph: Graph) -> frozenset[str]:
    """Return names that are only subtracted and compared, as the start of a measured time is."""
    counted = _Uses()
    for statement in graph.statements:
        statement.node.visit(counted)
    written = frozenset(name for s in graph.statements for name in s.usage.writes)
    return frozenset(name for name in written if counted.all[name] == counted.timing[name])


class _Uses(NamesRead):
    def __init__(self) -> None:
        self.all: Counter[str] = Counter()
        self.timing: Counter[str] = Counter()

    def visit_Name(self, node: cst.Name) -> None:
        self.all[node.value] += 1

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        return not isinstance(node.target, cst.Name)

    def visit_Global(self, node: cst.Global) -> bool:
        return False

    def visit_BinaryOperation(self, node: cst.BinaryOperation) -> None:
        if isinstance(node.operator, cst.Subtract):
            self._time(node.left, node.right)

    def visit_Comparison(self, node: cst.Comparison) -> None:
        self._time(node.left, *(target.comparator for target in node.comparisons))

    def _time(self, *operands: cst.BaseExpression) -> None:
        self.timing.update(part.value for part in operands if isinstance(part, cst.Name))


# Edits ---------------------------------------------------------------------------------------------------------------


def send_values(statement: Statement, graph: Graph, context: ConversionContext) -> cst.BaseStatement:
    """Return the statement with the main process's values sent to every process."""
    if not statement.takes_sent:
        return statement.node
    editor = _Sender(MainValues(graph, statement, statement.timed), context)
    new = statement.node.visit(editor)
    assert isinstance(new, cst.BaseStatement)
    return lead(new, editor.outer)


class _Sender(LineEditor):
    def __init__(self, values: MainValues, context: ConversionContext) -> None:
        super().__init__()
        self.values, self.context = values, context
        self.passed: set[int] = set()
        self.sent: set[int] = set()

    def on_visit(self, node: cst.CSTNode) -> bool:
        if id(node) in self.passed:
            self.passed.update(id(part) for part in node.children)
            return super().on_visit(node)
        if self.values.is_sent(node):
            self.sent.add(id(node))
            return False
        evaluated = {id(part) for part in self.values.parts(node)}
        self.passed.update(id(part) for part in node.children if id(part) not in evaluated)
        return super().on_visit(node)

    def on_leave(self, original_node, updated_node):  # type: ignore[no-untyped-def]
        if id(original_node) not in self.sent:
            return super().on_leave(original_node, updated_node)
        kind, steps = self.values.tracked(original_node)
        value = original_node
        if kind == "config" or steps[-2:] in _VIEWS:
            name = "dict" if kind == "config" else "list"
            value = cst.Call(func=cst.Name(name), args=[cst.Arg(value)])
        why = "the main process's, sent to the others"
        why_sent = "the run is there" if self.values.reads_tracker(original_node) else "each would have its own"
        why_sent = "it is paid for once" if self.values.is_paid(original_node) else why_sent
        self.note(self.context.edit("once", f"{why}: {why_sent}"))
        return from_main(value, self.context)


def from_main(value: cst.BaseExpression, context: ConversionContext) -> cst.Call:
    """Return `from_main(lambda: value)`."""
    function = cst.Lambda(params=cst.Parameters(), body=value)
    return cst.Call(func=cst.Name(context.names["from_main"]), args=[cst.Arg(function)])
