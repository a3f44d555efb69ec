"""Warn about what the conversion cannot prove to be right, at the statement it concerns."""

from __future__ import annotations

import re

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import SEEDS, Graph, Role, Statement, is_dead
from unsloth_ddp.notebook.analyse.main_values import MainValues
from unsloth_ddp.notebook.analyse.stand_ins import stand_in_serves
from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.read.host_folders import check_paths
from unsloth_ddp.notebook.read.hosts import HOST_NAMES
from unsloth_ddp.notebook.syntax.arguments import code, names_arguments, splats
from unsloth_ddp.notebook.syntax.commands import ending_line, training_line
from unsloth_ddp.notebook.syntax.effects import Effect, differs_by_process, is_remote, is_trainer_call
from unsloth_ddp.notebook.syntax.ipython import command_of
from unsloth_ddp.notebook.syntax.tree import BUILTINS, dotted
from unsloth_ddp.notebook.write.load import DEVICE_COUNTS

# Code that mentions none of these has nothing to do with a model.
_LIBRARIES = ("unsloth", "transformers", "trl", "peft", "torch", "from_pretrained", "Trainer(", ".backward(")
_STARTS_PROCESSES = "starts processes itself, as the launcher does; call its function instead"
# What starts trainings by itself, and why that cannot be combined with a launcher.
_STARTERS = {
    "wandb.agent": ("tracker", "a sweep gives every process values of its own; start each trial by itself"),
    "optuna.create_study": ("tracker", "a study gives every process values of its own; start each trial by itself"),
    "accelerate.notebook_launcher": ("sizing", _STARTS_PROCESSES),
    "torch.multiprocessing.spawn": ("sizing", _STARTS_PROCESSES),
}
_LOOP = "a hand-written training loop: its gradients are not averaged over processes"
_LOOP_WITH_ACCELERATE = (
    "Accelerate averages the gradients of this loop; every process takes a whole batch of the DataLoader, so divide "
    "its batch_size by the number of processes to keep the global batch"
)
_LIGHTNING = (
    "Lightning's Trainer takes what it is told for the number of processes: set devices and num_nodes to those of the "
    "launch, and divide accumulate_grad_batches by the number of processes"
)
_TRAINS_ELSEWHERE = re.compile(
    r"^(\w+\.)*\w*(train|finetun|fine_tun)\w*\.(\w+\.)*(run_|main_)?(train|finetune|fine_tune)(_\w+)?$"
)
_ENDS = ("exit", "quit", "sys.exit", "SystemExit")
_OWN_LOADERS = ("get_train_dataloader",)
_SHARDS = {"prepare", "prepare_data_loader", "get_train_dataloader", "DistributedSampler"}
_COUNTS = ("device_count", "per_device_train_batch_size", "gradient_accumulation_steps", "train_batch_size")


def only_training_command(graph: Graph) -> tuple[int, str] | None:
    """Return the cell and the command that trains, where no cell trains otherwise."""
    live = [statement for statement in graph.statements if not is_dead(statement.node)]
    if set().union(*(s.effects for s in live), *graph.function_effects.values()) & SEEDS:
        return None
    found = ((s.cell, training_line(command_of(site.node))) for s in live for site in s.usage.calls)
    return next(((cell, line) for cell, line in found if line), None)


def only_remote_training(graph: Graph) -> tuple[int, str] | None:
    """Return the cell and the call that starts a training elsewhere, where no statement trains here."""
    live = [statement for statement in graph.statements if not is_dead(statement.node)]
    if any(statement.effects & SEEDS for statement in live):
        return None
    found = (
        (s.cell, site.path)
        for s in live
        for site in s.usage.calls
        if site.root in graph.remote_names and site.tail in ("train", "fit")
    )
    return next(found, None)


def trains_nothing(sources: list[str]) -> bool:
    """Return whether no cell mentions a library that trains."""
    return not any(name in source for source in sources for name in _LIBRARIES)


def check_notebook(graph: Graph, context: ConversionContext) -> list[str]:
    """Return comments with the warnings about the notebook as a whole."""
    live = [s for s in graph.statements if not is_dead(s.node)]
    functions = set().union(*graph.function_effects.values(), set())
    effects = functions.union(*(s.effects for s in live))
    context.cell = None
    if not effects & SEEDS:
        return [context.warn("no trainer", "no trainer found: nothing here is known to train on several processes")]
    return []


def check_statement(statement: Statement, graph: Graph, context: ConversionContext) -> list[str]:
    """Return comments with the warnings about one statement."""
    if statement.role in (Role.DEAD, Role.DROP):
        return []
    effects = set(statement.effects)
    for name in statement.usage.defines:
        effects |= graph.class_effects(name) & {Effect.LOOP}
    notes = []
    if Effect.LOOP in effects and not (effects & {Effect.TRAIN} or _only_calls(statement)):
        shared = context.accelerated or id(statement) in context.shared_loops
        if not shared:
            notes.append(context.warn("loop", _LOOP_WITH_ACCELERATE if graph.prepares else _LOOP))
    if effects & SEEDS and _breaks_by_the_clock(statement, graph):
        notes.append(context.warn("loop", "ends by the clock: each process has its own, and those that go on wait"))
    if statement.role in (Role.MAIN, Role.NODE) and any(site.path in _ENDS for site in statement.usage.calls):
        notes.append(context.warn("exit", "ends the main process only, and the others go on: end all of them"))
    if Effect.SERVER in statement.effects:
        notes.append(context.warn("server", "starts another process: once a node; check who must reach it"))
    if Effect.PAID in statement.effects:
        once = statement.role not in (Role.ALL, Role.FIRST) or statement.takes_sent or statement.usage.defines
        who = "once, by the main process" if once else "every process does, since what it makes cannot be sent"
        notes.append(context.warn("paid call", f"calls a service: {who}"))
    if statement.reads_one_node:
        notes.append(context.warn("read back", "only the main process saved this: several nodes need a shared disk"))
    if Effect.INFER in effects and statement.needed and not effects & {Effect.TRAIN, Effect.TRAINER}:
        notes.append(
            context.warn(
                "inference",
                "every process generates here, since the training reads something that this makes or changes; "
                "put it under `if IS_MAIN:` if it only evaluates",
            )
        )
    shared = statement.needed and statement.role in (Role.ALL, Role.FIRST) and not stand_in_serves(graph, statement)
    if shared and MainValues(graph, statement).leaves_run():
        notes.append(context.warn("tracker", "uses a tracked run that only the main process has"))
    if Effect.FILE in statement.effects and re.search("(site|dist)-packages", code(statement.node)):
        notes.append(context.warn("install", "reaches installed packages: leave this out if it changes them"))
    notes += _check_optimizer(statement, context)
    notes += _check_names(statement, context)
    notes += check_paths(statement.node, context)
    notes += _check_commands(statement, context)
    notes += [context.warn(*_STARTERS[path]) for path in _starters(statement, graph)]
    notes += _check_modules(statement, graph, context)
    notes += _check_trainers(statement, graph, context)
    notes += _check_loss(statement, graph, context)
    notes += _check_loaders(statement, graph, context)
    notes += _check_sizing(statement, graph, context)
    return notes


def _breaks_by_the_clock(statement: Statement, graph: Graph) -> bool:
    """Return whether a loop that trains reads the clock and can break."""
    if not isinstance(statement.node, cst.For | cst.While) or "break" not in code(statement.node):
        return False
    return any(differs_by_process(graph.full_path(site)) for site in statement.usage.calls)


def _check_names(statement: Statement, context: ConversionContext) -> list[str]:
    """Warn about names that the script does not have: of cells that were left out, and of the notebook's host."""
    usage = statement.usage
    read = usage.reads.union(*(body.reads for body in usage.defines.values())) - context.bound - BUILTINS
    notes = []
    for name in sorted(read):
        cell = next((n for n, text in context.left_out if re.search(rf"(?<![\w.]){name}\b", text)), None)
        if cell is not None:
            notes.append(context.warn("name", f"{name} comes from cell {cell}, which is not in the script: define it"))
        elif name in HOST_NAMES:
            notes.append(context.warn("host", f"{name} exists only on {HOST_NAMES[name]}: make it, or leave this out"))
    for name in sorted(usage.reads & context.host_names):
        notes.append(
            context.warn(
                "host", f"{name} of {context.imports[name]} exists only on the host: leave this out, or replace it"
            )
        )
    return notes


def _check_optimizer(statement: Statement, context: ConversionContext) -> list[str]:
    """Warn about an optimizer that steps while it goes backward, wherever its name is written."""
    found = _Strings.ending(statement.node, "_layerwise")
    return [
        context.warn("optimizer", f"{name!r} works on one process only: use it without layerwise") for name in found
    ]


class _Strings(cst.CSTVisitor):
    """Collects the strings that end so."""

    def __init__(self, ending: str) -> None:
        self.wanted, self.found = ending, list[str]()

    @classmethod
    def ending(cls, node: cst.CSTNode, ending: str) -> list[str]:
        visitor = cls(ending)
        node.visit(visitor)
        return list(dict.fromkeys(visitor.found))

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        value = node.evaluated_value
        if isinstance(value, str) and value.endswith(self.wanted):
            self.found.append(value)


def _check_commands(statement: Statement, context: ConversionContext) -> list[str]:
    commands = [command_of(site.node) for site in statement.usage.calls]
    trains = dict.fromkeys(line for line in map(training_line, commands) if line)
    ends = dict.fromkeys(line for line in map(ending_line, commands) if line)
    starts = "starts a training of its own, from one process and with the same GPUs"
    notes = [context.warn("command", f"`{line}` {starts}") for line in trains]
    return notes + [
        context.warn("command", f"`{line}` would end this script's processes too: leave it out") for line in ends
    ]


def _starters(statement: Statement, graph: Graph) -> list[str]:
    sites = [*statement.usage.calls, *(c for body in statement.usage.defines.values() for c in body.calls)]
    return [path for path in dict.fromkeys(graph.full_path(site) for site in sites) if path in _STARTERS]


def _check_modules(statement: Statement, graph: Graph, context: ConversionContext) -> list[str]:
    """Warn about a function that trains in a module of its author's, by its name and the module's."""
    sites = [site for site in statement.usage.calls if site.root in graph.imports]
    paths = [path for path in dict.fromkeys(map(graph.full_path, sites)) if _TRAINS_ELSEWHERE.search(path)]
    return [
        context.warn(
            "module", f"{path} trains in a module that is not converted: check it, or put it into the notebook"
        )
        for path in paths
    ]


def _only_calls(statement: Statement) -> bool:
    """Return whether the loop is in a function that the statement calls; the function carries the warning."""
    return not statement.usage.defines and not any(s.tail == "backward" for s in statement.usage.calls)


def _check_trainers(statement: Statement, graph: Graph, context: ConversionContext) -> list[str]:
    notes = []
    sites = [*statement.usage.calls, *(c for body in statement.usage.defines.values() for c in body.calls)]
    for site in sites:
        full = graph.full_path(site)
        if site.path in graph.callable_trainers:
            notes.append(context.warn("arguments", f"{site.path}() trains with a batch of its own on every process"))
        if is_remote(full) or not is_trainer_call(site, graph.trainer_classes) or splats(site.node):
            continue
        if graph.full_path(site).split(".")[0] in ("lightning", "pytorch_lightning"):
            notes.append(context.warn("sizing", _LIGHTNING))
        elif not any(_might_be_arguments(arg, context) for arg in site.node.args):
            notes.append(
                context.warn(
                    "arguments",
                    f"{site.tail} has no arguments object: each process takes the default batch, so the global batch "
                    "is that times the number of processes",
                )
            )
    return notes


def _might_be_arguments(arg: cst.Arg, context: ConversionContext) -> bool:
    """Return whether an argument of a trainer holds its arguments, by its keyword, its name or what made it."""
    if arg.keyword is not None:
        return arg.keyword.value in ("args", "config", "training_args")
    return names_arguments(arg) or dotted(arg.value) in context.known_arguments


def _check_loaders(statement: Statement, graph: Graph, context: ConversionContext) -> list[str]:
    """Warn about a trainer that makes its own DataLoader and does not share the rows out."""
    return [
        context.warn(
            "data loader",
            f"{name}.{method} makes a DataLoader of its own: unless it goes through self.accelerator.prepare, "
            "every process trains on the same rows",
        )
        for name, body in statement.usage.defines.items()
        for method in _OWN_LOADERS
        if name in graph.trainer_classes and method in body.methods
        if not any(site.tail in _SHARDS for site in body.calls)
    ]


def _check_loss(statement: Statement, graph: Graph, context: ConversionContext) -> list[str]:
    return [
        context.warn("custom loss", f"{name} has its own compute_loss: check how it averages over tokens and processes")
        for name, body in statement.usage.defines.items()
        if name in graph.trainer_classes and "compute_loss" in body.methods
    ]


def _check_sizing(statement: Statement, graph: Graph, context: ConversionContext) -> list[str]:
    """Warn about code that computes with the batch or the number of devices."""
    sites = [*statement.usage.calls, *(c for body in statement.usage.defines.values() for c in body.calls)]
    counts = [graph.full_path(site) for site in sites if site.tail == "device_count"]
    if set(counts) - set(DEVICE_COUNTS) and statement.role is not Role.MAIN:
        return [context.warn("sizing", "counts the GPUs itself; under DDP every process has one")]
    if isinstance(statement.node, cst.SimpleStatementLine) and any(_sets_batch(small) for small in statement.node.body):
        return [context.warn("sizing", "changes the batch after the arguments were made; check the global batch")]
    return []


def _sets_batch(small: cst.BaseSmallStatement) -> bool:
    if not isinstance(small, cst.Assign):
        return False
    target = small.targets[0].target
    return isinstance(target, cst.Attribute) and target.attr.value in _COUNTS
