"""Define what a statement, a call and a body of a function do to names, and when a change of one is one of another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import libcst as cst

from unsloth_ddp.notebook.syntax.tree import closure, dotted, root_names


@dataclass(eq=False)
class CallSite:
    """One call: `path` is dotted ("model.generate"), its root "?" where it is not a plain name."""

    path: str
    node: cst.Call
    names: frozenset[str]  # plain names passed as arguments
    bare: bool = False  # the call is a statement of its own
    passed: bool = False  # not called here, but passed to what is: partial(model.generate, ...)

    @property
    def root(self) -> str:
        return self.path.split(".", 1)[0]

    @property
    def tail(self) -> str:
        return self.path.rsplit(".", 1)[-1]

    @property
    def is_method(self) -> bool:
        return "." in self.path


@dataclass(eq=False)
class NameUsage:
    """The names that a statement uses when it runs, and how."""

    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    mutates: set[str] = field(default_factory=set)
    calls: list[CallSite] = field(default_factory=list)
    defines: dict[str, DeferredBody] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)  # bound name -> dotted path
    stores: set[str] = field(default_factory=set)  # names whose attributes or items are assigned or deleted
    iterates: set[str] = field(default_factory=set)  # names that a loop runs over
    aliases: list[tuple[str, str]] = field(default_factory=list)  # (part, whole): a change of one is one of the other
    # `name = call(...)`, at any depth, and RETURNED of `return call()` in a function
    assigned: list[tuple[str, CallSite]] = field(default_factory=list)


@dataclass(eq=False)
class DeferredBody(NameUsage):
    """The body of a function, or of every method of a class; it changes parameters and globals."""

    params: list[str] = field(default_factory=list)
    mutates_inside: set[str] = field(default_factory=set)  # names of its own
    bases: list[str] = field(default_factory=list)
    methods: dict[str, DeferredBody] = field(default_factory=dict)
    is_class: bool = False

    def absorb(self, inner: DeferredBody) -> None:
        """Add what the body of an inner function, or of a method, uses."""
        self.reads |= inner.reads
        self.writes |= inner.writes
        self.calls += inner.calls
        self.mutates |= inner.mutates - set(inner.params)
        self.stores |= inner.stores
        self.iterates |= inner.iterates


def follow_aliases(mutates: set[str], aliases: list[tuple[str, str]]) -> None:
    """Count a change of `part` as a change of `whole` where the code has `part = whole.part`."""
    wholes: dict[str, set[str]] = {}
    for part, whole in aliases:
        wholes.setdefault(part, set()).add(whole)
    mutates |= closure(mutates, lambda part: wholes.get(part, ()))


# The name of what a function returns, among its aliases and its calls.
RETURNED = "return"
# What a change of the notebook's own names through `globals()` counts as.
NAMESPACE = "globals()"
# What a change of environment variables counts as whose names only the run knows.
ENVIRONMENT = "os.environ[...]"
_GIVE_PARTS = re.compile(
    r"^(get|get_\w+|named_\w+|modules|children|parameters|buffers|items|values|layers|state_dict|unwrap_model)$"
)
_GIVE_THEMSELVES = {"to", "cuda", "cpu", "half", "float", "bfloat16", "eval", "train", "requires_grad_"}
_KEEP_PARTS = {"getattr", "list", "dict", "tuple", "enumerate", "zip", "iter", "next", "reversed", "sorted", "filter"}


def gives_parts(value: cst.BaseExpression) -> bool:
    """Return whether an expression gives parts of the objects that it names: `model.layers[0]`, `getattr(model, n)`."""
    match value:
        case cst.Name() | cst.Attribute() | cst.Subscript():
            return True
        case cst.Tuple(elements=elements) | cst.List(elements=elements) | cst.Dict(elements=elements):
            return any(gives_parts(element.value) for element in elements)
        case cst.IfExp(body=left, orelse=right) | cst.BooleanOperation(left=left, right=right):
            return gives_parts(left) or gives_parts(right)
        case cst.BaseComp(for_in=cst.CompFor(iter=source)):
            return gives_parts(source)
        case cst.Call(func=cst.Name(value=name), args=args):
            return name in _KEEP_PARTS and any(gives_parts(arg.value) for arg in args)
        case cst.Call(func=cst.Attribute(value=whole, attr=cst.Name(value=name))):
            return bool(_GIVE_PARTS.match(name)) or (name in _GIVE_THEMSELVES and gives_parts(whole))
    return False


def given_names(site: CallSite, body: DeferredBody, bound: bool) -> Iterator[tuple[str, str]]:
    """Yield the parameters of a function with the names at the roots of what a call gives them."""
    params = body.params[1:] if bound else body.params
    for index, arg in enumerate(site.node.args):
        param = arg.keyword.value if arg.keyword else (params[index] if index < len(params) else "")
        if gives_parts(arg.value) and not arg.star:
            yield from ((param, name) for name in root_names(arg.value))


def of_namespace(node: cst.BaseExpression) -> bool:
    """Return whether an attribute or item is one of `globals()`, or of `vars()` and `locals()` without an argument."""
    while isinstance(node, cst.Attribute | cst.Subscript):
        node = node.value
    return isinstance(node, cst.Call) and dotted(node.func) in ("globals", "vars", "locals") and not node.args


def sets_any_variable(node: cst.BaseExpression) -> bool:
    """Return whether an item assigned or deleted, or a method called, is of `os.environ` and names no variable."""
    match node:
        case cst.Subscript(value=value, slice=[cst.SubscriptElement(slice=cst.Index(value=key))]):
            return dotted(value).endswith("environ") and not isinstance(key, cst.SimpleString)
        case cst.Call(func=cst.Attribute(value=value, attr=cst.Name(value=method)), args=args):
            named = bool(args) and isinstance(args[0].value, cst.SimpleString)
            changes = method in ("pop", "clear", "update", "setdefault")
            return dotted(value).endswith("environ") and changes and not named
    return False


def tail_changes(site: CallSite) -> bool:
    """Return whether a function changes its first argument by its name: `torch.nn.init.zeros_`."""
    return site.tail.endswith("_") and not site.tail.startswith("_") and "init" in site.path.split(".")[:-1]
