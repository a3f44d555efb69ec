"""Connect the statements of a notebook: which of them define what each one uses."""

from __future__ import annotations

from unsloth_ddp.notebook.analyse.changes import Changes, sets_first
from unsloth_ddp.notebook.analyse.graph import Graph
from unsloth_ddp.notebook.syntax.effects import Effect
from unsloth_ddp.notebook.syntax.usage import DeferredBody


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
        reads = _with_deferred(usage.reads | usage.mutates - usage.replaces, functions)
        for name in list(reads):
            reads |= carried.get(name, set())
        for name in reads:
            statement.uses.update(reaching.get(name, ()))
        functions.update(usage.defines)
        later = reads - usage.reads if not statement.effects & {Effect.TRAINER} else set(reads)
        for name in usage.writes | usage.mutates:
            carried[name] = (carried.get(name, set()) if name in usage.mutates else set()) | later - {name}
        for name in usage.mutates:
            reaching.setdefault(name, []).append(index)
        for name in usage.writes:
            if statement.conditional:
                reaching.setdefault(name, []).append(index)
            else:
                reaching[name] = [index]
    for index, statement in enumerate(graph.statements):
        statement.uses.discard(index)
        for used in statement.uses:
            graph.statements[used].used_by.add(index)


def _with_deferred(names: set[str], functions: dict[str, DeferredBody]) -> set[str]:
    """Return `names` and everything that the functions among them read when they run."""
    found = set(names)
    queue: list[tuple[str, frozenset[str]]] = [(name, frozenset()) for name in names]
    seen = set(queue)
    while queue:
        name, own = queue.pop()
        body = functions.get(name)
        if body is None:
            continue
        own |= sets_first(body, functions)  # a stopwatch kept in a global: what an earlier call left there is not read
        fresh = (body.reads | body.mutates - set(body.params)) - own
        found |= fresh
        further = {(read, own) for read in fresh} - seen
        seen |= further
        queue += further
    return found
