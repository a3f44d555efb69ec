"""Answer small questions about names and syntax trees."""

import builtins
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import TypeVar

import libcst as cst

T = TypeVar("T")

# Methods that change the object they are called on, even where their value is used.
_MUTATING = (
    *("add", "append", "clear", "disable", "enable", "extend", "insert", "load", "pop", "register", "remove"),
    *("reset", "resize", "set", "tie", "update", "setdefault", "sort", "reverse", "shuffle"),
)
BUILTINS = frozenset(dir(builtins))
# Methods that leave their object as training needs it.
HARMLESS = {
    "eval", "train", "generate", "fast_generate", "encode", "decode", "to", "cuda", "cpu", "items", "keys", "get",
    "strip", "format", "for_inference", "for_training", "apply_chat_template", "batch_decode",
}  # fmt: skip
# The same of methods that begin so: they save, show or send what their object holds.
_LEAVES = ("save", "push_to_hub", "print", "show", "log", "to_", "export", "plot", "describe", "head", "info")


_NO_CODE = re.compile(
    "whitespace|[lr](par|brace|bracket)|lines|header|footer|semicolon|comma|colon|equal|newline|indent"
)


def is_false(test: cst.BaseExpression) -> bool:
    """Return whether a condition is a literal that is never true, so that its block is dead."""
    if isinstance(test, cst.Name):
        return test.value in ("False", "None")
    return isinstance(test, cst.Integer) and test.value == "0"


def is_dead(node: cst.BaseStatement) -> bool:
    """Return whether a statement is an `if False:` without an else."""
    return isinstance(node, cst.If) and is_false(node.test) and node.orelse is None


def contains(node: cst.CSTNode, matches: Callable[[cst.CSTNode], bool]) -> bool:
    """Return whether a node, or a part of it at whatever depth, is one that is wanted."""
    return any(matches(part) for part in walk(node))


def walk(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield a node and its parts at whatever depth, without whitespace and punctuation."""
    queue = [node]
    while queue:
        node = queue.pop()
        yield node
        parts: list[cst.CSTNode] = []
        for name in _parts_of(type(node)):
            value = getattr(node, name)
            if isinstance(value, cst.CSTNode):
                parts.append(value)
            elif isinstance(value, list | tuple):
                parts += value
        queue += reversed(parts)


@cache
def _parts_of(kind: type[cst.CSTNode]) -> list[str]:
    """Return the fields of a kind of node that hold code; `children` of libcst is slow."""
    names = [field.name for field in dataclasses.fields(kind)]
    return [name for name in names if not _NO_CODE.search(name)]


def goes_backward(node: cst.CSTNode) -> bool:
    """Return whether a node is a call of `backward`."""
    return isinstance(node, cst.Call) and dotted(node.func).endswith(".backward")


def assignment(node: cst.CSTNode) -> tuple[cst.BaseExpression, cst.BaseExpression] | None:
    """Return the target and the value of a line that is one assignment to one target, or None."""
    match node:
        case cst.SimpleStatementLine(body=[cst.Assign(targets=[cst.AssignTarget(target)], value=value)]):
            return target, value
    return None


def closure(start: Iterable[T], further: Callable[[T], Iterable[T]]) -> set[T]:
    """Return what is reached from some things by any number of steps."""
    reached = set(start)
    queue = list(reached)
    while queue:
        fresh = set(further(queue.pop())) - reached
        reached |= fresh
        queue += fresh
    return reached


def names_in(node: cst.CSTNode) -> Counter[str]:
    """Return how often each name stands in code."""
    return Counter(part.value for part in walk(node) if isinstance(part, cst.Name))


def dotted(node: cst.BaseExpression) -> str:
    """Return the dotted path of a callee; "?" stands for whatever is not a name or attribute."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    parts.append(node.value if isinstance(node, cst.Name) else "?")
    return ".".join(reversed(parts))


def full_path(path: str, imports: Mapping[str, str]) -> str:
    """Return a dotted path with its root replaced by what the notebook has imported under that name."""
    root, *rest = path.split(".")
    return ".".join([imports.get(root, root), *rest])


def root_name(node: cst.BaseExpression) -> str | None:
    """Return the name at the root of a chain of attributes and items, or None."""
    while isinstance(node, cst.Attribute | cst.Subscript):
        node = node.value
    return node.value if isinstance(node, cst.Name) else None


def changes_its_object(method: str, bare: bool) -> bool:
    """Return whether a method of this name changes what it is called on; `bare`: nobody takes its value."""
    mutates = method.endswith("_") or method.split("_")[0] in _MUTATING
    return mutates or (bare and method not in HARMLESS and not method.startswith(_LEAVES))


def sets_argument(function: str) -> bool:
    """Return whether a function of a library changes its first argument by its name: `set_peft_model_state_dict`."""
    word, _, rest = function.partition("_")
    return bool(rest) and word in (*_MUTATING, "freeze", "unfreeze", "init", "inject", "patch", "prepare")


def moves(method: str) -> bool:
    """Return whether a method of this name moves a model to a device."""
    return method in ("to", "cuda", "cpu")


def _all_parameters(params: cst.Parameters) -> list[cst.Param]:
    stars = [star for star in (params.star_arg, params.star_kwarg) if isinstance(star, cst.Param)]
    return [*params.posonly_params, *params.params, *params.kwonly_params, *stars]


def parameters(params: cst.Parameters) -> list[str]:
    """Return the names of a function's parameters."""
    return [param.name.value for param in _all_parameters(params)]


def defaults(params: cst.Parameters) -> list[cst.BaseExpression]:
    """Return the default values of a function's parameters."""
    return [param.default for param in _all_parameters(params) if param.default is not None]


class NamesRead(cst.CSTVisitor):
    """Visits the names that are read: neither those of attributes nor those of keyword arguments."""

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False


def root_names(node: cst.CSTNode) -> list[str]:
    """Return the names at the roots of an expression, except builtins such as enumerate."""
    visitor = _RootNames()
    node.visit(visitor)
    return visitor.names


class _RootNames(NamesRead):
    def __init__(self) -> None:
        self.names: list[str] = []

    def visit_Name(self, node: cst.Name) -> None:
        if node.value not in BUILTINS:
            self.names.append(node.value)
