"""Warn about what the conversion cannot prove to be right, at the statement it concerns."""

import re
from collections.abc import Iterator

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import SEEDS, Graph, Role, Statement
from unsloth_ddp.notebook.analyse.main_values import MainValues
from unsloth_ddp.notebook.analyse.tracked_runs import stand_in_serves
from unsloth_ddp.notebook.context import ConversionContext
from unsloth_ddp.notebook.read.host_folders import host_paths
from unsloth_ddp.notebook.read.hosts import HOST_NAMES
from unsloth_ddp.notebook.syntax.arguments import code, names_arguments, splats
from unsloth_ddp.notebook.syntax.commands import ending_line, training_line
from unsloth_ddp.notebook.syntax.effects import Effect, differs_by_process, is_keras, is_remote, is_trainer_call
from unsloth_ddp.notebook.syntax.ipython import command_of
from unsloth_ddp.notebook.syntax.tree import BUILTINS, dotted, is_dead
from unsloth_ddp.notebook.syntax.usage import CallSite, NameUsage
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
_STARTS_FEDERATION = re.compile(r"^flwr\.(\w+\.)*(start|run)_\w+$")
_FITS_SENTENCES = (
    "SentenceTransformer's fit takes a whole batch of its DataLoaders on every process: divide their batch_size by the "
    "number of processes"
)
# What may run long on a model that it gets.
_LONG = re.compile(r"(^|_)(train|fit|tune|finetune|distill|optimi[sz]e|simulate)(_|$)")
_ENDS = ("exit", "quit", "sys.exit", "SystemExit")
_SHARDS = {"prepare", "prepare_data_loader", "get_train_dataloader", "DistributedSampler"}
_COUNTS = ("device_count", "per_device_train_batch_size", "gradient_accumulation_steps", "train_batch_size")


def trains_elsewhere(graph: Graph) -> str:
    """Return why a notebook that trains in none of its cells, but by a command or at a service, is refused; or ""."""
    live = [statement for statement in graph.statements if not is_dead(statement.node)]
    sites = [(statement.cell, site) for statement in live for site in statement.usage.calls]
    effects = set().union(*(statement.effects for statement in live))
    for cell, site in () if effects.union(*graph.function_effects.values()) & SEEDS else sites:
        if line := training_line(command_of(site.node), graph.training_scripts):
            return (
                f"its only training is the command `{line}` in cell {cell}, which starts processes of its own; run "
                "that command itself on several GPUs, or give a notebook whose cells train."
            )
    for cell, site in () if effects & SEEDS else sites:
        if where := _where_it_trains(site, graph):
            return f"its only training, `{site.path}()` in cell {cell}, {where}"
    return ""


def _where_it_trains(site: CallSite, graph: Graph) -> str:
    """Return where a call trains that does not train in this process, and what to do instead; or ""."""
    if site.root in graph.remote_names and site.tail in ("train", "fit"):
        return "runs on machines of a service; choose the number of GPUs there, or give a notebook whose cells train."
    if _STARTS_FEDERATION.match(graph.full_path(site)):
        return "runs in processes that Flower starts; choose their GPUs there, or give a notebook whose cells train."
    trains = site.is_method and site.tail in ("fit", "fit_generator", "train_on_batch")
    if trains and any(map(is_keras, graph.import_roots)):
        return (
            "is that of Keras, which the launchers of PyTorch do not spread over GPUs; use keras.distribution or "
            "tf.distribute."
        )
    return ""


def trains_nothing(sources: list[str]) -> bool:
    """Return whether no cell mentions a library that trains."""
    return not any(name in source for source in sources for name in _LIBRARIES)


def check_notebook(graph: Graph, context: ConversionContext) -> list[str]:
    """Return comments with the warnings about the notebook as a whole."""
    context.cell = None
    live = [s.effects for s in graph.statements if not is_dead(s.node)]
    if not SEEDS & set().union(*graph.function_effects.values(), *live):
        return [context.warn("no trainer", "no trainer found: nothing here is known to train on several processes")]
    return []


def check_statement(statement: Statement, graph: Graph, context: ConversionContext) -> list[str]:
    """Return comments with the warnings about one statement."""
    if statement.role in (Role.DEAD, Role.DROP):
        return []
    return [context.warn(*warning) for check in _CHECKS for warning in check(statement, graph, context)]


_Warnings = Iterator[tuple[str, str]]


def _check_effects(statement: Statement, graph: Graph, context: ConversionContext) -> _Warnings:
    effects = statement.effects.union(*(graph.effects_inside(name) & {Effect.LOOP} for name in statement.usage.defines))
    everywhere = statement.everywhere
    shared = context.accelerated or statement in context.shared_loops
    goes_backward = any(site.tail == "backward" for site in statement.sites)  # and not in a function that it only calls
    if Effect.LOOP in effects and goes_backward and not (shared or Effect.TRAIN in effects):
        yield "loop", _LOOP_WITH_ACCELERATE if graph.prepares else _LOOP
    if effects & SEEDS and _breaks_by_the_clock(statement, graph):
        yield "loop", "ends by the clock: each process has its own, and those that go on wait"
    if not everywhere and any(site.path in _ENDS for site in statement.usage.calls):
        yield "exit", "ends the main process only, and the others go on: end all of them"
    if Effect.SERVER in effects:
        yield "server", "starts another process: once a node; check who must reach it"
    if Effect.PAID in effects:
        once = not everywhere or statement.takes_sent or statement.usage.defines
        who = "once, by the main process" if once else "every process does, since what it makes cannot be sent"
        yield "paid call", f"calls a service: {who}"
    if any(writer.role is not Role.NODE for writer in statement.writers):
        yield "read back", "only the main process saved this: several nodes need a shared disk"
    if Effect.INFER in effects and statement.needed and Effect.LOOP in effects:
        yield "inference", "every process generates here, in code that also trains"
    elif Effect.INFER in effects and statement.needed and not effects & SEEDS:
        yield (
            "inference",
            "every process generates here, since the training reads something that this makes or changes; "
            "put it under `if IS_MAIN:` if it only evaluates",
        )
    needs = statement.needed and everywhere and not stand_in_serves(graph, statement)
    if needs and MainValues(graph, statement).leaves_run():
        yield "tracker", "uses a tracked run that only the main process has"


def _breaks_by_the_clock(statement: Statement, graph: Graph) -> bool:
    """Return whether a loop that trains reads the clock and can break."""
    if not isinstance(statement.node, cst.For | cst.While) or "break" not in code(statement.node):
        return False
    return any(differs_by_process(graph.full_path(site)) for site in statement.usage.calls)


def _check_names(statement: Statement, graph: Graph, context: ConversionContext) -> _Warnings:
    """Warn about names that the script does not have: of cells that were left out, and of the notebook's host."""
    usage = statement.usage
    read = usage.reads.union(*(body.reads for body in usage.defines.values())) - context.bound - BUILTINS
    for name in sorted(read):
        cell = next((n for n, text in context.left_out if re.search(rf"(?<![\w.]){name}\b", text)), None)
        if cell is not None:
            yield "name", f"{name} comes from cell {cell}, which is not in the script: define it"
        elif name in HOST_NAMES:
            yield "host", f"{name} exists only on {HOST_NAMES[name]}: make it, or leave this out"
    for name in sorted(usage.reads & context.host_names):
        yield "host", f"{name} of {context.imports[name]} exists only on the host: leave this out, or replace it"


def _check_paths(statement: Statement, graph: Graph, context: ConversionContext) -> _Warnings:
    """Warn about the host's paths that a statement names for the first time in the notebook."""
    new = [path for path in host_paths(statement.node) if path not in context.host_paths]
    context.host_paths.update(new)
    for host, folders in (("Colab", "/content"), ("Kaggle", "/kaggle")):
        if paths := [path for path in new if path.startswith(folders)]:
            yield "host", f"only {host} has {', '.join(paths)}: use a path of this machine"


def _check_commands(statement: Statement, graph: Graph, context: ConversionContext) -> _Warnings:
    commands = [command_of(site.node) for site in statement.usage.calls]
    starts = [training_line(command, graph.training_scripts) for command in commands]
    for line in dict.fromkeys(filter(None, starts)):
        yield "command", f"`{line}` starts a training of its own, from one process and with the same GPUs"
    for line in dict.fromkeys(filter(None, map(ending_line, commands))):
        yield "command", f"`{line}` would end this script's processes too: leave it out"


def _check_calls(statement: Statement, graph: Graph, context: ConversionContext) -> _Warnings:
    """Warn about what starts trainings by itself, and about what trains in a module of its author's, by its name."""
    for path in dict.fromkeys(map(graph.full_path, statement.sites)):
        if path in _STARTERS:
            yield _STARTERS[path]
        if _STARTS_FEDERATION.match(path):
            yield "sizing", _STARTS_PROCESSES
    if any(site.tail == "get_peft_model" for site in statement.usage.calls) and context.idle_tower:
        yield (
            "unused weights",
            "adapters reach a tower for images, and no row has one: give finetune_vision_layers=False, or DDP waits "
            "for their gradients",
        )
    imported = [site for site in statement.usage.calls if site.root in graph.imports]
    for path in dict.fromkeys(map(graph.full_path, imported)):
        if _TRAINS_ELSEWHERE.search(path):
            yield "module", f"{path} trains in a module that is not converted: check it, or put it into the notebook"
    if not statement.everywhere:
        return
    for site in statement.usage.calls:
        library = graph.fits(site)
        if library == "sentence_transformers":
            yield "sizing", _FITS_SENTENCES
        elif library or _runs_long(site, graph):
            yield "training", f"{site.path}() may train: nothing is known to share its rows among the processes"


def _runs_long(site: CallSite, graph: Graph) -> bool:
    """Return whether an unknown function of a library gets a model, and may run long on it, by its name."""
    if site.root not in graph.imports or graph.effects_of(NameUsage(calls=[site])) or site.tail[:1].isupper():
        return False
    models = {name for name, maker in graph.assigned if maker.tail in ("from_pretrained", "get_peft_model")}
    in_module = _TRAINS_ELSEWHERE.search(graph.full_path(site))
    return not in_module and bool(site.names & models) and bool(_LONG.search(site.tail))


def _check_trainers(statement: Statement, graph: Graph, context: ConversionContext) -> _Warnings:
    for site in statement.sites:
        full = graph.full_path(site)
        if site.path in graph.trainers:
            yield "arguments", f"{site.path}() trains with a batch of its own on every process"
        if is_remote(full) or not is_trainer_call(site, graph.trainer_classes) or splats(site.node):
            continue
        if full.split(".")[0] in ("lightning", "pytorch_lightning"):
            yield "sizing", _LIGHTNING
        elif _has_rows(site) and not any(_might_be_arguments(arg, context) for arg in site.node.args):
            yield (
                "arguments",
                f"{site.tail} has no arguments object: each process takes the default batch, so the global batch "
                "is that times the number of processes",
            )


def _has_rows(site: CallSite) -> bool:
    """Return whether a trainer gets rows to train on; without them it only predicts."""
    rows = [arg for arg in site.node.args if arg.keyword is not None and arg.keyword.value.startswith("train_")]
    return bool(rows) or sum(arg.keyword is None for arg in site.node.args) > 3


def _might_be_arguments(arg: cst.Arg, context: ConversionContext) -> bool:
    """Return whether an argument of a trainer holds its arguments, by its keyword, its name or what made it."""
    if arg.keyword is not None:
        return arg.keyword.value in ("args", "config", "training_args")
    return names_arguments(arg) or dotted(arg.value) in context.known_arguments


def _check_classes(statement: Statement, graph: Graph, context: ConversionContext) -> _Warnings:
    """Warn about a trainer with a loss of its own, or with a DataLoader whose rows it does not share out."""
    trainers = [(name, body) for name, body in statement.usage.defines.items() if name in graph.trainer_classes]
    for name, body in trainers:
        if "compute_loss" in body.methods:
            yield "custom loss", f"{name} has its own compute_loss: check how it averages over tokens and processes"
        if "get_train_dataloader" in body.methods and not any(site.tail in _SHARDS for site in body.calls):
            yield (
                "data loader",
                f"{name}.get_train_dataloader makes a DataLoader of its own: unless it goes through "
                "self.accelerator.prepare, every process trains on the same rows",
            )


def _check_sizing(statement: Statement, graph: Graph, context: ConversionContext) -> _Warnings:
    """Warn about code that computes with the batch or the number of devices."""
    counts = {graph.full_path(site) for site in statement.sites if site.tail == "device_count"}
    if counts - set(DEVICE_COUNTS) and statement.role is not Role.MAIN:
        yield "sizing", "counts the GPUs itself; under DDP every process has one"
        return
    lines = statement.node.body if isinstance(statement.node, cst.SimpleStatementLine) else []
    targets = [small.targets[0].target for small in lines if isinstance(small, cst.Assign)]
    if any(isinstance(target, cst.Attribute) and target.attr.value in _COUNTS for target in targets):
        yield "sizing", "changes the batch after the arguments were made; check the global batch"


_CHECKS = (
    _check_effects, _check_names, _check_paths, _check_commands, _check_calls, _check_trainers,
    _check_classes, _check_sizing,
)  # fmt: skip
