"""Share a training loop written by hand: average its gradients, and give each process its part of every batch."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import Graph, Statement
from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.syntax.arguments import code, keyword, set_keyword, splats, with_value
from unsloth_ddp.notebook.syntax.effects import Effect, makes_accelerator
from unsloth_ddp.notebook.syntax.lines import lead, parse_line
from unsloth_ddp.notebook.syntax.name_usage import collect
from unsloth_ddp.notebook.syntax.tree import contains, dotted, root_names
from unsloth_ddp.notebook.syntax.usage import CallSite, given_names
from unsloth_ddp.notebook.write.config import whole_batch

_SHARED = (
    "a loop by hand: each process takes its part of every batch, and the gradients are averaged; "
    "losses and counts in it are of that part"
)
_EARLY = "this loop can end early: every process has to leave it at the same batch, or those that go on wait"
_SKIPS = "this loop can skip a batch: every process has to skip the same, or the others wait for its gradients"
_WHOLE = "this loop uses the size of a whole batch: each process has a part of the batch, so use the size of that"
_DIVIDE = "Accelerate shares each batch among the processes: their number has to divide its batch_size"

_BY_LOSS = "a scheduler steps by a training loss: each process has that of its own rows, so step by the same on all"


def share_loop(statement: Statement, graph: Graph, context: ConversionContext) -> cst.BaseStatement:
    """Return a statement whose loop, if it is plain enough to see, trains on all processes together."""
    effects = statement.effects.union(*(graph.effects_inside(name) for name in statement.usage.defines))
    if Effect.LOOP not in effects or effects & {Effect.TRAIN, Effect.SYNC} or graph.prepares:
        return statement.node
    loop = _find_loop(statement.node, graph)
    if loop is None:
        return statement.node
    context.shared_loops.add(statement)
    new = statement.node.visit(_Sharer(loop, context))
    if isinstance(new, cst.FlattenSentinel):  # a loop at top level, behind the line that it needs first
        first, new = new
        statement.lines_before.append(first)
    assert isinstance(new, cst.BaseStatement)
    return new


class _Sharer(cst.CSTTransformer):
    def __init__(self, loop: _OwnLoop, context: ConversionContext) -> None:
        self.loop, self.context = loop, context

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        after = next((i for i, part in enumerate(original_node.body, 1) if part is self.loop.backward), None)
        if after is None:
            return updated_node
        line = self._line("average_gradients")
        if after == len(updated_node.body):
            return cst.FlattenSentinel([updated_node, line])
        body = updated_node.body  # `loss.backward(); optimizer.step()`
        return updated_node.with_changes(body=[*body[:after], *line.body, *body[after:]])

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        if original_node is not self.loop.loader:
            return updated_node
        return cst.parse_expression(f"{self.context.names['share_rows']}({updated_node.value})")

    def leave_For(
        self, original_node: cst.For, updated_node: cst.For
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        if original_node is not self.loop.outermost:
            return updated_node
        notes = [self.context.edit("loop", _SHARED)]
        notes += [self.context.warn("loop", text) for text in self.loop.warnings]
        notes += [self.context.warn("contrastive", whole_batch(self.context))] if self.context.batch_term else []
        return cst.FlattenSentinel([lead(self._line("same_weights"), notes), updated_node])

    def _line(self, helper: str) -> cst.SimpleStatementLine:
        return parse_line(f"{self.context.names[helper]}({self.loop.optimizer})")


def edit_accelerated(call: cst.Call, full: str, context: ConversionContext) -> tuple[cst.Call, list[str]]:
    """Return the call of an Accelerator or a DataLoader so that the processes share each batch of the notebook."""
    if makes_accelerator(full) and full.startswith("accelerate."):
        if keyword(call, "dataloader_config") or keyword(call, "split_batches"):
            return call, [context.warn("loop", "check that the processes share the batch: split_batches=True")]
        split = cst.Arg(value=cst.parse_expression(f"{context.names['split_batches']}()"), star="**")
        note = context.edit("loop", "Accelerate shares each batch among the processes, and averages the gradients")
        return call.with_changes(args=[*call.args, split]), [note]
    if dotted(call.func).split(".")[-1] != "DataLoader" or keyword(call, "batch_sampler"):
        return call, []
    batch = _batch_size(call)
    if batch is None and splats(call):
        return call, [context.warn("loop", _DIVIDE)]
    size = "1" if batch is None else code(batch.value)
    shared = f"{context.names['shared_batch']}({size})"
    note = context.edit("batch", "a batch that the processes can share")
    if batch is None or batch.keyword is not None:
        return set_keyword(call, "batch_size", shared), [note]
    return with_value(call, batch, cst.parse_expression(shared)), [note]


def _batch_size(call: cst.Call) -> cst.Arg | None:
    """Return the argument of a DataLoader that is its batch size, or None."""
    second = call.args[1] if len(call.args) > 1 and call.args[1].keyword is None and not call.args[1].star else None
    return keyword(call, "batch_size") or second


# What shows how far a loop is, and yields what it is given.
_WRAPS = ("enumerate", "tqdm", "track", "islice", "iter")
_EVALUATES = re.compile("val|eval|test|dev")
_LEAVES_LOOP = cst.Break | cst.Return | cst.Raise
_ADDS = ("append", "extend", "update", "add")  # what they are called on holds figures of each batch


@dataclass(frozen=True)
class _OwnLoop:
    """The parts of a plain loop, as nodes of its statement."""

    outermost: cst.For  # the loop over epochs, or the one over batches
    backward: cst.BaseSmallStatement
    loader: cst.Name  # where the loader is iterated over
    optimizer: str
    warnings: list[str]


def _find_loop(node: cst.BaseStatement, graph: Graph) -> _OwnLoop | None:
    """Return the plain loop in a top-level statement or in a function; None if there is none, or more than one."""
    if isinstance(node, cst.ClassDef):
        return None
    collector = _Loops()
    node.visit(collector)
    if len(collector.backwards) != 1 or not collector.loops or collector.others:
        return None
    loader = _loader(collector.loops[-1].iter, node)
    optimizers = {name for name in collector.steps if name in collector.zeroed or "opt" in name.lower()}
    if loader is None or len(optimizers) != 1 or not _is_loader(loader.value, node, graph):
        return None
    applying = {
        _EARLY: _ends_early(collector.loops),
        _SKIPS: collector.skips(),
        _WHOLE: _uses_batch_size(collector.loops[-1], graph),
        _BY_LOSS: _steps_by_training_loss(graph),
    }
    warnings = [text for text, applies in applying.items() if applies]
    return _OwnLoop(collector.loops[0], collector.backwards[0], loader, optimizers.pop(), warnings)


class _Loops(cst.CSTVisitor):
    """Collects the calls that go backward, the loops around them and the objects that step there."""

    def __init__(self) -> None:
        self.open: list[cst.CSTNode] = []  # blocks around what is visited
        self.loops: list[cst.For] = []  # around the last backward
        self.backwards: list[cst.BaseSmallStatement] = []
        self.conditions: list[tuple[cst.CSTNode, cst.CSTNode]] = []  # a loop, and what may skip its batches
        self.steps: list[str] = []
        self.zeroed: set[str] = set()
        self.others = False  # a backward that is no statement of its own in a loop, or a while around it

    def visit_For(self, node: cst.For | cst.While | cst.If | cst.Try) -> None:
        self.open.append(node)

    def leave_For(self, original_node: cst.For | cst.While | cst.If | cst.Try) -> None:
        self.open.pop()

    visit_While = visit_If = visit_Try = visit_For
    leave_While = leave_If = leave_Try = leave_For

    def visit_Continue(self, node: cst.Continue) -> None:
        if not self.backwards:
            self._note_conditions()

    def visit_Expr(self, node: cst.Expr) -> None:
        match node.value:
            case cst.Call(func=cst.Attribute(attr=cst.Name("backward"))):
                self.loops = [block for block in self.open if isinstance(block, cst.For)]
                self.others |= not self.loops or any(isinstance(block, cst.While) for block in self.open)
                self.backwards.append(node)
                self._note_conditions()

    def _note_conditions(self) -> None:
        """Note the blocks around what is visited that are in its innermost loop."""
        loops = [i for i, block in enumerate(self.open) if isinstance(block, cst.For | cst.While)]
        if loops:
            self.conditions += [(self.open[loops[-1]], block) for block in self.open[loops[-1] + 1 :]]

    def skips(self) -> bool:
        """Return whether a process may skip a batch by its own rows, or by an error of its own."""
        blocks = [block for loop, block in self.conditions if loop is self.loops[-1]]
        of_this_process = collect(self.loops[-1]).writes
        return any(not isinstance(block, cst.If) or set(root_names(block.test)) & of_this_process for block in blocks)

    def visit_Call(self, node: cst.Call) -> None:
        match node:
            case cst.Call(func=cst.Attribute(value=cst.Name(value=name), attr=cst.Name("step")), args=[]):
                self.steps.append(name)
            case cst.Call(func=cst.Attribute(attr=cst.Name("step")), args=[cst.Arg(value=cst.Name(value=name))]):
                self.steps.append(name)  # scaler.step(optimizer)
            case cst.Call(func=cst.Attribute(value=cst.Name(value=name), attr=cst.Name("zero_grad"))):
                self.zeroed.add(name)


def _ends_early(loops: list[cst.For]) -> bool:
    """Return whether a process can leave the loops by what it alone has: its rows, or figures made of them."""
    inner = collect(loops[-1])
    of_this_process = inner.writes | {site.root for site in inner.calls if site.tail in _ADDS}
    if contains(loops[-1].body, lambda part: isinstance(part, _LEAVES_LOOP)):
        return True
    for statement in (line for loop in loops[:-1] for line in loop.body.body if line is not loops[-1]):
        usage = collect(statement)
        if usage.reads & of_this_process:
            if contains(statement, lambda part: isinstance(part, _LEAVES_LOOP)):
                return True
            of_this_process |= usage.writes
    return False


def _uses_batch_size(loop: cst.For, graph: Graph) -> bool:
    """Return whether the code in a loop reads what a DataLoader got as its batch size."""
    sizes = [_batch_size(site.node) for site in graph.sites if site.tail == "DataLoader"]
    values = [size.value for size in sizes if size is not None]
    named = {code(value) for value in values if isinstance(value, cst.Name | cst.Attribute)}
    text = code(loop.body)
    return any(re.search(rf"(?<![\w.]){re.escape(name)}\b(?!\s*=[^=])", text) for name in named)


def _loader(node: cst.BaseExpression, owner: cst.BaseStatement) -> cst.Name | None:
    """Return the name of what a loop iterates over, out of what shows its progress."""
    match node:
        case cst.Name(value=name):
            bars = [site for bound, site in collect(owner).assigned if bound == name and site.tail in _WRAPS]
            return _loader(bars[-1].node, owner) if bars else node
        case cst.NamedExpr(value=value):
            return _loader(value, owner)
        case cst.Call(args=[cst.Arg(value=first), *_]) if dotted(node.func).split(".")[-1] in _WRAPS:
            return _loader(first, owner)
    return None


def _is_loader(name: str, owner: cst.BaseStatement, graph: Graph) -> bool:
    """Return whether a name holds a DataLoader: made by that class, or given so to the function."""
    loaders = {bound for bound, site in graph.assigned if site.tail == "DataLoader" or _gives_loader(site, graph)}
    if name in loaders:
        return True
    if not isinstance(owner, cst.FunctionDef) or name not in (body := graph.functions[owner.name.value]).params:
        return False
    calls = [dict(given_names(site, body, bound=False)) for site in graph.sites if site.path == owner.name.value]
    return bool(calls) and all(arguments.get(name, _default(owner, name)) in loaders for arguments in calls)


def _default(function: cst.FunctionDef, name: str) -> str:
    """Return the name that a parameter has as its default, or ""."""
    params = [*function.params.params, *function.params.kwonly_params]
    default = next((param.default for param in params if param.name.value == name), None)
    return default.value if isinstance(default, cst.Name) else ""


def _steps_by_training_loss(graph: Graph) -> bool:
    """Return whether a scheduler steps by a value that is not of an evaluation, which every process makes alike."""
    sites = [site for site in graph.sites if site.tail == "step" and site.is_method and len(site.node.args) == 1]
    values = [code(site.node.args[0].value).lower() for site in sites if "scaler" not in site.root.lower()]
    return any("loss" in value and not _EVALUATES.search(value) for value in values)


def _gives_loader(site: CallSite, graph: Graph) -> bool:
    """Return whether a call is of a function of the notebook that makes a DataLoader."""
    function = graph.own_body(site)
    return function is not None and any(inner.tail == "DataLoader" for inner in function[0].calls)
