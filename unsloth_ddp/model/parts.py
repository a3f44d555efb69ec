"""Find the parts of a model: its text decoder, the towers and projectors beside it, and the adaptable layers.

Everything is found from the modules of the model, so that it holds for architectures of which nothing is known here.
"""

import functools
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import Linear, Module, ModuleList, Parameter
from torch.nn.modules.conv import _ConvNd

from unsloth_ddp.model.adapter.experts import EXPERTS, full_shape, number_in
from unsloth_ddp.model.modules import base_model, text_decoder

# Transformers' names for what chooses: classes and modules that choose experts for a token, or tokens for attention. A
# loss on text reaches the second not at all, and changes of the first undo the balance of the experts.
CHOOSING = re.compile(r"Router|Indexer|TopKGat|MoEGate|(?:^|[._])(?:router|indexer)(?=[._]|$)")
# Names of attention to the output of a tower or an encoder, which rows of text leave out.
CROSS_ATTENTION = re.compile(r"cross_?att|encoder_att", re.IGNORECASE)
# A weight that is passed on as a whole; a look at its type or at a part of it is none.
READ_WEIGHT = re.compile(r"self\.(\w+)\.weight\b(?!\[|\.dtype|\.device|\.shape)")
# Modules of Transformers and of models' own code, whose linear layers may compute something else.
MODELING = ("transformers.models.", "transformers_modules.")


def parts_beside_text(model: Any) -> dict[str, Module]:
    """Return a model's towers and projectors by their paths: the largest modules without a part of the text decoder."""
    base = base_model(model)
    text_ids = {id(module) for module in (*text_decoder(model).modules(), base.get_output_embeddings())}
    ancestors = {id(module) for module in base.modules() if any(id(inner) in text_ids for inner in module.modules())}
    beside: dict[str, Module] = {}
    for path, module in base.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in beside)
        if path and not inside and id(module) not in ancestors and any(True for _ in module.parameters()):
            beside[path] = module
    return beside | _towers_within(base, text_decoder(model))


def _towers_within(base: Any, decoder: Any) -> dict[str, Module]:
    """Return modules in the decoder with a model of another config: a tower and its projector (Phi-4 multimodal)."""
    start = _path_of(base, decoder)
    kind, embedding = type(getattr(decoder, "config", None)), base.get_input_embeddings()
    towers: dict[str, Module] = {}
    for path, module in decoder.named_modules():
        config = getattr(module, "config", None)
        if not path or config is None or type(config) is kind or not hasattr(module, "_no_split_modules"):
            continue
        while "." in path and not any(
            inner is embedding for inner in decoder.get_submodule(path.rpartition(".")[0]).modules()
        ):
            path = path.rpartition(".")[0]
        towers[f"{start}.{path}" if start else path] = decoder.get_submodule(path)
    return towers


def _path_of(base: Any, part: Any) -> str:
    return next(path for path, module in base.named_modules() if module is part)


def adaptable_layers(model: Any, beside: Callable[[str], bool] | None = None) -> dict[str, Module]:
    """Return the linear layers that all-linear and leaf names adapt, by their paths in the Transformers model.

    These are the layers of the text decoder that rows of text run through, except the output head, and except:
    routers, gates of shared experts and indexers; layers whose weight their parent reads without calling the layer, as
    fused kernels do; and layers that compute another product than torch's Linear.

    Args:
        beside: whether to take the layer with a path outside the text decoder too (towers.trained_beside).
    """
    base = base_model(model)
    head, modules = base.get_output_embeddings(), dict(base.named_modules())
    parts = tuple(f"{path}." for path in parts_beside_text(model))
    start = _path_of(base, text_decoder(model))
    within = f"{start}." if start else ""

    def is_taken(path: str) -> bool:
        if f"{path}.".startswith(parts):
            return beside is not None and beside(path)
        return path.startswith(within)

    experts = _numbers_of_experts(base.config)
    return {
        path: module
        for path, module in modules.items()
        if is_linear(module)
        and module is not head
        and is_taken(path)
        and not _chooses(path, modules, experts)
        and path.rpartition(".")[2] not in _weights_read(modules[path.rpartition(".")[0]].__class__)
        and _is_plain(module)
    }


def is_linear(module: Module) -> bool:
    """Return whether a module is a linear layer: torch's, a quantized one, or GPT-2's with a transposed weight."""
    return isinstance(module, Linear) or type(module).__name__ == "Conv1D"


def freeze_beside_text(model: Any, beside: Callable[[str], bool] | None = None) -> None:
    """Freeze every weight that is in neither the text decoder nor the output head.

    Args:
        beside: whether to leave the weight with a name outside the text decoder as it is.
    """
    base = base_model(model)
    head = base.get_output_embeddings()
    trained = {id(p) for module in (text_decoder(model), head) if module is not None for p in module.parameters()}
    towers = {id(p) for module in parts_beside_text(model).values() for p in module.parameters()}
    for name, parameter in base.named_parameters():
        is_text = id(parameter) in trained and id(parameter) not in towers
        if not is_text and not (beside is not None and beside(name)):
            parameter.requires_grad_(False)


def sometimes_unused(model: Any) -> list[Parameter]:
    """Return weights that a step can leave without a gradient: beside the text, and experts that are modules."""
    unused = {id(p): p for module in parts_beside_text(model).values() for p in module.parameters()}
    for path, module in base_model(model).named_modules():
        if isinstance(module, ModuleList) and path.endswith("experts"):
            unused |= {id(p): p for p in module.parameters()}
    return list(unused.values())


def _numbers_of_experts(config: Any) -> set[int]:
    """Return the numbers of outputs that a router or the gate of shared experts has."""
    text = config.get_text_config()
    experts = number_in(text, EXPERTS)
    return {1, experts, experts + (getattr(text, "zero_expert_num", None) or 0)} if experts else set()


def _chooses(path: str, modules: dict[str, Module], experts: set[int]) -> bool:
    names = path.split(".")
    # The layer and what it is in, from the inside out.
    around: list[Any] = [modules[".".join(names[:count])] for count in range(len(names), 0, -1)]
    kinds = [type(module).__name__ for module in around]
    if any(named.search(name) for named in (CHOOSING, CROSS_ATTENTION) for name in (path, *kinds)):
        return True
    return getattr(around[0], "out_features", 0) in experts and any(_holds_experts(module) for module in around[1:3])


def _holds_experts(module: Module) -> bool:
    """Return whether experts are direct parts of a module: their stacked weights, or a list of them."""
    return any(
        "Expert" in type(child).__name__
        or name == "experts"
        or (not isinstance(child, _ConvNd) and any(len(full_shape(p)) == 3 for p in child.parameters(recurse=False)))
        for name, child in module.named_children()
    )


@functools.cache
def _weights_read(kind: Any) -> frozenset[str]:
    """Return the layers whose weights a class reads as self.NAME.weight, so that an adapter would not be used."""
    return frozenset(READ_WEIGHT.findall(_source_of(kind)))


def _source_of(kind: type[Module]) -> str:
    """Return the source text of a class; of one that Unsloth replaced by a compiled one, that of Transformers."""
    # The replacement has the name and the module of the original.
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    text = Path(file).read_text(encoding="utf-8") if file and kind.__module__.startswith(MODELING) else ""
    if match := re.search(rf"^class {kind.__name__}\b.*?(?=^\S)", f"{text}\n#", re.MULTILINE | re.DOTALL):
        return match[0]
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""


def _is_plain(layer: Any) -> bool:
    """Return whether a layer maps (..., in) to (..., out), which a class of its own need not do."""
    kind = type(layer)
    if kind is Linear or kind.forward is Linear.forward or not kind.__module__.startswith(MODELING):
        return True
    try:
        inputs = torch.zeros(1, 1, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
        with torch.no_grad():
            output = layer(inputs)
    except (RuntimeError, ValueError, TypeError):
        return False
    return isinstance(output, torch.Tensor) and output.shape == (1, 1, layer.out_features)
