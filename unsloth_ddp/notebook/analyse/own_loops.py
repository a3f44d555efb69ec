"""Find training loops written by hand that are plain enough to share: one DataLoader, one backward, one optimizer, by name."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import Graph
from unsloth_ddp.notebook.syntax.arguments import code
from unsloth_ddp.notebook.syntax.tree import contains, dotted
from unsloth_ddp.notebook.syntax.usage import CallSite

# What shows how far a loop is, and yields what it is given.
_WRAPS = ("enumerate", "tqdm", "track", "islice", "iter")
_EVALUATES = re.compile("val|eval|test|dev")
_LEAVES_LOOP = cst.Break | cst.Return | cst.Raise


@dataclass(frozen=True)
class OwnLoop:
    """The parts of a plain loop, as nodes of its statement."""

    outermost: cst.For  # the loop over epochs, or the one over batches
    backward: cst.SimpleStatementLine
    loader: cst.Name  # where the loader is iterated over
    optimizer: str
    ends_early: bool  # one process may leave it while the others go on


def find_loop(node: cst.BaseStatement, graph: Graph) -> OwnLoop | None:
    """Return the plain loop in a top-level statement or in a function; None if there is none, or more than one."""
    if isinstance(node, cst.ClassDef):
        return None
    found = _Loops()
    node.visit(found)
    if len(found.backwards) != 1 or found.inner is None or found.others:
        return None
    loader = _loader(found.inner.iter, node)
    optimizers = {name for name in found.steps if "opt" in name.lower()}
    if loader is None or len(optimizers) != 1 or not _is_loader(loader.value, node, graph):
        return None
    early = contains(found.inner.body, lambda part: isinstance(part, _LEAVES_LOOP))
    return OwnLoop(found.outer[0], found.backwards[0], loader, optimizers.pop(), early)


class _Loops(cst.CSTVisitor):
    """Collects the lines that go backward, the loops around them and the objects that step there."""

    def __init__(self) -> None:
        self.open: list[cst.For] = []
        self.outer: list[cst.For] = []
        self.inner: cst.For | None = None
        self.backwards: list[cst.SimpleStatementLine] = []
        self.steps: list[str] = []
        self.others = False  # a backward that is no line of its own in a loop, or a while around it
        self.whiles = 0

    def visit_For(self, node: cst.For) -> None:
        self.open.append(node)

    def leave_For(self, original_node: cst.For) -> None:
        self.open.pop()

    def visit_While(self, node: cst.While) -> None:
        self.whiles += 1

    def leave_While(self, original_node: cst.While) -> None:
        self.whiles -= 1

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        match node:
            case cst.SimpleStatementLine(
                body=[cst.Expr(value=cst.Call(func=cst.Attribute(attr=cst.Name("backward"))))]
            ):
                if not self.open or self.whiles:
                    self.others = True
                    return
                self.backwards.append(node)
                self.inner, self.outer = self.open[-1], list(self.open)

    def visit_Call(self, node: cst.Call) -> None:
        match node:
            case cst.Call(func=cst.Attribute(value=cst.Name(value=name), attr=cst.Name("step")), args=[]):
                self.steps.append(name)
            case cst.Call(func=cst.Attribute(attr=cst.Name("step")), args=[cst.Arg(value=cst.Name(value=name))]):
                self.steps.append(name)  # scaler.step(optimizer)


def _loader(node: cst.BaseExpression, owner: cst.BaseStatement) -> cst.Name | None:
    """Return the name of what a loop iterates over, out of what shows its progress."""
    match node:
        case cst.Name(value=name):
            bars = _Bars(name)
            owner.visit(bars)
            return _loader(bars.found, owner) if bars.found is not None else node
        case cst.Call(args=[cst.Arg(value=first), *_]) if dotted(node.func).split(".")[-1] in _WRAPS:
            return _loader(first, owner)
    return None


class _Bars(cst.CSTVisitor):
    """Finds `bar = tqdm(loader)`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.found: cst.BaseExpression | None = None

    def visit_Assign(self, node: cst.Assign) -> None:
        match node:
            case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value=name))], value=cst.Call() as value):
                if name == self.name and dotted(value.func).split(".")[-1] in _WRAPS:
                    self.found = value


def _is_loader(name: str, owner: cst.BaseStatement, graph: Graph) -> bool:
    """Return whether a name holds a DataLoader: made by that class, or given so to the function."""
    assigned = [pair for s in graph.statements for pair in s.usage.assigned]
    made = {bound for bound, site in assigned if site.tail == "DataLoader" or _gives_loader(site, graph)}
    if name in made:
        return True
    if not isinstance(owner, cst.FunctionDef) or name not in graph.functions[owner.name.value].params:
        return False
    position = graph.functions[owner.name.value].params.index(name)
    sites = [site for s in graph.statements for site in s.usage.calls if site.path == owner.name.value]
    given = [_argument(site, name, position) or _default(owner, name) for site in sites]
    return bool(given) and all(one in made for one in given)


def _default(function: cst.FunctionDef, name: str) -> str:
    """Return the name that a parameter has as its default, or ""."""
    params = [*function.params.params, *function.params.kwonly_params]
    found = next((param.default for param in params if param.name.value == name), None)
    return found.value if isinstance(found, cst.Name) else ""


def steps_by_training_loss(graph: Graph) -> bool:
    """Return whether a scheduler steps by a value that is not of an evaluation, which every process makes alike."""
    sites = [site for site in graph.sites if site.tail == "step" and site.is_method and len(site.node.args) == 1]
    values = [code(site.node.args[0].value).lower() for site in sites if "scaler" not in site.root.lower()]
    return any("loss" in value and not _EVALUATES.search(value) for value in values)


def _gives_loader(site: CallSite, graph: Graph) -> bool:
    """Return whether a call is of a function of the notebook that makes a DataLoader."""
    own = graph.own_body(site)
    return own is not None and any(inner.tail == "DataLoader" for inner in own[0].calls)


def _argument(site: CallSite, name: str, position: int) -> str:
    """Return the name that a call gives a parameter, or ""."""
    for index, arg in enumerate(site.node.args):
        if (arg.keyword.value == name if arg.keyword else index == position) and isinstance(arg.value, cst.Name):
            return arg.value.value
    return ""
