"""Decide which processes run each statement, from the graph alone.

What reaches the model, its data, its arguments or the environment of the training runs everywhere, whatever else it
does; it is found backwards from the trainers. Of the rest, what shows, generates or saves belongs to the main process,
together with what only such statements use. Anything unknown runs everywhere, as it would have run in the notebook.
Statements that only install packages are left out, with what only they use.
"""

from collections.abc import Iterator

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import SEEDS, TOGETHER, Graph, Role, Statement
from unsloth_ddp.notebook.analyse.main_values import keep_trackers
from unsloth_ddp.notebook.analyse.plain import makes_plain_values
from unsloth_ddp.notebook.analyse.read_backs import keep_read_backs
from unsloth_ddp.notebook.syntax.effects import MAIN_ONLY, ONCE, PER_NODE, Effect
from unsloth_ddp.notebook.syntax.ipython import command_of, without_installs
from unsloth_ddp.notebook.syntax.name_usage import collect
from unsloth_ddp.notebook.syntax.tree import BUILTINS, contains, is_dead


def assign_roles(graph: Graph) -> None:
    """Give every statement its role."""
    _mark_needed(graph)
    last = graph.last_seed
    for index, statement in enumerate(graph.statements):
        statement.role = _first_role(graph, statement, after=index > last)
        if statement.role is Role.MAIN and index < last and _makes_files(statement):
            statement.role = Role.NODE  # every node reads them from a disk of its own
    _drop_installs(graph)
    keep_trackers(graph)
    _keep_handles(graph)
    _fill_files_on_each_node(graph, last)
    keep_read_backs(graph, last)
    while _settle(graph, last):
        pass
    _repeat_what_all_read(graph)
    for statement in graph.statements:
        if statement.apart and (statement.needed or makes_plain_values(graph, statement)):
            statement.share = [name for name in _needed_names(graph, statement) if name not in statement.handles]


def _mark_needed(graph: Graph) -> None:
    """Mark what training depends on, backwards from the trainers and from what sets their environment."""
    first = enumerate(graph.statements[: graph.last_seed + 1])
    for index in graph.with_used(i for i, s in first if s.effects & (SEEDS | {Effect.STATE}) and not is_dead(s.node)):
        graph.statements[index].needed = True


def _first_role(graph: Graph, statement: Statement, after: bool) -> Role:
    """Return the role by a statement's effects alone. `after`: it follows the last training."""
    effects = statement.effects
    if is_dead(statement.node):
        return Role.DEAD
    if effects & TOGETHER:
        return Role.ALL  # a guard around something that waits for every process would wait for ever
    tries = after and Effect.INFER in effects and not statement.needed  # its seeds are for what it generates
    reaches = statement.needed or (Effect.STATE in effects and not tries)
    if effects & ONCE and (not reaches or _can_be_sent(graph, statement)):
        return Role.NODE if effects & PER_NODE and not effects & {Effect.SAVE, Effect.PAID} else Role.MAIN
    if reaches:
        return Role.FIRST if effects & _IN_TURN and Effect.JOIN not in effects else Role.ALL
    if effects & MAIN_ONLY:
        return Role.MAIN
    return Role.FIRST if Effect.DATA in effects else Role.ALL


# What one process of a node does first, so that the others find it done.
_IN_TURN = {Effect.DATA, Effect.FILE, Effect.SHELL, Effect.LOGIN, Effect.TRACK}


def _can_be_sent(graph: Graph, statement: Statement) -> bool:
    """Return whether a statement that training needs may run once, and send what it makes to the others."""
    lines = statement.node.body if isinstance(statement.node, cst.SimpleStatementLine) else []
    assigns = len(lines) == 1 and isinstance(lines[0], cst.Assign) and len(lines[0].targets) == 1
    sets = Effect.STATE in statement.effects
    if not assigns and (sets or not statement.usage.writes | statement.usage.mutates):
        return False
    if Effect.SERVER in statement.effects:  # its handle stays where it was started
        return not statement.usage.imports and not statement.usage.defines
    plain = makes_plain_values(graph, statement)
    statement.share_value = plain and sets  # os.environ["KEY"] = ask()
    return plain


def _makes_files(statement: Statement) -> bool:
    """Return whether a statement makes files and does nothing else that only one process may do."""
    others = MAIN_ONLY | {Effect.TRACK, Effect.INPUT}
    if statement.share_value or statement.effects & (others - {Effect.FILE, Effect.PRINT}):
        return False
    return Effect.FILE in statement.effects and not removes_files(statement.node)


def removes_files(node: cst.BaseStatement) -> bool:
    """Return whether code removes files or moves them, which a second process would not find any more."""
    removes = {"remove", "unlink", "rmdir", "rmtree", "removedirs", "rename", "replace", "move", "symlink"}
    return any(site.tail in removes for site in collect(node).calls)


def _fill_files_on_each_node(graph: Graph, last: int) -> None:
    """Let one process on each node make what its files and commands are made of, where that only prints besides."""
    for statement in reversed(graph.statements[: last + 1]):
        if statement.role is Role.NODE:
            for maker in (graph.statements[i] for i in statement.uses):
                if maker.role is Role.MAIN and maker.effects <= {Effect.PRINT, Effect.SHOW}:
                    maker.role = Role.NODE


def _needed_names(graph: Graph, statement: Statement) -> list[str]:
    """Return names bound by a statement that runs once and read by statements on every process."""
    usage = statement.usage
    readers = [reader for reader in (graph.statements[i] for i in statement.used_by) if reader.everywhere]
    read = set().union(*(_all_reads(graph, reader) for reader in readers))
    read |= {name for reader in readers for body in reader.usage.defines.values() for name in body.reads}
    return sorted((usage.writes | usage.mutates) & read)


def _keep_handles(graph: Graph) -> None:
    """Keep what uses a server's handle on the process that made it: a handle cannot be sent."""
    handles: set[str] = set()
    for statement in graph.statements:
        usage = statement.usage
        if statement.role is Role.NODE and Effect.SERVER in statement.effects:
            handles |= usage.writes
            statement.handles = usage.writes
        elif statement.everywhere and not statement.effects & SEEDS and not usage.defines:
            if usage.reads & handles and not usage.imports:
                statement.role = Role.NODE
        elif statement.role is Role.ALL:
            handles -= usage.writes if not statement.conditional else set()
        statement.handles = statement.handles | (usage.mutates & handles)


# Settling ------------------------------------------------------------------------------------------------------------


def _settle(graph: Graph, last: int) -> bool:
    """Move statements to the main process that read only its names, or that only it uses; True if any moved."""
    moved = False
    for index, statement in enumerate(graph.statements):
        if not statement.everywhere or statement.needed or statement.effects & TOGETHER:
            continue
        role = _role_of_what_it_reads(graph, statement)
        if role is None and _only_main_uses(graph, index, statement, last):
            role = _role_of_users(graph, statement)
        if role is not None:
            statement.role = role
            moved = True
    for statement in _reloaded_to_be_tried(graph, last):
        statement.role = _role_of_users(graph, statement)
        moved = True
    for statement in graph.statements:
        if (
            statement.role is Role.NODE
            and not statement.needed
            and _role_of_what_it_reads(graph, statement) is Role.MAIN
        ):
            statement.role = Role.MAIN
            moved = True
    return moved


def _role_of_what_it_reads(graph: Graph, statement: Statement) -> Role | None:
    """Return the role of what alone makes, or fills, something that a statement reads; None if every process has it."""
    roles = {maker.role for _, maker in _made_apart(graph, statement)}
    return Role.MAIN if Role.MAIN in roles else Role.NODE if roles else None


def _made_apart(graph: Graph, statement: Statement) -> Iterator[tuple[str, Statement]]:
    """Yield the names that a statement reads and that not every process has, or has filled, with what makes them."""
    names = _all_reads(graph, statement)
    earlier = [graph.statements[i] for i in sorted(statement.uses)]
    for name in sorted(names):
        makers = [s for s in earlier if name in s.usage.writes]
        shared = any(name in s.share or (s.needed and name not in s.handles) for s in makers)
        bound = [s for s in makers if s.apart]
        if bound and not shared and all(not s.everywhere for s in makers):
            yield from ((name, s) for s in bound)
        if name not in graph.imports:
            filled = [s for s in earlier if s.apart and not s.needed and name in _filled(s)]
            yield from ((name, s) for s in filled)


def _all_reads(graph: Graph, statement: Statement) -> set[str]:
    """Return the names that a statement reads, also in the functions that it uses."""
    names = statement.usage.reads | statement.usage.mutates
    return names.union(*(graph.functions[name].reads for name in names & graph.functions.keys()))


def _filled(statement: Statement) -> set[str]:
    """Return the names whose contents a statement changes: entries, attributes, elements."""
    return statement.usage.mutates - statement.usage.writes - statement.handles - set(statement.share)


# What a process may do again beside the main one: it changes nothing but what the notebook's names hold.
_REPEATABLE = {
    Effect.PRINT,
    Effect.SHOW,
    Effect.STATS,
    Effect.INFER,
    Effect.RANDOM,
    Effect.DATA,
    Effect.LOAD,
    Effect.MODE,
}


def _repeat_what_all_read(graph: Graph) -> None:
    """Run on every process what makes, or fills, something that a statement on every process reads."""
    queue = [s for s in graph.statements if s.everywhere]
    while queue:
        reader = queue.pop()
        for _, maker in [] if reader.usage.defines else _made_apart(graph, reader):
            if maker.role is Role.MAIN and maker.effects <= _REPEATABLE and not maker.handles:
                maker.role = Role.ALL
                queue.append(maker)


def _role_of_users(graph: Graph, statement: Statement) -> Role:
    """Return the role of what only one process uses: what one on each node uses has to be there on each."""
    users = {graph.statements[i].role for i in statement.used_by}
    return Role.NODE if Role.NODE in users else Role.MAIN


def _reloaded_to_be_tried(graph: Graph, last: int) -> list[Statement]:
    """Return statements after the training that together serve only the main process.

    A model that is loaded to be tried is of no use to the others, nor is what follows it: `model.eval()`,
    `model = PeftModel.from_pretrained(model, ...)`. One by one each would keep the others everywhere.
    """
    statements = graph.statements
    group = {
        i
        for i, s in enumerate(statements)
        if i > last and s.everywhere and not s.needed
        if not s.effects & (TOGETHER | {Effect.MODE, Effect.STATE}) and not s.usage.imports and not s.usage.defines
    }
    while outside := {i for i in group if not _stays_within(graph, i, group)}:
        group -= outside
    serving: set[int] = set()
    while grown := {i for i in group - serving if _serves(graph, i, serving)}:
        serving |= grown
    return [statements[i] for i in sorted(serving)]


def _stays_within(graph: Graph, index: int, group: set[int]) -> bool:
    """Return whether only the main process or the group uses a statement, and whether its objects are the group's."""
    statement = graph.statements[index]
    for i in statement.used_by:
        user = graph.statements[i]
        if i not in group and user.everywhere and Effect.MODE not in user.effects:
            return False
    return bool(statement.usage.writes) or bool(_defined_within(graph, index, group))


def _serves(graph: Graph, index: int, serving: set[int]) -> bool:
    statement = graph.statements[index]
    if not statement.usage.writes:
        return bool(_defined_within(graph, index, serving))
    return any(i in serving or graph.statements[i].apart for i in statement.used_by)


def _defined_within(graph: Graph, index: int, group: set[int]) -> set[str]:
    """Return the names that a statement reads and that only statements of the group bind."""
    statement = graph.statements[index]
    names = statement.usage.reads | statement.usage.mutates
    binders = {name: {i for i in statement.uses if name in graph.statements[i].usage.writes} for name in names}
    return {name for name, statements in binders.items() if statements and statements <= group}


def _only_main_uses(graph: Graph, index: int, statement: Statement, last: int) -> bool:
    users = [graph.statements[i] for i in statement.used_by]
    live = [user for user in users if user.role is not Role.DEAD]
    if index > last:  # a model reloaded to be tried: its for_inference follows it
        live = [user for user in live if Effect.MODE not in user.effects]
    if not live or any(not user.apart for user in live):
        return False
    usage = statement.usage
    if usage.imports or usage.defines or not usage.writes or Effect.MODE in statement.effects:
        return False
    if Effect.LOAD in statement.effects and (index < last or last < 0):
        return False
    return index > last or not _may_change_what_training_needs(graph, statement)


def _may_change_what_training_needs(graph: Graph, statement: Statement) -> bool:
    """Return whether an unknown function gets an object that training reads, and might change it."""
    needed = set().union(*(s.usage.reads for s in graph.statements if s.needed), set())
    for site in statement.usage.calls:
        is_known = site.is_method or site.path in BUILTINS or site.path[:1].isupper() or site.path in graph.functions
        # A name that is not imported is an object such as a tokenizer rather than a function from a library.
        if not is_known and site.names & needed and site.path in graph.imports:
            return True
    return False


def _drop_installs(graph: Graph) -> None:
    """Drop statements that only install, then what only they used."""
    statements = graph.statements
    touched = {s.cell for s in statements if _has_install(s)}
    for statement in statements:
        if _only_installs(statement):
            statement.role = Role.DROP
    remaining = [s for s in statements if s.role not in (Role.DROP, Role.DEAD) and s.cell in touched]
    while helper := next((s for s in remaining if s.role is not Role.DROP and _serves_installs(graph, s)), None):
        helper.role = Role.DROP


def _has_install(statement: Statement) -> bool:
    """Return whether a statement installs something anywhere inside."""
    return any(_installs(site.node) is not None for site in statement.usage.calls)


def _only_installs(statement: Statement) -> bool:
    """Return whether nothing is left of a statement once its installs are removed."""
    lines = statement.node.body if isinstance(statement.node, cst.SimpleStatementLine) else [None]
    return all(isinstance(line, cst.Expr) and _is_install(line.value) for line in lines)


def _is_install(value: cst.BaseExpression) -> bool:
    return isinstance(value, cst.Call) and _installs(value) == ""


def _installs(node: cst.Call) -> str | None:
    """Return a call's shell command without its installs; None where it installs nothing."""
    command = command_of(node)
    rest, _ = without_installs(command)
    return None if rest == command else rest


def _serves_installs(graph: Graph, statement: Statement) -> bool:
    """Return whether a statement does nothing but prepare installs."""
    if contains(statement.node, _does_more):
        return False
    users = [graph.statements[i] for i in statement.used_by]
    if any(user.role is not Role.DROP for user in users):
        return False
    if users or _has_install(statement):
        return not statement.needed
    names = statement.usage.imports
    return bool(names) and all(path.split(".")[0] in _STDLIB for path in names.values())


_STDLIB = {"os", "re", "sys", "importlib", "subprocess", "shutil", "pathlib", "platform", "warnings"}


def _does_more(node: cst.CSTNode) -> bool:
    """Return whether a part of a statement does more than import, assign plain names and install."""
    match node:
        case cst.Expr(value=value):
            return not isinstance(value, cst.SimpleString) and not _is_install(value)
        case cst.AssignTarget(target=target):
            return isinstance(target, cst.Attribute | cst.Subscript)
    return isinstance(node, cst.FunctionDef | cst.ClassDef | cst.Raise | cst.Assert | cst.Del | cst.AugAssign)
