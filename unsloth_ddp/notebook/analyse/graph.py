"""Build the graph of a notebook: its top-level statements, and which of them define what each one uses."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

import libcst as cst

from unsloth_ddp.notebook.syntax.arguments import code, keyword
from unsloth_ddp.notebook.syntax.effects import (
    REMOTE_STARTS,
    Effect,
    TrainerClasses,
    call_effects,
    downloads_data,
    is_keras,
    is_remote,
    is_trainer_call,
    makes_accelerator,
    makes_trainer,
    starts_run,
)
from unsloth_ddp.notebook.syntax.ipython import FILE_CELLS, ipython_call
from unsloth_ddp.notebook.syntax.tree import closure, dotted, full_path, names_in, root_name
from unsloth_ddp.notebook.syntax.usage import (
    NAMESPACE,
    RETURNED,
    CallSite,
    DeferredBody,
    NameUsage,
    follow_aliases,
)

_COUNTS_PROCESSES = re.compile(
    r"""^(int\()?[\w.]*(environ\b.*["']WORLD_SIZE["']|getenv\(["']WORLD_SIZE["']|get_world_size\()"""
)
SEEDS = {Effect.TRAIN, Effect.TRAINER, Effect.LOOP}
# What every process must run together.
TOGETHER = SEEDS | {Effect.SYNC, Effect.GATHER}
# Effects that a function hands on to a call it is merely passed to, such as dataset.map(function).
_THROUGH_ARGUMENTS = {Effect.PAID, Effect.FILE, Effect.SERVER, Effect.PRINT, Effect.RANDOM, Effect.SHELL, *TOGETHER}

_TRAINS = {"train", "evaluate", "predict"}
# Methods that train what they are called on, but for those of libraries that train on arrays, in one process.
_FITS = re.compile(r"^(fit|fit_one_cycle|fine_?tune|train_model|old_fit)$")
_OF_LEARNERS = ("fit_one_cycle", "fine_tune")
_FITS_ARRAYS = {"sklearn", "umap", "hdbscan", "xgboost", "lightgbm", "catboost", "statsmodels", "scipy", "imblearn"}
_FITS_ARRAYS |= {"bertopic", "prophet", "cuml", "tokenizers", "gensim", "pandas", "numpy"}
_TRAINING_CODE = re.compile(r"\.backward\(|Trainer\(|\.fit\(")
_SETS_LIBRARY = ("set_", "use_", "enable_", "disable_")
# Methods of an accelerator that wait for nobody.
_ALONE = {"print", "log", "unwrap_model", "get_state_dict", "free_memory", "clear", "save", "autocast", "accumulate"}
# What a DataLoader of these iterates over is drawn together by all processes.
_LOADERS_OF_TRAINERS = {"get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"}


class Role(Enum):
    """The processes that run a top-level statement."""

    ALL = "every process"
    FIRST = "every process, the main one first"
    MAIN = "main process only"
    NODE = "one process a node"
    DEAD = "never"
    DROP = "removed"


@dataclass(eq=False)
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
    # The number of the seed that it needs, and the generators: all of them, if none is named.
    seed: tuple[int, list[str]] | None = None
    lines_before: list[cst.BaseStatement] = field(default_factory=list)  # lines of the script that it needs first
    runs: frozenset[str] = frozenset()  # names that hold a tracked run just before this
    configs: frozenset[str] = frozenset()  # names that hold the config of one
    takes_sent: bool = False  # the main process sends it values
    stands_in: bool = False  # the other processes get a stand-in for the run that it starts
    writers: list["Statement"] = field(default_factory=list)  # what saved the paths that it reads back
    timed: frozenset[str] | None = None  # names of clock readings used for durations only; None ignores clocks

    @property
    def sites(self) -> list[CallSite]:
        """Return its calls, and those of the functions that it defines."""
        return [*self.usage.calls, *(site for body in self.usage.defines.values() for site in body.calls)]

    @property
    def everywhere(self) -> bool:
        """Return whether every process runs it."""
        return self.role in (Role.ALL, Role.FIRST)

    @property
    def apart(self) -> bool:
        """Return whether one process runs it, of the job or of each node."""
        return self.role in (Role.MAIN, Role.NODE)

    @property
    def conditional(self) -> bool:
        """Return whether its writes may not happen, so that earlier definitions stay visible."""
        return isinstance(self.node, cst.If | cst.For | cst.While | cst.Try | cst.TryStar | cst.Match)


@dataclass
class Graph:
    """Hold a notebook's statements in order, and the effects of its calls, followed into its own functions."""

    statements: list[Statement]
    imports: dict[str, str]
    functions: dict[str, DeferredBody]
    trainer_classes: TrainerClasses
    aliases: list[tuple[str, str]]
    _effects: dict[str, set[Effect]] = field(default_factory=dict)  # of functions, as far as they were asked for

    # What names hold --------------------------------------------------------------------------------------------------

    @cached_property
    def assigned(self) -> list[tuple[str, CallSite]]:
        """Return all names that are assigned the value of a call, with the call."""
        return [pair for statement in self.statements for pair in statement.usage.assigned]

    def _holding(self, matches: Callable[[CallSite], object]) -> frozenset[str]:
        return frozenset(name for name, site in self.assigned if matches(site))

    @cached_property
    def run_names(self) -> frozenset[str]:
        """Return the names that hold a tracker's run anywhere in the notebook."""
        return self._holding(lambda site: starts_run(self.full_path(site)))

    @cached_property
    def counts_of_processes(self) -> frozenset[str]:
        """Return the names that hold the number of processes, as the launcher or a library says it."""
        return self._holding(lambda site: _COUNTS_PROCESSES.search(code(site.node)))

    @cached_property
    def remote_names(self) -> frozenset[str]:
        """Return the names that hold a trainer, an estimator or a client of a service that trains elsewhere."""
        return self._holding(lambda site: is_remote(self.full_path(site)))

    @cached_property
    def trainers(self) -> set[str]:
        """Return the names that hold a trainer; calling one trains."""
        makers = self._holding(lambda site: self.gives(site, lambda inner: makes_trainer(inner, self.trainer_classes)))
        return set(makers) - self.remote_names - self.functions.keys()

    def gives(self, site: CallSite, matches: Callable[[CallSite], bool], depth: int = 0) -> bool:
        """Return whether a call is a wanted one, or that of a function of the notebook that returns what one gives."""
        if matches(site):
            return True
        body = self.functions.get(site.path)
        if body is None or body.is_class or depth > 3:
            return False
        returned = {whole for part, whole in body.aliases if part == RETURNED}
        names = {RETURNED} | (returned if len(returned) == 1 else set())
        return any(self.gives(inner, matches, depth + 1) for name, inner in body.assigned if name in names)

    @cached_property
    def _holders(self) -> set[str]:
        """Return the names through which a trainer may be reached: its other names, lists and objects that hold one."""
        holders: set[str] = set()
        for usage in (s.usage for s in self.statements if isinstance(s.node, cst.SimpleStatementLine)):
            sites = [
                *usage.calls,
                *(inner for site in usage.calls for b in self.bodies_run_by(site) for inner in b.calls),
            ]
            if any(makes_trainer(site, self.trainer_classes) for site in sites):
                holders |= usage.writes | usage.stores
        follow_aliases(holders, [(whole, part) for s in self.statements for part, whole in s.usage.aliases])
        return holders

    def fits(self, site: CallSite) -> str:
        """Return the library whose object a call trains by a method of another name than a trainer's; or ""."""
        named = {arg.keyword.value for arg in site.node.args if arg.keyword is not None}
        fits = _FITS.match(site.tail) or (site.tail == "train" and named - {"mode"})
        if not fits or not site.is_method or site.root in self.trainers:
            return ""
        match site.node.func:
            case cst.Attribute(value=cst.Call(func=maker)):
                makers = [full_path(dotted(maker), self.imports)]
            case _:
                makers = [self.full_path(other) for name, other in self.assigned if name == site.root]
        roots = {path.split(".")[0] for path in makers if not is_keras(path)} & self.import_roots
        if not makers and site.tail in _OF_LEARNERS:
            return "a learner"
        return next(iter(sorted(roots - _FITS_ARRAYS)), "")

    @cached_property
    def import_roots(self) -> set[str]:
        """Return the packages that the notebook imports, but for those of Python itself."""
        return {path.split(".")[0] for path in self.imports.values()} - sys.stdlib_module_names

    @cached_property
    def training_scripts(self) -> frozenset[str]:
        """Return the files that the notebook writes whose code trains."""
        cells = [call.args for site in self.sites if (call := ipython_call(site.node)) and len(call.args) > 2]
        return frozenset(
            args[1].split()[-1] for args in cells if args[0] in FILE_CELLS and _TRAINING_CODE.search(args[2])
        )

    def _may_train(self, site: CallSite) -> bool:
        """Return whether a library's function gets a trainer (`unsloth_train(trainer)`), or a holder is trained."""
        if site.root in self.imports:
            return bool(site.names & self.trainers)
        reached, _, method = code(site.node.func).rpartition(".")
        return (
            method in _TRAINS and root_name(site.node.func) in self._holders and "model" not in reached.split(".")[-1]
        )

    @cached_property
    def accelerators(self) -> frozenset[str]:
        """Return the names that hold an object whose methods wait for the other processes."""
        return self._holding(lambda site: makes_accelerator(self.full_path(site)))

    @cached_property
    def shared(self) -> frozenset[str]:
        """Return the names of what Accelerate has prepared, and of DataLoaders that all processes share."""
        return self._holding(
            lambda site: (
                (site.root in self.accelerators and site.tail == "prepare") or site.tail in _LOADERS_OF_TRAINERS
            )
        )

    @cached_property
    def instances(self) -> dict[str, set[str]]:
        """Return the notebook's own classes of which a name may hold an instance."""
        instances: dict[str, set[str]] = {}
        for statement in self.statements:
            paths = {site.path for site in statement.usage.calls} & self.functions.keys()
            classes = {path for path in paths if self.functions[path].is_class}
            for name in statement.usage.writes if classes else ():
                instances.setdefault(name, set()).update(classes)
        return instances

    @cached_property
    def sites(self) -> list[CallSite]:
        """Return all calls, those in functions too."""
        sites = [site for s in self.statements for site in s.usage.calls]
        return sites + [site for body in self.functions.values() for site in body.calls]

    @cached_property
    def names(self) -> Counter[str]:
        """Return how often each name stands in the code."""
        return sum((names_in(statement.node) for statement in self.statements), Counter[str]())

    @cached_property
    def prepares(self) -> bool:
        """Return whether the notebook has Accelerate prepare its model and data."""
        uses = any(self.full_path(site).startswith("accelerate.") for site in self.sites)
        return uses and any(site.is_method and site.tail == "prepare" for site in self.sites)

    # Effects ----------------------------------------------------------------------------------------------------------

    @property
    def function_effects(self) -> dict[str, set[Effect]]:
        """Return the effects of the notebook's own functions."""
        return {name: self.effects_inside(name) for name, body in self.functions.items() if not body.is_class}

    def effects_inside(self, name: str) -> set[Effect]:
        """Return the effects of one of the notebook's own functions, or of all methods of a class."""
        if name not in self._effects:
            self._effects[name] = set()  # ends recursion
            body = self.functions[name]
            effects = {Effect.STATE} if sets_process(body.stores, self.imports) else set()
            effects |= {Effect.SYNC} if body.iterates & self.shared else set()
            self._effects[name] = effects.union(*(self._effects_of_call(site, body.params) for site in body.calls))
        return self._effects[name]

    def effects_of(self, usage: NameUsage) -> set[Effect]:
        """Return the effects of code that uses names so."""
        return set().union(*(self._effects_of_call(site) for site in usage.calls))

    def _effects_of_call(self, site: CallSite, params: Iterable[str] = ()) -> set[Effect]:
        """Return the effects of a call, in a function with these parameters."""
        full = self.full_path(site)
        if site.root in self.remote_names and site.tail in REMOTE_STARTS:
            return {Effect.PAID}
        if is_remote(full):
            return set()
        if site.path in self.trainers:
            return {Effect.TRAIN}  # an object that trains when it is called
        if site.path in self.shared:
            return {Effect.SYNC}  # a model that Accelerate has wrapped
        if is_trainer_call(site, self.trainer_classes):
            return {Effect.TRAINER}
        effects: set[Effect] = set()
        body = self.functions.get(site.path)
        if body is not None:
            if not body.is_class:
                effects |= self.effects_inside(site.path)
                if site.names & self.trainers and any(i.tail in _TRAINS and i.root in body.params for i in body.calls):
                    effects.add(Effect.TRAIN)
            elif any(downloads_data(self.full_path(inner)) for inner in body.calls):
                effects.add(Effect.DATA)  # a Dataset class that downloads when it is made
        elif owner := self._owner(site):
            effects |= self.effects_inside(owner)
            if owner in self.trainer_classes:  # what it overrides waits as the original does, through `super()`
                effects |= call_effects(site, full, self.trainers, self.trainer_classes) & TOGETHER
        elif site.root in self.accelerators and site.tail not in _ALONE:
            effects |= {Effect.SYNC, Effect.LOOP} if site.tail == "backward" else {Effect.SYNC}
        elif site.path.endswith(".compute") and any("torchmetrics" in path for path in self.imports.values()):
            effects.add(Effect.GATHER)
        else:
            effects |= call_effects(site, full, self.trainers, self.trainer_classes)
            if not effects and site.root in self.imports and site.tail.startswith(_SETS_LIBRARY):
                effects.add(Effect.STATE)  # torch.use_deterministic_algorithms(True)
            if self.fits(site) or (not effects and self._may_train(site)):
                effects.add(Effect.TRAIN)
        for name in (site.names & self.functions.keys()).difference(params):
            effects |= self.effects_inside(name) & _THROUGH_ARGUMENTS
        return effects

    def hands_arguments_on(self, site: CallSite) -> bool:
        """Return whether a call's function of the notebook gives its `**options` to a trainer that it makes."""
        body = self.functions.get(site.path)
        if body is None or keyword(site.node, "args") is None or "args" in body.params:
            return False
        return Effect.TRAINER in self.effects_inside(site.path)

    # What statements use and calls run --------------------------------------------------------------------------------

    def with_used(self, statements: Iterable[int]) -> set[int]:
        """Return statements, and those whose definitions they use, however far back."""
        return closure(statements, lambda index: self.statements[index].uses)

    def full_path(self, site: CallSite) -> str:
        """Return the path of a callee with its import resolved."""
        return full_path(site.path, self.imports)

    def bodies_run_by(self, site: CallSite) -> list[DeferredBody]:
        """Return the notebook's own functions that a call runs, or passes to what it calls."""
        names = [site.path, *sorted(site.names), self._owner(site)]
        return [self.functions[name] for name in names if name in self.functions]

    def bodies_run(self, usage: NameUsage) -> set[DeferredBody]:
        """Return the notebook's own functions that code runs, and those that these run."""

        def run_by(usage: NameUsage) -> set[DeferredBody]:
            return {body for site in usage.calls for body in self.bodies_run_by(site)}

        return closure(run_by(usage), run_by)

    def stores_of(self, usage: NameUsage) -> set[str]:
        """Return the names into which code assigns attributes or items, also in the functions that it calls."""
        return usage.stores.union(*(body.stores for body in self.bodies_run(usage)))

    def own_body(self, site: CallSite) -> tuple[DeferredBody, bool] | None:
        """Return the notebook's function or method that a call runs, and whether its first parameter is the object."""
        body = self.functions.get(site.path)
        if body is not None and not body.is_class:
            return body, False
        method = site.tail if body is None else "__init__"
        owner = self._owner(site) if body is None else self._defines(site.path, method)
        return (self.functions[owner].methods[method], True) if owner else None

    def defines_callee(self, site: CallSite) -> bool:
        """Return whether the notebook defines a function, or a method of a class, of the name that is called."""
        bodies = self.functions.values()
        return site.path in self.functions or (site.is_method and any(site.tail in body.methods for body in bodies))

    def _owner(self, site: CallSite) -> str:
        """Return the notebook's class whose method is called, by a name or on a new instance; or ""."""
        match site.node.func:
            case cst.Attribute(value=cst.Call(func=cst.Name(value=name))):
                return self._defines(name, site.tail)
        classes = sorted(self.instances.get(site.root, ())) if site.is_method else []
        return next((owner for name in classes if (owner := self._defines(name, site.tail))), "")

    def _defines(self, name: str, method: str) -> str:
        """Return the notebook's class that defines a method for a class: itself, or what it inherits from; or ""."""
        visited: set[str] = set()
        while name in self.functions and name not in visited:
            visited.add(name)
            body = self.functions[name]
            if method in body.methods:
                return name
            name = next((base for base in body.bases if base in self.functions), "")
        return ""

    @property
    def last_seed(self) -> int:
        """Return the index of the last statement that trains, builds a trainer or steps an optimizer; -1 if none."""
        return max((i for i, s in enumerate(self.statements) if s.effects & SEEDS), default=-1)


def sets_process(stores: set[str], imports: dict[str, str]) -> bool:
    """Return whether code assigns into a module (`os.environ[...]`), or to the notebook's names through `globals()`."""
    return bool(stores & (imports.keys() | {NAMESPACE}))
