"""Make a stand-in of a model: a copy with a few of its layers and random weights that are not sharded.

Sharded weights cannot be used before training begins, and a rank that runs out of memory in a pass over them would
leave the others waiting. A pass over the stand-in takes the same memory per layer, without a collective. Copying the
modules keeps their modifications: adapters, attention kernels, fused losses.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import Module, ModuleList, Parameter

from unsloth_ddp.model.modules import replaced, text_decoder

# Largest period after which layers of different kinds repeat (Gemma 3: five with a sliding window and one without).
LONGEST_PERIOD = 8
# Standard deviation of the weights; only routers depend on the values, and should not send all tokens to one expert.
SPREAD = 0.02
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class NoStandInError(Exception):
    """A stand-in cannot be made; the message says why in a few words."""


def layers_of(model: Any) -> ModuleList:
    """Return the decoder layers.

    Raises:
        NoStandInError: the model does not have a list `layers`.
    """
    layers = getattr(text_decoder(model), "layers", None)
    if not isinstance(layers, ModuleList) or not len(layers):
        raise NoStandInError("its layers are not known")
    return layers


def period_of(layers: ModuleList) -> int:
    """Return the period with which kinds of layers repeat; 1 if all layers are alike.

    Raises:
        NoStandInError: they do not repeat, for example if only the first layers of an MoE model have no experts.
    """
    kinds = [kind_of(layer) for layer in layers]
    for period in range(1, min(LONGEST_PERIOD, len(kinds) // 2) + 1):
        if all(kind == kinds[index % period] for index, kind in enumerate(kinds)):
            return period
    raise NoStandInError("its layers differ" if len(kinds) > 1 else "it has one layer")


def kind_of(layer: Module) -> tuple[Any, ...]:
    """Return a key for the kind of a layer: its class, names and shapes of weights, and its attention window."""
    weights = tuple(
        (name, tuple(_shape(weight)), weight.dtype, weight.requires_grad) for name, weight in layer.named_parameters()
    )
    reach = tuple(
        str(getattr(module, name, None))
        for module in layer.modules()
        for name in ("attention_type", "layer_type", "sliding_window", "is_sliding")
    )
    return plain_class(layer), weights, reach


def plain_class(module: Module) -> type[Module]:
    """Return the class of a module before FSDP2 changed it."""
    classes = type(module).__mro__
    return classes[classes.index(FSDPModule) + 1] if isinstance(module, FSDPModule) else classes[0]


def is_quantized(weight: Any) -> bool:
    """Return whether a weight is quantized to less than 16 bits per value."""
    return hasattr(weight, "quant_state") or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32)


def _shape(weight: Any) -> torch.Size:
    # A 4-bit weight keeps its packed shape, to which quant_state in its module belongs.
    return torch.Size(getattr(weight, "ds_shape", weight.shape))


def make_stand_in(model: Any, count: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a copy of `model` with its first `count` layers and random weights on `device`.

    Args:
        dtype: of the weights, which is what sharded runs compute in; packed weights keep theirs.
    """
    return _Copy(layers_of(model), count, dtype, device).of(model)


class _Copy:
    def __init__(self, layers: ModuleList, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layers, self.count, self.dtype, self.device = layers, count, dtype, device
        self.modules: dict[int, Module] = {}
        self.weights: dict[int, Parameter] = {}

    def of(self, model: Any) -> Any:
        root = self._copy(model)
        for module in self.modules.values():
            for name, value in list(module.__dict__.items()):
                if not name.startswith(("_parameters", "_buffers", "_modules", *HOOKS)):
                    module.__dict__[name] = self._rebound(value)
            for name in HOOKS:
                hooks = getattr(module, name)
                hooks.update({key: self._rebound(hook) for key, hook in hooks.items()})
        return root

    def _copy(self, module: Module) -> Module:
        if id(module) in self.modules:
            return self.modules[id(module)]
        kind = plain_class(module)
        new = self.modules[id(module)] = kind.__new__(kind)
        # Copy dictionaries, such as those of hooks, so that changes do not affect the original.
        new.__dict__.update(
            {name: value.copy() if isinstance(value, dict) else value for name, value in module.__dict__.items()}
        )
        # A compiled call would run the original.
        new.__dict__.pop("_compiled_call_impl", None)
        for name in HOOKS:
            hooks = getattr(new, name)
            for key in [key for key, hook in hooks.items() if _of_torch(hook)]:
                del hooks[key]
        new._parameters = {
            name: weight if weight is None else self._weight(weight) for name, weight in module._parameters.items()
        }
        # Some models change their buffers during a forward pass.
        new._buffers = {name: value if value is None else value.clone() for name, value in module._buffers.items()}
        children = list(module._modules.items())
        if module is self.layers:
            children = children[: self.count]
        new._modules = {name: child if child is None else self._copy(child) for name, child in children}
        return new

    def _weight(self, weight: Parameter) -> Parameter:
        if id(weight) not in self.weights:
            self.weights[id(weight)] = self._fresh(weight)
        return self.weights[id(weight)]

    def _fresh(self, weight: Any) -> Parameter:
        packed = is_quantized(weight)
        if packed and not hasattr(weight, "device_mesh"):
            # It is not sharded and not trained, so it can be shared.
            return weight
        if packed:
            return Parameter(torch.zeros(_shape(weight), dtype=weight.dtype, device=self.device), requires_grad=False)
        values = torch.empty(_shape(weight), dtype=self.dtype, device=self.device).normal_(std=SPREAD)
        fresh = Parameter(values, weight.requires_grad)
        if hasattr(weight, "ds_status"):
            # With ZeRO-3, TRL's fused head checks whether the weight has to be gathered.
            fresh.ds_status = type(weight.ds_status).AVAILABLE  # type: ignore[attr-defined]
        return fresh

    def _rebound(self, value: Any) -> Any:
        """Replace references to modules of the original by those of the copy; return other values unchanged."""
        if isinstance(value, Module):
            return self.modules.get(id(value), value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self._rebound(value.__func__), self._rebound(value.__self__))
        if isinstance(value, functools.partial):
            keywords = {name: self._rebound(argument) for name, argument in value.keywords.items()}
            return functools.partial(self._rebound(value.func), *map(self._rebound, value.args), **keywords)
        if isinstance(value, types.FunctionType) and value.__closure__:
            return self._with_own_cells(value)
        return value

    def _with_own_cells(self, function: types.FunctionType) -> Callable[..., Any]:
        """Return a function whose closure refers to the copy; TRL's forward refers to the model's own forward."""
        try:
            contents = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:
            return function
        rebound = [self._rebound(content) if self._is_part(content) else content for content in contents]
        if all(a is b for a, b in zip(contents, rebound, strict=True)):
            return function
        cells = tuple(types.CellType(content) for content in rebound)
        new = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        new.__kwdefaults__ = function.__kwdefaults__
        return functools.update_wrapper(new, function)

    def _is_part(self, value: Any) -> bool:
        owner = getattr(value, "__self__", value)
        return isinstance(owner, Module) and id(owner) in self.modules


def _of_torch(hook: Callable[..., Any]) -> bool:
    """Return whether a hook belongs to torch.distributed; FSDP2's hooks are bound to the original's state."""
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed")


def first_layers(model: Any, count: int) -> contextlib.AbstractContextManager[None]:
    """Reduce a stand-in to its first `count` layers inside the block."""
    layers = layers_of(model)
    return replaced(layers, "_modules", dict(list(layers._modules.items())[:count]))


@contextlib.contextmanager
def unused(model: Module) -> Iterator[None]:
    """Raise NoStandInError if a module of `model` is called inside the block, before FSDP2 gathers its weights."""

    def refuse(module: Module, inputs: Any) -> None:
        raise NoStandInError(f"its {plain_class(module).__name__} cannot be copied")

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(refuse, prepend=True))
        yield
