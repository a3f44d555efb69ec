"""Find what a call changes, and connect the statements: which of them define what each one uses."""

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import Graph, Statement
from unsloth_ddp.notebook.analyse.main_values import timed_names
from unsloth_ddp.notebook.syntax.effects import Effect, call_effects, downloads_data
from unsloth_ddp.notebook.syntax.tree import HARMLESS, closure, moves, root_name, sets_argument
from unsloth_ddp.notebook.syntax.usage import RETURNED, CallSite, DeferredBody, follow_aliases, given_names

# A call with no other effect than these, whose value nobody takes, is made for what it does to its arguments.
_MAY_CHANGE_ARGUMENTS = {Effect.LOAD, Effect.RANDOM, Effect.STATE, Effect.DATA}
_KNOWN = {Effect.INFER, Effect.SAVE, Effect.SHOW, Effect.TRAIN, Effect.FILE}


class Changes:
    """Follows calls into the notebook's own functions and methods."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.changed: dict[DeferredBody, set[str]] = {}  # parameters of functions, as far as they were asked for
        self.timed = timed_names(graph)  # a stopwatch in a global ties its calls to nothing
        self.handed = self._handed(graph.assigned)

    def of_statement(self, statement: Statement) -> None:
        """Add to a statement's mutations what the functions that it calls change."""
        usage = statement.usage
        usage.mutates -= _only_known(statement)
        usage.mutates |= self._globals(usage.calls).union(*(self._by_call(s, statement.effects) for s in usage.calls))
        follow_aliases(usage.mutates, self.handed)

    def _by_call(self, site: CallSite, effects: set[Effect]) -> set[str]:
        """Return the roots of what a call changes: arguments, and the object of a method."""
        own_body = self.graph.own_body(site)
        if own_body is None:
            takes_as_is = site.root in self.graph.run_names  # a tracker takes what it is told as it is
            own_class = site.path in self.graph.functions
            made_for_it = site.bare and not takes_as_is and not own_class and not effects - _MAY_CHANGE_ARGUMENTS
            return set(site.names) if made_for_it else self._set_by_library(site)
        body, bound = own_body
        changed = self.parameters(body)
        names = {name for param, name in given_names(site, body, bound) if param in changed}
        if bound and body.params[:1] and body.params[0] in changed and isinstance(site.node.func, cst.Attribute):
            names.add(root_name(site.node.func) or "")
        return names - {""}

    def _set_by_library(self, site: CallSite) -> set[str]:
        """Return the first argument of a library's function that sets or loads something in it."""
        sets = site.root in self.graph.imports and sets_argument(site.tail)
        if not sets or not site.node.args or downloads_data(self.graph.full_path(site)):
            return set()
        return {root_name(site.node.args[0].value) or ""} - {""}

    def _handed(self, assigned: list[tuple[str, CallSite]]) -> list[tuple[str, str]]:
        """Return the aliases that calls make of functions which return a part of what they get."""
        return [(name, whole) for name, site in assigned for whole in self._parts_of_arguments(site)]

    def _parts_of_arguments(self, site: CallSite, depth: int = 0) -> set[str]:
        """Return the names of what a call gets and gives back a part of."""
        own_body = self.graph.own_body(site)
        if own_body is None or depth > 3:
            return set()
        body, bound = own_body
        inner = [(n, w) for n, other in body.assigned for w in self._parts_of_arguments(other, depth + 1)]
        parts = {RETURNED}
        follow_aliases(parts, body.aliases + inner)
        return {name for param, name in given_names(site, body, bound) if param in parts}

    def parameters(self, body: DeferredBody) -> set[str]:
        """Return the parameters of a function that it may change, itself or through what it calls."""
        if body in self.changed:
            return self.changed[body]
        self.changed[body] = set()  # ends recursion
        changed = body.mutates | body.mutates_inside
        for site in body.calls:
            effects = call_effects(site, self.graph.full_path(site), set(), self.graph.trainer_classes)
            changed |= self._by_call(site, effects if site.path in self.graph.imports else {Effect.PRINT})
        follow_aliases(changed, body.aliases + self._handed(body.assigned))
        self.changed[body] = changed & set(body.params)
        return self.changed[body]

    def _globals(self, calls: list[CallSite]) -> set[str]:
        """Return the globals that the functions change which calls run."""

        def run_by(calls: list[CallSite]) -> set[DeferredBody]:
            return {called[0] for site in calls if (called := self.graph.own_body(site))}

        bodies = closure(run_by(calls), lambda body: run_by(body.calls))
        changed = (body.writes | (body.mutates - set(body.params) - self.graph.imports.keys()) for body in bodies)
        return set().union(*changed) - self.timed


def _only_known(statement: Statement) -> set[str]:
    """Return names that count as mutated only because a call with a known effect was made on them."""
    usage = statement.usage
    if not isinstance(statement.node, cst.SimpleStatementLine):
        return set()
    sites = [s for s in usage.calls if s.is_method and s.bare]
    accounted = statement.effects & _KNOWN
    if sites and all((s.tail in HARMLESS and not moves(s.tail)) or accounted for s in sites):
        return {s.root for s in sites} & usage.mutates - usage.stores
    return set()


def link(graph: Graph) -> None:
    """Connect every statement to the statements whose definitions it reads."""
    changes = Changes(graph)
    for statement in graph.statements:
        changes.of_statement(statement)
    reaching: dict[str, list[int]] = {}
    carried: dict[str, set[str]] = {}  # what an object will read later, through functions it holds
    functions: dict[str, DeferredBody] = {}
    for index, statement in enumerate(graph.statements):
        usage = statement.usage
        reads = _with_deferred(usage.reads | usage.mutates, functions)
        reads = reads.union(*(carried.get(name, ()) for name in reads))
        for name in reads:
            statement.uses.update(reaching.get(name, ()))
        functions.update(usage.defines)
        later = reads - usage.reads if not statement.effects & {Effect.TRAINER} else set(reads)
        for name in usage.writes | usage.mutates:
            carried[name] = (carried.get(name, set()) if name in usage.mutates else set()) | later - {name}
            reaching_before = reaching.get(name, []) if statement.conditional or name not in usage.writes else []
            reaching[name] = [*reaching_before, index]
    for index, statement in enumerate(graph.statements):
        statement.uses.discard(index)
        for used in statement.uses:
            graph.statements[used].used_by.add(index)


def _with_deferred(names: set[str], functions: dict[str, DeferredBody]) -> set[str]:
    """Return `names` and everything that the functions among them read when they run."""

    def read_by(name: str) -> set[str]:
        body = functions.get(name)
        return set() if body is None else body.reads | body.mutates - set(body.params)

    return closure(names, read_by)
