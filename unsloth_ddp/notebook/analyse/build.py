"""Build the graph of a notebook from the statements of its cells."""

from collections.abc import Iterable

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import Graph, Statement, sets_process
from unsloth_ddp.notebook.read.displayed import is_bare_value
from unsloth_ddp.notebook.syntax.effects import Effect, TrainerClasses, names_trainer
from unsloth_ddp.notebook.syntax.name_usage import collect
from unsloth_ddp.notebook.syntax.tree import assignment, dotted, full_path
from unsloth_ddp.notebook.syntax.usage import DeferredBody, follow_aliases, given_names


def build(cells: Iterable[tuple[int, Iterable[cst.BaseStatement]]]) -> Graph:
    """Build the graph of all cells' statements."""
    statements = [Statement(number, node, collect(node)) for number, body in cells for node in body]
    imports = {name: path for statement in statements for name, path in statement.usage.imports.items()}
    imports |= _other_names_of_classes(statements, imports)
    functions = {name: body for statement in statements for name, body in statement.usage.defines.items()}
    aliases = [pair for statement in statements for pair in statement.usage.aliases]
    for statement in statements:
        follow_aliases(statement.usage.mutates, aliases)
        if sets_process(statement.usage.stores, imports):
            statement.effects.add(Effect.STATE)
        # A module's function changes its arguments or the world, not the name it was imported under.
        statement.usage.mutates -= imports.keys()
    sites = [(site, functions.get(site.path)) for statement in statements for site in statement.sites]
    aliases += [pair for site, body in sites if body is not None for pair in given_names(site, body, bound=False)]
    graph = Graph(statements, imports, functions, _trainer_classes(functions, imports, aliases), aliases)
    for statement in statements:
        statement.effects |= graph.effects_of(statement.usage)
        if statement.usage.iterates & graph.shared:
            statement.effects.add(Effect.SYNC)
        if is_bare_value(statement.node):
            statement.effects.add(Effect.SHOW)
    return graph


def _other_names_of_classes(statements: list[Statement], imports: dict[str, str]) -> dict[str, str]:
    """Return the paths of imported classes by the names that lines give them: `loader = FastLanguageModel`."""
    pairs = filter(None, (assignment(statement.node) for statement in statements))
    names = {target.value: dotted(value) for target, value in pairs if isinstance(target, cst.Name)}
    paths = {name: full_path(path, imports) for name, path in names.items() if path.split(".")[0] in imports}
    return {name: path for name, path in paths.items() if path.split(".")[-1][:1].isupper()}


def _trainer_classes(
    functions: dict[str, DeferredBody], imports: dict[str, str], aliases: list[tuple[str, str]]
) -> TrainerClasses:
    """Return what the notebook calls trainers' classes: imported, its own that inherit from one, other names."""
    names = {name for name, body in functions.items() if any(base.endswith("Trainer") for base in body.bases)}
    names |= {name for name, path in imports.items() if names_trainer(path.split(".")[-1])}
    other = [*aliases, *((name, base) for name, body in functions.items() for base in body.bases)]
    follow_aliases(names, [(of, name) for name, of in other])
    classes = TrainerClasses(names)
    classes.others = frozenset(functions.keys() - names)
    return classes
