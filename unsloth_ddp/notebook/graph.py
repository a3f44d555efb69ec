"""Build the graph of a notebook: its top-level statements, and which of them define what each one uses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import libcst as cst

from unsloth_ddp.notebook.displayed import is_bare_value
from unsloth_ddp.notebook.effects import (
    REMOTE_STARTS,
    Effect,
    call_effects,
    downloads_data,
    is_remote,
    is_trainer_call,
    makes_trainer,
    starts_run,
)
from unsloth_ddp.notebook.name_usage import CallSite, DeferredBody, NameUsage, collect
from unsloth_ddp.notebook.syntax import HARMLESS, full_path, is_false

# Effects that a function hands on to a call it is merely passed to, such as dataset.map(function).
_THROUGH_ARGUMENTS = {Effect.PAID, Effect.FILE, Effect.SERVER, Effect.PRINT, Effect.RANDOM, Effect.SHELL}
# A call with no other effect than these is made for what it does to its arguments.
_MAY_CHANGE_ARGUMENTS = {Effect.LOAD, Effect.RANDOM, Effect.STATE, Effect.DATA}


class Role(Enum):
    """The processes that run a top-level statement."""

    ALL = "every process"
    FIRST = "every process, the main one first"
    MAIN = "main process only"
    NODE = "one process a node"
    DEAD = "never"
    DROP = "removed"


@dataclass
class Seed:
    """The generators to seed before a statement that draws from them, and the number of the seed."""

    number: int
    generators: tuple[str, ...] = ()  # all of them, if none is named


@dataclass
class Statement:
    """One top-level statement and what was found out about it."""

    cell: int
    node: cst.BaseStatement
    usage: NameUsage
    effects: set[Effect] = field(default_factory=set)
    role: Role = Role.ALL
    needed: bool = False
    uses: set[int] = field(default_factory=set)  # statements whose definitions this one reads
    used_by: set[int] = field(default_factory=set)
    share: list[str] = field(default_factory=list)  # names the main process hands to the others
    handles: set[str] = field(default_factory=set)  # names that only the process that made them can use
    share_value: bool = False  # the main process hands the assigned value to the others
    seed: Seed | None = None
    runs: frozenset[str] = frozenset()  # names that hold a tracked run just before this
    configs: frozenset[str] = frozenset()  # names that hold the config of one
    takes_sent: bool = False  # the main process sends it values
    stands_in: bool = False  # the other processes get a stand-in for the run that it starts
    reads_one_node: bool = False  # it reads back what only the main process could save
    timed: frozenset[str] | None = None  # names of clock readings used for durations only; None ignores clocks

    @property
    def conditional(self) -> bool:
        """Return whether its writes may not happen, so that earlier definitions stay visible."""
        return isinstance(self.node, cst.If | cst.For | cst.While | cst.Try | cst.TryStar | cst.Match)


@dataclass
class Graph:
    """All statements of a notebook in order."""

    statements: list[Statement]
    imports: dict[str, str]
    functions: dict[str, DeferredBody]
    trainer_classes: set[str]
    effects: _Effects | None = None

    @cached_property
    def run_names(self) -> frozenset[str]:
        """Return the names that hold a tracker's run anywhere in the notebook."""
        usages = [s.usage for s in self.statements]
        assigned = [pair for usage in usages for pair in usage.assigned]
        return frozenset(name for name, site in assigned if starts_run(self.full_path(site)))

    @cached_property
    def remote_names(self) -> frozenset[str]:
        """Return the names that hold a trainer, an estimator or a client of a service that trains elsewhere."""
        assigned = [pair for s in self.statements for pair in s.usage.assigned]
        return frozenset(name for name, site in assigned if is_remote(self.full_path(site)))

    @property
    def callable_trainers(self) -> set[str]:
        """Return the names that hold a trainer; calling one trains."""
        assert self.effects is not None
        return self.effects.trainers

    @property
    def function_effects(self) -> dict[str, set[Effect]]:
        """Return the effects of the notebook's own functions."""
        assert self.effects is not None
        return {name: self.effects.of_function(name) for name, body in self.functions.items() if not body.methods}

    def class_effects(self, name: str) -> set[Effect]:
        """Return the effects of all methods of one of the notebook's own classes."""
        assert self.effects is not None
        return self.effects.of_function(name)

    def effects_of(self, usage: NameUsage) -> set[Effect]:
        """Return the effects of code that uses names so."""
        assert self.effects is not None
        return set().union(*(self.effects.of_site(site) for site in usage.calls))

    def full_path(self, site: CallSite) -> str:
        """Return the path of a callee with its import resolved."""
        return full_path(site.path, self.imports)

    def bodies_run_by(self, site: CallSite) -> list[DeferredBody]:
        """Return the notebook's own functions that a call runs, or passes to what it calls."""
        assert self.effects is not None
        names = [site.path, *sorted(site.names)]
        owner = self.effects.owner(site)
        names += [owner] if owner else []
        return [self.functions[name] for name in names if name in self.functions]

    @property
    def last_seed(self) -> int:
        """Return the index of the last statement that trains, builds a trainer or steps an optimizer; -1 if none."""
        return max((i for i, s in enumerate(self.statements) if s.effects & SEEDS), default=-1)


SEEDS = {Effect.TRAIN, Effect.TRAINER, Effect.LOOP}


def is_dead(node: cst.BaseStatement) -> bool:
    """Return whether a statement is an `if False:` without an else."""
    return isinstance(node, cst.If) and is_false(node.test) and node.orelse is None


def build(cells: Iterable[tuple[int, Iterable[cst.BaseStatement]]]) -> Graph:
    """Build the graph of all cells' statements."""
    statements = [Statement(number, node, collect(node)) for number, body in cells for node in body]
    imports: dict[str, str] = {}
    functions: dict[str, DeferredBody] = {}
    for statement in statements:
        imports.update(statement.usage.imports)
        functions.update(statement.usage.defines)
    _follow_aliases(statements)
    for statement in statements:
        if statement.usage.stores & imports.keys():
            statement.effects.add(Effect.STATE)
        # A module's function changes its arguments or the world, not the name it was imported under.
        statement.usage.mutates -= imports.keys()
    graph = Graph(statements, imports, functions, _trainer_classes(functions))
    _find_effects(graph)
    return graph


def _follow_aliases(statements: list[Statement]) -> None:
    """Count a change of `part` as a change of `whole` where the notebook has `part = whole.part`."""
    wholes: dict[str, set[str]] = {}
    for statement in statements:
        for name, whole in statement.usage.aliases:
            wholes.setdefault(name, set()).add(whole)
    for statement in statements:
        queue = list(statement.usage.mutates)
        while queue:
            fresh = wholes.get(queue.pop(), set()) - statement.usage.mutates
            statement.usage.mutates |= fresh
            queue += fresh


def _trainer_classes(functions: dict[str, DeferredBody]) -> set[str]:
    """Return the notebook's classes that inherit from a trainer, whatever they are called."""
    found: set[str] = set()
    grown = True
    while grown:
        grown = False
        for name, body in functions.items():
            if name not in found and any(b.split(".")[-1].endswith("Trainer") or b in found for b in body.bases):
                found.add(name)
                grown = True
    return found


# Effects -------------------------------------------------------------------------------------------------------------


class _Effects:
    """Effects of statements and functions, found through the call graph."""

    def __init__(self, graph: Graph, trainers: set[str], instances: dict[str, set[str]]) -> None:
        self.graph, self.trainers, self.instances = graph, trainers, instances
        self.known: dict[str, set[Effect]] = {}

    def of_site(self, site: CallSite) -> set[Effect]:
        graph = self.graph
        if site.root in graph.remote_names and site.tail in REMOTE_STARTS:
            return {Effect.PAID}
        if is_remote(graph.full_path(site)):
            return set()
        if site.path in self.trainers:
            return {Effect.TRAIN}  # an object that trains when it is called
        if is_trainer_call(site, graph.trainer_classes):
            return {Effect.TRAINER}
        found: set[Effect] = set()
        body = graph.functions.get(site.path)
        if body is not None:
            if not body.methods and not body.bases:
                found |= self.of_function(site.path)
            elif any(downloads_data(graph.full_path(inner)) for inner in body.calls):
                found.add(Effect.DATA)  # a Dataset class that downloads when it is made
        else:
            found |= call_effects(site, graph.full_path(site), self.trainers, graph.trainer_classes)
        if owner := self.owner(site):
            found |= self.of_function(owner)
        for name in site.names & graph.functions.keys():
            found |= self.of_function(name) & _THROUGH_ARGUMENTS
        return found

    def owner(self, site: CallSite) -> str | None:
        """Return the notebook's own class whose method is called, on a name that holds an instance or on a new one."""
        match site.node.func:
            case cst.Attribute(value=cst.Call(func=cst.Name(value=name))):
                pass
            case _:
                found = self.instances.get(site.root, set()) if site.is_method else set()
                return next((owner for name in sorted(found) if (owner := self._defines(name, site.tail))), None)
        return self._defines(name, site.tail)

    def _defines(self, name: str, method: str) -> str | None:
        """Return the notebook's class that defines a method for a class: itself, or what it inherits from."""
        seen: set[str] = set()
        while name in self.graph.functions and name not in seen:
            seen.add(name)
            body = self.graph.functions[name]
            if method in body.methods:
                return name
            name = next((base for base in body.bases if base in self.graph.functions), "")
        return None

    def of_function(self, name: str) -> set[Effect]:
        if name not in self.known:
            self.known[name] = set()  # ends recursion
            body = self.graph.functions[name]
            found: set[Effect] = set()
            for site in body.calls:
                found |= self.of_site(site)
            self.known[name] = found
        return self.known[name]


def _find_effects(graph: Graph) -> None:
    trainers: set[str] = set()
    instances: dict[str, set[str]] = {}
    for statement in graph.statements:
        for site in statement.usage.calls:
            body = graph.functions.get(site.path)
            if body is not None and (body.methods or body.bases):
                for name in statement.usage.writes:
                    instances.setdefault(name, set()).add(site.path)
        trainers |= {name for name, site in statement.usage.assigned if makes_trainer(site, graph.trainer_classes)}
    trainers -= graph.remote_names | graph.functions.keys()
    effects = graph.effects = _Effects(graph, trainers, instances)
    for statement in graph.statements:
        for site in statement.usage.calls:
            statement.effects |= effects.of_site(site)
        if is_bare_value(statement.node):
            statement.effects.add(Effect.SHOW)
        _mutations_through_functions(graph, statement)


def _mutations_through_functions(graph: Graph, statement: Statement) -> None:
    """Add what the notebook's own functions change: their globals, and the arguments they assign into."""
    usage = statement.usage
    seen: set[tuple[str, frozenset[str]]] = set()
    before = set(usage.mutates)
    arguments: set[str] = set()
    changed: set[str] = set()  # what a function changes without having set it itself

    def visit(name: str, own: frozenset[str]) -> None:
        if (name, own) in seen or name not in graph.functions:
            return
        seen.add((name, own))
        body = graph.functions[name]
        own |= sets_first(body, graph.functions)
        found = body.writes | (body.mutates - set(body.params) - graph.imports.keys())
        usage.mutates |= found
        changed.update(found - own)
        for inner in body.calls:
            visit(inner.path, own)

    for site in usage.calls:
        body = graph.functions.get(site.path)
        if body is None:
            told = site.root in graph.run_names  # a tracker takes what it is told as it is
            if site.bare and not told and not statement.effects - _MAY_CHANGE_ARGUMENTS:
                arguments |= site.names  # an unknown function called for its effect alone
            continue
        visit(site.path, frozenset())
        for index, arg in enumerate(site.node.args):
            if not isinstance(arg.value, cst.Name):
                continue
            param = arg.keyword.value if arg.keyword else (body.params[index] if index < len(body.params) else "")
            if param in body.mutates and param in _assigned_into(body):
                arguments.add(arg.value.value)
    usage.mutates |= arguments
    usage.replaces = usage.mutates - before - changed - arguments
    usage.mutates -= _only_harmless(statement)


def _assigned_into(body: DeferredBody) -> set[str]:
    """Return the parameters that a body changes by more than calling a harmless method on them."""
    harmless = {site.root for site in body.calls if site.bare and site.tail in HARMLESS}
    changed = {site.root for site in body.calls if site.bare and site.is_method and site.tail not in HARMLESS}
    return (body.mutates - harmless) | (body.mutates & changed)


def _only_harmless(statement: Statement) -> set[str]:
    """Return names that count as mutated only because a known call was made on them."""
    usage = statement.usage
    known = {Effect.INFER, Effect.SAVE, Effect.SHOW, Effect.TRAIN, Effect.FILE}
    if not isinstance(statement.node, cst.SimpleStatementLine):
        return set()
    sites = [s for s in usage.calls if s.is_method and s.bare]
    if sites and all(s.tail in HARMLESS or statement.effects & known for s in sites):
        return {s.root for s in sites} & usage.mutates
    return set()


def sets_first(body: DeferredBody, functions: dict[str, DeferredBody]) -> frozenset[str]:
    """Return the globals that a function sets before it, or a function that it calls, can read them."""
    found: set[str] = set()
    for part in (body, *(functions.get(name) for name in body.starts)):
        if part is None or not (part is body or part.only_sets):
            break
        found |= {name for name, path in part.sets.items() if path.split(".")[0] not in functions}
    return frozenset(found)
