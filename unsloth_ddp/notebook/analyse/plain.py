"""Decide whether what a statement makes is plain: text, numbers, lists of them. Only that is sent to other processes.

What holds a model, arguments, a dataset or a device belongs to the process that made it. So a value is plain only where
every call that it comes from is known to give nothing else: Python's own functions, commands, services, what lives on
one process only, and the notebook's functions that call nothing else.
"""

import sys

from unsloth_ddp.notebook.analyse.graph import Graph, Statement
from unsloth_ddp.notebook.syntax.effects import ONCE, Effect, call_effects
from unsloth_ddp.notebook.syntax.tree import BUILTINS
from unsloth_ddp.notebook.syntax.usage import CallSite, NameUsage

# Third-party functions that hand through what they get, or give text.
_HAND_ON = {"tqdm", "requests", "httpx", "yaml", "dotenv", "json5", "regex"}
# What gives an open file, a pipe or a connection, which cannot be sent.
_OPENS = {"open", "popen", "connect"}
_KNOWN = ONCE | {Effect.INPUT, Effect.PRINT, Effect.SHOW}


def makes_plain_values(graph: Graph, statement: Statement) -> bool:
    """Return whether everything that a statement binds or changes is plain."""
    usage = statement.usage
    opens = any(graph.gives(site, lambda call: call.tail in _OPENS) for _, site in usage.assigned)
    if opens or usage.imports or usage.defines or not gives_plain_values(graph, statement, usage):
        return False
    earlier = [graph.statements[i] for i in statement.uses]
    changed = usage.mutates | (usage.writes if statement.conditional else set())
    return all(_is_plain(graph, other) for other in earlier if other.usage.writes & changed)


def gives_plain_values(graph: Graph, statement: Statement, usage: NameUsage) -> bool:
    """Return whether every call in a statement, or in the part of it that uses names so, gives plain values."""
    return all(_gives_plain(graph, statement, site, frozenset()) for site in usage.calls)


def _is_plain(graph: Graph, statement: Statement, followed: frozenset[object] = frozenset()) -> bool:
    """Return whether a definition holds plain values, or belongs to one process anyway."""
    if statement.apart or statement in followed:
        return statement.apart
    return all(_gives_plain(graph, statement, site, followed | {statement}) for site in statement.usage.calls)


def _gives_plain(graph: Graph, statement: Statement, site: CallSite, followed: frozenset[object]) -> bool:
    """Return whether a call that a statement makes, itself or in a function, gives a plain value."""
    body_of_call = graph.own_body(site)
    if body_of_call is not None:
        body, of_object = body_of_call
        if of_object or body in followed:
            return not of_object
        return all(_gives_plain(graph, statement, inner, followed | {body}) for inner in body.calls)
    if site.path in graph.functions:
        return False  # an instance of a class
    full = graph.full_path(site)
    effects = call_effects(site, full, set(), graph.trainer_classes)
    if site.root in graph.imports:
        libraries = sys.stdlib_module_names | _HAND_ON
        return full.split(".")[0] in libraries or bool(effects & _KNOWN)
    if effects & _KNOWN or site.path in BUILTINS or site.path == "get_ipython":
        return True
    makers = [graph.statements[i] for i in statement.uses if site.root in graph.statements[i].usage.writes]
    return site.is_method and all(other is not statement and _is_plain(graph, other, followed) for other in makers)
