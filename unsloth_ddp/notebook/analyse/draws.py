"""Find draws from the global random generators that need a seed, so that every process makes the same."""

from collections.abc import Iterator

from unsloth_ddp.notebook.analyse.graph import Graph, Role, Statement
from unsloth_ddp.notebook.syntax.effects import Effect, draws_from, is_trainer_call, seeded_by
from unsloth_ddp.notebook.syntax.usage import CallSite, DeferredBody

# Training draws as often as its rows ask for, which differ from process to process.
_DIVERGING = {Effect.TRAIN, Effect.LOOP}


def assign_seeds(graph: Graph) -> None:
    """Give a seed to every statement that draws for training from a generator which the notebook has not seeded yet.

    Each gets another, counted up: the same one would repeat the draws, and one for all would not hold the processes
    together, because what only one of them runs may draw as well.
    """
    seeded: set[str] = set()
    number = 0
    for index, statement in enumerate(graph.statements):
        if statement.role in (Role.DEAD, Role.DROP):
            continue
        unseeded, drawn, inside = _follow(graph, statement, seeded)
        everywhere = statement.everywhere
        on_each_node = statement.role is Role.NODE and index < graph.last_seed  # its files must be alike
        if ((everywhere and statement.needed) or on_each_node) and unseeded:
            statement.seed = (number, sorted(unseeded) if seeded else [])
            number += 1
        if everywhere and not statement.conditional:
            seeded |= inside
        if statement.role is not Role.ALL:
            seeded -= drawn  # one process has drawn, and the others may not have
        if statement.effects & _DIVERGING:
            seeded = set()


def _follow(graph: Graph, statement: Statement, seeded_before: set[str]) -> tuple[set[str], set[str], set[str]]:
    """Return the generators a statement draws from without a seed, all it draws from, and those it seeds."""
    unseeded: set[str] = set()
    drawn: set[str] = set()
    seeded: set[str] = set()
    for site in _sites(graph, statement.usage.calls, set()):
        full = graph.full_path(site)
        generator = draws_from(site, full)
        if generator is not None:
            drawn.add(generator)
            if generator not in seeded_before | seeded:
                unseeded.add(generator)
        seeded |= seeded_by(site, full)
    return unseeded, drawn, seeded


def _sites(graph: Graph, calls: list[CallSite], around: set[DeferredBody]) -> Iterator[CallSite]:
    """Yield the calls in their order, those of the notebook's own functions where these run."""
    for site in calls:
        if is_trainer_call(site, graph.trainer_classes):
            continue
        if site.path not in graph.functions:
            yield site
        for body in graph.bodies_run_by(site):
            if body not in around:
                yield from _sites(graph, body.calls, around | {body})
