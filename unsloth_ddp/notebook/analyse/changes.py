"""Find what a call changes: its arguments, the object whose method it is, and the notebook's globals."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import Graph, Statement
from unsloth_ddp.notebook.syntax.effects import Effect, call_effects, downloads_data
from unsloth_ddp.notebook.syntax.tree import HARMLESS, RootNames, moves, root_name, sets_argument
from unsloth_ddp.notebook.syntax.usage import RETURNED, CallSite, DeferredBody, follow_aliases, gives_parts

# A call with no other effect than these, whose value nobody takes, is made for what it does to its arguments.
_MAY_CHANGE_ARGUMENTS = {Effect.LOAD, Effect.RANDOM, Effect.STATE, Effect.DATA}
_KNOWN = {Effect.INFER, Effect.SAVE, Effect.SHOW, Effect.TRAIN, Effect.FILE}


class Changes:
    """Follows calls into the notebook's own functions and methods."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[int, set[str]] = {}
        assigned = [pair for statement in graph.statements for pair in statement.usage.assigned]
        self.handed = self._handed(assigned)

    def of_statement(self, statement: Statement) -> None:
        """Add to a statement's mutations what the functions that it calls change."""
        usage = statement.usage
        usage.mutates -= _only_known(statement)
        before = set(usage.mutates)
        arguments = set().union(*(self._by_call(site, statement.effects) for site in usage.calls), set())
        changed, overwritten = self._globals(usage.calls)
        usage.mutates |= arguments | changed | overwritten
        follow_aliases(usage.mutates, self.handed)
        usage.replaces = overwritten - changed - arguments - before

    def _by_call(self, site: CallSite, effects: set[Effect]) -> set[str]:
        """Return the roots of what a call changes: arguments, and the object of a method."""
        found = self.graph.own_body(site)
        if found is None:
            told = site.root in self.graph.run_names  # a tracker takes what it is told as it is
            own_class = site.path in self.graph.functions
            made_for_it = site.bare and not told and not own_class and not effects - _MAY_CHANGE_ARGUMENTS
            return set(site.names) if made_for_it else self._set_by_library(site)
        body, bound = found
        changed = self.parameters(body)
        names = {name for param, name in _arguments(site, body, bound) if param in changed}
        if bound and body.params[:1] and body.params[0] in changed and isinstance(site.node.func, cst.Attribute):
            names.add(root_name(site.node.func) or "")
        return names - {""}

    def _set_by_library(self, site: CallSite) -> set[str]:
        """Return the first argument of a library's function that sets or loads something in it."""
        if site.root not in self.graph.imports or not sets_argument(site.tail) or not site.node.args:
            return set()
        if downloads_data(self.graph.full_path(site)):
            return set()
        return {root_name(site.node.args[0].value) or ""} - {""}

    def _handed(self, assigned: list[tuple[str, CallSite]]) -> list[tuple[str, str]]:
        """Return the aliases that calls make of functions which return a part of what they get."""
        return [(name, whole) for name, site in assigned for whole in self._parts_of_arguments(site)]

    def _parts_of_arguments(self, site: CallSite, depth: int = 0) -> set[str]:
        """Return the names of what a call gets and gives back a part of."""
        found = self.graph.own_body(site)
        if found is None or depth > 3:
            return set()
        body, bound = found
        inner = [(n, w) for n, other in body.assigned for w in self._parts_of_arguments(other, depth + 1)]
        given = {RETURNED}
        follow_aliases(given, body.aliases + inner)
        return {name for param, name in _arguments(site, body, bound) if param in given}

    def parameters(self, body: DeferredBody) -> set[str]:
        """Return the parameters of a function that it may change, itself or through what it calls."""
        if id(body) in self.known:
            return self.known[id(body)]
        self.known[id(body)] = set()  # ends recursion
        found = body.mutates | body.mutates_inside
        for site in body.calls:
            effects = call_effects(site, self.graph.full_path(site), set(), self.graph.trainer_classes)
            found |= self._by_call(site, effects if site.path in self.graph.imports else {Effect.PRINT})
        follow_aliases(found, body.aliases + self._handed(body.assigned))
        self.known[id(body)] = found & set(body.params)
        return self.known[id(body)]

    def _globals(self, calls: list[CallSite]) -> tuple[set[str], set[str]]:
        """Return the globals that calls change, and those that they overwrite without having read them."""
        graph = self.graph
        seen: set[tuple[int, frozenset[str]]] = set()
        changed: set[str] = set()
        overwritten: set[str] = set()

        def visit(site: CallSite, own: frozenset[str]) -> None:
            found = graph.own_body(site)
            if found is None or (id(found[0]), own) in seen:
                return
            body = found[0]
            seen.add((id(body), own))
            own |= sets_first(body, graph.functions)
            here = body.writes | (body.mutates - set(body.params) - graph.imports.keys())
            overwritten.update(here & own)
            changed.update(here - own)
            for inner in body.calls:
                visit(inner, own)

        for site in calls:
            visit(site, frozenset())
        return changed, overwritten - changed


def _arguments(site: CallSite, body: DeferredBody, bound: bool) -> Iterator[tuple[str, str]]:
    """Yield the parameters of a function with the names at the roots of what a call gives them."""
    params = body.params[1:] if bound else body.params
    for index, arg in enumerate(site.node.args):
        param = arg.keyword.value if arg.keyword else (params[index] if index < len(params) else "")
        roots = RootNames()
        if gives_parts(arg.value) and not arg.star:
            arg.value.visit(roots)
        for name in roots.found:
            yield param, name


def _only_known(statement: Statement) -> set[str]:
    """Return names that count as mutated only because a call with a known effect was made on them."""
    usage = statement.usage
    if not isinstance(statement.node, cst.SimpleStatementLine):
        return set()
    sites = [s for s in usage.calls if s.is_method and s.bare]
    known = statement.effects & _KNOWN
    if sites and all((s.tail in HARMLESS and not moves(s.tail)) or known for s in sites):
        return {s.root for s in sites} & usage.mutates - usage.stores
    return set()


def sets_first(body: DeferredBody, functions: dict[str, DeferredBody]) -> frozenset[str]:
    """Return the globals that a function sets before it, or a function that it calls, can read them."""
    found: set[str] = set()
    for part in (body, *(functions.get(name) for name in body.starts)):
        if part is None or not (part is body or part.only_sets):
            break
        found |= {name for name, path in part.sets.items() if path.split(".")[0] not in functions}
    return frozenset(found)
