"""Permissive stand-ins for every third-party module: any attribute, call, index or operator works.

A `Stub` knows the dotted name it was reached by ("torch.cuda.is_available"), so that `RULES` can give some names a
believable value or record an event; all others answer with another stub. `Text` is a stub that is also a string:
what a dataset's cell or a decoded completion looks like to code that concatenates, splits or formats it.
Standard library only.
"""

import contextlib
import importlib.abc
import importlib.machinery
import opcode
import os
import re
import sys
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

from events import RECORDER

ITEMS = 2  # how many things an iteration over a stub yields

Rule = Callable[["Stub", tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[str, Rule] = {}  # by full dotted name, or by "*.last" for any stub's attribute of that name
VALUES: dict[str, Any] = {}  # the same for attributes that are plain values
CLASSES: list[tuple[str, Callable[[str, str], Any]]] = []  # (suffix, maker): CamelCase names that must be real classes
VERSIONS: dict[str, str] = {}  # what the program pins: a notebook may assert that the pin took
CALLS_BACK = ("apply", "map", "filter", "transform", "agg", "applymap", "pipe")  # take a function, decorate nothing


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what calling a stub of these dotted names does."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def unpack_count(frame: Any) -> int | None:
    """Return the number of names that the caller unpacks into (`a, b = stub`), or None if it does not unpack."""
    code, at = frame.f_code.co_code, frame.f_lasti
    if at >= 0 and opcode.opname[code[at]].startswith("UNPACK_SEQUENCE"):
        return int(code[at + 1])
    return None


class Truth:
    """The answer of a comparison: usable in an `if` and as a mask with every stub method."""

    def __new__(cls, name: str, value: bool) -> Any:
        stub = Stub(name)
        object.__setattr__(stub, "_truth", value)
        return stub


class Operators:
    """Everything a stub can be asked to do besides being called; shared by Stub and Text."""

    _name: str
    _truth = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return child(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if sys._getframe(1).f_code.co_filename in RECORDER.programs:  # the program itself sets up a model or tokenizer
            RECORDER.add("set", f"{self._name}.{name}")
        self.__dict__[name] = value

    def __bool__(self) -> bool:
        return self._truth

    def __int__(self) -> int:
        return 2

    def __index__(self) -> int:
        return 2

    def __float__(self) -> float:
        return 1.0

    def __complex__(self) -> complex:
        return 1 + 0j

    def __round__(self, digits: int | None = None) -> Any:
        return 1 if digits is None else 1.0

    def __ceil__(self) -> int:
        return 1

    __floor__ = __trunc__ = __ceil__

    def __iter__(self) -> Iterator[Any]:
        count = unpack_count(sys._getframe(1))
        name = self._name
        if name.endswith(".from_pretrained()"):  # model, tokenizer = FastLanguageModel.from_pretrained(...)
            return iter([follow(self, Stub("model")), Stub("tokenizer")] + [Stub("extra")] * ((count or 2) - 2))
        return iter([Text("1", f"{name}[]") for _ in range(ITEMS if count is None else count)])

    def __reversed__(self) -> Iterator[Any]:
        return iter(list(self))

    def __next__(self) -> Any:
        return Text("1", f"{self._name}[]")

    def __len__(self) -> int:
        return ITEMS

    def __contains__(self, item: Any) -> bool:
        return True

    def __getitem__(self, key: Any) -> Any:
        items = self.__dict__.get("_items", {})
        try:
            if key in items:
                return items[key]
        except TypeError:
            pass
        if isinstance(key, str) and f"[{key}]" in VALUES:
            return VALUES[f"[{key}]"]
        return Text("1", f"{self._name}[]") if isinstance(key, str) else Stub(f"{self._name}[]")

    def __setitem__(self, key: Any, value: Any) -> None:
        with contextlib.suppress(TypeError):  # an unhashable mask
            self.__dict__.setdefault("_items", {})[key] = value

    def __delitem__(self, key: Any) -> None:
        self.__dict__.get("_items", {}).pop(key, None)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        return None

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *error: Any) -> None:
        return None

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()  # awaiting a stub gives it back at once
        return self

    def __eq__(self, other: Any) -> Any:
        return Truth(f"{self._name}==", other is self)

    def __ne__(self, other: Any) -> Any:
        return Truth(f"{self._name}!=", other is not self)

    def __lt__(self, other: Any) -> Any:
        return Truth(f"{self._name}<", False)

    def __gt__(self, other: Any) -> Any:
        return Truth(f"{self._name}>", True)

    def __le__(self, other: Any) -> Any:
        return Truth(f"{self._name}<=", True)

    def __ge__(self, other: Any) -> Any:
        return Truth(f"{self._name}>=", True)

    def __hash__(self) -> int:
        return id(self)

    def keys(self) -> list[str]:
        return ["stub_key"]

    def __radd__(self, other: Any) -> Any:
        return other + str(self) if isinstance(other, str) else Stub("+")

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, Stub)

    def __subclasscheck__(self, cls: Any) -> bool:
        return False

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (class_base(self._name),)

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __copy__(self) -> Any:
        return self


def _operator(symbol: str) -> Callable[..., Any]:
    def operate(self: Any, *others: Any) -> Any:
        return Stub(symbol)

    return operate


BINARY = ("sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift", "divmod")
setattr(Operators, "__add__", _operator("+"))  # noqa: B010 - like the others below
for _name in BINARY:
    setattr(Operators, f"__{_name}__", _operator(_name))
    setattr(Operators, f"__r{_name}__", _operator(_name))
for _name in ("neg", "pos", "abs", "invert"):
    setattr(Operators, f"__{_name}__", _operator(_name))


class Stub(Operators):
    """Anything at all, reached by a dotted name."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call(self, args, kwargs)

    def __reduce__(self) -> Any:
        return Stub, (self._name,)

    def __repr__(self) -> str:
        return f"<{self._name}>"

    def __format__(self, spec: str) -> str:
        try:
            return format(1.0, spec) if spec else str(self)
        except ValueError:
            return str(self)


class Text(Operators, str):
    """A string that also answers like a stub: what a dataset's cell, a decoded answer or a column looks like."""

    def __new__(cls, value: str = "1", name: str = "text") -> "Text":
        self = str.__new__(cls, value)
        self.__dict__["_name"] = name
        return self

    def __init__(self, *args: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call(self, args, kwargs)

    def __add__(self, other: Any) -> Any:
        return str.__add__(self, other) if isinstance(other, str) else Stub("+")

    def __mod__(self, other: Any) -> Any:
        return str.__mod__(self, other) if "%" in str(self) else Stub("%")

    def __bool__(self) -> bool:
        return True

    def __int__(self) -> int:
        return int(str(self)) if str(self).isdigit() else 2

    def __eq__(self, other: Any) -> Any:
        return str.__eq__(self, other) if isinstance(other, str) else Truth("==", False)

    def __ne__(self, other: Any) -> Any:
        return str.__ne__(self, other) if isinstance(other, str) else Truth("!=", True)

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __contains__(self, item: Any) -> bool:
        return str.__contains__(self, item) if isinstance(item, str) else True

    def __repr__(self) -> str:
        return str.__repr__(self)

    def __str__(self) -> str:
        return str.__str__(self)

    def __format__(self, spec: str) -> str:
        try:
            return str.__format__(self, spec)
        except ValueError:
            return Stub.__format__(self, spec)  # type: ignore[arg-type]

    def index(self, *args: Any) -> Any:
        return max(str.find(self, *args), 0)

    def rindex(self, *args: Any) -> Any:
        return max(str.rfind(self, *args), 0)

    def split(self, *args: Any, **kwargs: Any) -> Any:
        return Forgiving(Text(part, "text") for part in str.split(self, *args, **kwargs))


class Forgiving(list):
    """A list without IndexError: code that takes [1] of a split of unknown text goes on."""

    def __getitem__(self, index: Any) -> Any:
        try:
            return list.__getitem__(self, index)
        except IndexError:
            return Text("1", "item")
        except TypeError:
            return Stub("column")


class Permissive(type):
    """A class whose missing class attributes are stubs: AutoConfig.from_pretrained, SamplingParams.DEFAULT."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return child(Stub(cls.__name__), name)


class Base(metaclass=Permissive):
    """The base of a class that inherits from a stub: any constructor, any missing attribute."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass  # class X(Y, metaclass_option=...)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Stub(f"{type(self).__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = getattr(type(self), "forward", None)  # torch.nn.Module
        return forward(self, *args, **kwargs) if forward else Stub(f"{type(self).__name__}()")


def class_base(name: str) -> type:
    """A real class to stand for the stubbed class of that name."""
    return type(name.rsplit(".", 1)[-1], (Base,), {"__doc__": None})


def child(parent: Any, name: str) -> Any:
    """The attribute of a stub: a registered value, a real class where one is needed, or another stub."""
    path = f"{parent._name}.{name}"
    if path in VALUES or f"*.{name}" in VALUES:
        value = VALUES.get(path, VALUES.get(f"*.{name}"))
        return value() if isinstance(value, types.FunctionType) else value
    made: Any = None
    if name[:1].isupper():
        made = next((make(path, name) for suffix, make in CLASSES if name.endswith(suffix)), None)
    made = Stub(path) if made is None else made
    follow(parent, made)
    parent.__dict__[name] = made
    return made


def call(stub: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of calling a stub: its rule's answer, the function it decorates, or another stub."""
    name = stub._name
    found = RULES.get(name) or RULES.get(f"*.{name.rsplit('.', 1)[-1]}")
    if found is not None:
        return found(stub, args, kwargs)
    last = name.rsplit(".", 1)[-1]
    if (
        "_origin" in stub.__dict__
        and "." in name
        and changes(last)
        and sys._getframe(2).f_code.co_filename in RECORDER.programs
    ):
        RECORDER.add("touch", last)
    decorates = len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type)
    if decorates and name.rsplit(".", 1)[-1] not in CALLS_BACK:
        return args[0]
    return follow(stub, Stub(f"{name}()"))


# Methods that leave a model as they find it.
LEAVES = ("eval", "train", "to", "cuda", "cpu", "half", "float", "forward", "parameters", "modules", "children")
LEAVES += ("detach", "item", "numpy", "argmax", "squeeze", "mean", "sum", "max", "tolist", "inference_session")
LEAVES += (
    "encode",
    "decode",
    "tokenize",
    "print_trainable_parameters",
    "num_parameters",
    "state_dict",
    "items",
    "keys",
)


SHOWS = re.compile("print|show|summary|describe|info")


def changes(method: str) -> bool:
    """Return whether a method called on a model, or on a part of it, may change it."""
    leaves = method in LEAVES or method.startswith(("get_", "named_", "is_", "_")) or SHOWS.search(method)
    return method.isidentifier() and not leaves


def follow(parent: Any, made: Any) -> Any:
    """Let what comes of a loaded model say which load it comes from."""
    if "_origin" in parent.__dict__ and isinstance(made, Stub):
        made.__dict__["_origin"] = parent.__dict__["_origin"]
    return made


class StubModule(Operators, types.ModuleType):
    """A third-party module that was never imported."""

    def __init__(self, name: str) -> None:
        types.ModuleType.__init__(self, name)
        version = VERSIONS.get(name, "2.9.0")
        self.__dict__.update(_name=name, __version__=version, __file__=f"/stub/{name}.py", __path__=[], __all__=[])

    def __repr__(self) -> str:
        return f"<stub module {self._name}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return call(self, args, kwargs)


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module that the standard library and the program's own folder do not have.

    A child of a stub module is the attribute of that name where one was already made or is a real class.
    """

    def __init__(self) -> None:
        self.environment = dict(os.environ)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in sys.stdlib_module_names or name.startswith("__"):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return StubModule(spec.name)

    def exec_module(self, module: Any) -> None:
        detail = {}
        if module.__name__ == "unsloth":  # reads its flags at import
            detail["environment"] = {k: v for k, v in os.environ.items() if self.environment.get(k) != v}
        RECORDER.add("import", module.__name__, **detail)
