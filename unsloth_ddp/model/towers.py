"""Find the tower of images of a model, its projectors, and the work of an image, from the modules of the model."""

import inspect
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Linear, Module, ModuleList, Parameter
from torch.nn.modules.conv import _ConvNd

from unsloth_ddp.model.adapter.experts import EXPERTS, EXPERTS_A_TOKEN, full_shape, number_in, stacked_experts
from unsloth_ddp.model.modules import base_model, embedding_ids, text_decoder
from unsloth_ddp.model.parts import parts_beside_text
from unsloth_ddp.utils.errors import UserError

COLORS = 3
# Methods of Transformers that encode one kind of input each: get_image_features, get_audio_features.
ENCODES = re.compile(r"get_\w+_features")
# What a batch of packs says of its rows (data/order/collate.py).
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "packed_seq_lengths")


@dataclass(frozen=True)
class ImageTower:
    """Hold the part of a model that sees images.

    Args:
        path: of the part beside the text decoder that it is in, or is.
        blocks: its alike layers, which every patch runs through.
        numbers_a_patch: numbers of an image that its first layer takes at a place.
        hidden: numbers of a patch between its layers.
    """

    path: str
    blocks: list[Module]
    numbers_a_patch: int
    hidden: int


def image_tower(model: Any) -> ImageTower | None:
    """Return the part whose first layer reads three colors; None if there is none.

    That layer is a convolution with three channels, or a linear layer of flattened patches.
    """
    for path, part in parts_beside_text(model).items():
        layers = _layers(part)
        first = next((module for module in part.modules() if isinstance(module, (Linear, _ConvNd))), None)
        if layers is None or first is None:
            continue
        numbers = full_shape(first.weight)[1:]
        if (numbers[0] == COLORS) if isinstance(first, _ConvNd) else (numbers[0] % COLORS == 0):
            return ImageTower(path, list(layers), math.prod(numbers), full_shape(first.weight)[0])
    return None


def parts_of_images(model: Any) -> dict[str, Module]:
    """Return the parts beside the text decoder that images may reach, by their paths.

    Left out are those that only a method for another kind of input names (Gemma 4's tower of sound).
    """
    inner = dict(base_model(model).named_modules())
    return {path: part for path, part in parts_beside_text(model).items() if not _of_other_inputs(path, inner)}


def _of_other_inputs(path: str, modules: dict[str, Module]) -> bool:
    around, _, name = path.rpartition(".")
    kind = type(modules[around])
    methods = {key: inspect.unwrap(getattr(kind, key)) for key in dir(kind) if ENCODES.fullmatch(key)}
    naming = {key for key, method in methods.items() if inspect.isfunction(method) and name in method.__code__.co_names}
    return "get_image_features" in methods and bool(naming) and "get_image_features" not in naming


def kept_a_patch(block: Module) -> int:
    """Return about how many numbers a trained layer of a tower keeps of a patch for its backward pass.

    These are inputs and outputs of its norms, outputs of its linear layers, and inputs of those that no norm feeds.
    Attention scores and copies for attention kernels are left out.
    """
    norms = [p.numel() for n, p in block.named_parameters() if n.endswith("weight") and p.ndim == 1]
    linear = [m for m in block.modules() if isinstance(m, Linear)]
    numbers = 2 * sum(norms) + sum(m.out_features for m in linear)
    return numbers + sum(m.in_features for m in linear if m.in_features not in norms)


def projectors(model: Any) -> dict[str, Module]:
    """Return the modules between towers of images and text decoder by their paths.

    These are the parts beside the decoder without layers of their own, and if a tower has none beside it, what follows
    its layers in it and is multiplied with weights (Qwen's merger).
    """
    parts = parts_of_images(model)
    between = {path: part for path, part in parts.items() if not _layers(part) and _multiplies(part)}
    for path, part in parts.items():
        layers = _layers(part)
        if layers and not between:
            between |= {f"{path}.{name}": module for name, module in _after(part, layers)}
    return between


def _layers(part: Module) -> ModuleList | None:
    """Return the longest list of layers in a part, of several the first."""
    return max((m for m in part.modules() if isinstance(m, ModuleList) and len(m)), key=len, default=None)


def _multiplies(module: Module) -> bool:
    return any(len(full_shape(p)) > 1 for p in module.parameters())


def _after(part: Module, layers: Module) -> Iterable[tuple[str, Module]]:
    """Yield what is registered after the module that holds the layers, at every depth; no other tower."""
    begun, within = False, ""
    for name, child in part.named_children():
        if begun and _multiplies(child) and not hasattr(child, "config"):
            yield name, child
        if any(module is layers for module in child.modules()):
            begun, within = True, name
    if begun and (inner := part.get_submodule(within)) is not layers:
        yield from ((f"{within}.{name}", child) for name, child in _after(inner, layers))


def trained_beside(model: Any, choice: bool | str) -> Callable[[str], bool] | None:
    """Return whether --train_towers trains the module or weight of a path beside the decoder; None if it trains none.

    Parts that images do not reach would get no gradient, so they are left out.

    Raises:
        UserError: the model has no such part.
    """
    if not choice:
        return None
    parts = tuple(f"{path}." for path in parts_of_images(model))
    between = tuple(f"{path}." for path in projectors(model))
    if not parts or (choice == "projector" and not between):
        part = choice if choice == "projector" else "tower"
        raise UserError(
            f"train_towers {str(choice).lower()}: the model ({type(base_model(model)).__name__}) has no {part} beside "
            "its text decoder; leave train_towers out."
        )

    def is_trained(path: str) -> bool:
        inside = f"{path}.".startswith(between)
        return f"{path}.".startswith(parts) and (choice is True or inside == (choice == "projector"))

    return is_trained


def trains_beside_text(model: Any) -> bool:
    """Return whether a weight of a tower or a projector is trained."""
    return any(p.requires_grad for module in parts_beside_text(model).values() for p in module.parameters())


def describe_beside_text(model: Any) -> str | None:
    """Return which parts beside the text decoder a run trains, for the table before step 1; None if there are none."""
    parts = parts_beside_text(model)
    if not parts:
        return None
    count = trained = 0
    for parameter in (p for module in parts.values() for p in module.parameters()):
        numbers = math.prod(full_shape(parameter))
        count += numbers
        trained += numbers if parameter.requires_grad else 0
    how = f"{trained:,} of them are trained" if trained else "frozen; --train_towers trains them"
    return f"{', '.join(parts)} ({count:,} parameters): {how}"


def own_positions(model: Any) -> Callable[..., tuple[Tensor, Any]] | None:
    """Return the model's function for the positions of tokens and patches in padded rows (M-RoPE); None if it has none.

    It is bound to a module without weights, since processes that read rows get a copy of it.
    """
    owner = next((module for module in base_model(model).modules() if hasattr(module, "get_rope_index")), None)
    if owner is None:
        return None
    kind: Any = type(owner)
    empty = kind.__new__(kind)
    Module.__init__(empty)
    empty.config = owner.config
    return empty.get_rope_index


def keep_boundaries_from_towers(model: Any) -> None:
    """Leave the boundaries of rows out of the calls of towers: some classes pass them on, and towers have their own."""
    for part in parts_beside_text(model).values():
        part.register_forward_pre_hook(_without_boundaries, with_kwargs=True)


def _without_boundaries(
    _: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return inputs, {name: value for name, value in kwargs.items() if name not in BOUNDARIES}


def tokens_a_pixel(model: Any) -> float:
    """Return the work of the tower for each number of an image, in tokens of the text decoder.

    A patch is multiplied with the weights of the tower's blocks, as a token is with those of the decoder and the head.
    Multiplied with n weights, of which t are trained, a token takes 4 n + 2 t FLOP (sizing/shape.py), and a patch of a
    frozen tower 2 n, as it needs no backward pass. Attention scores are left out in both.
    """
    tower = image_tower(model)
    if tower is None:
        return 0.0
    in_blocks = [p for block in tower.blocks for p in block.parameters()]
    beside = {id(p) for part in parts_beside_text(model).values() for p in part.parameters()}
    embeddings, head = embedding_ids(model), base_model(model).get_output_embeddings()
    decoder = [p for p in text_decoder(model).parameters() if id(p) not in beside | embeddings]
    decoder += list(head.parameters()) if head is not None else []
    config = base_model(model).config.get_text_config()
    experts = {id(p) for p in stacked_experts(base_model(model)).values()}
    used = number_in(config, EXPERTS_A_TOKEN) / (number_in(config, EXPERTS) or 1) or 1.0
    trains = any(p.requires_grad for p in in_blocks)
    patch = _work(in_blocks, passes=4 if trains else 2)
    token = _work((p for p in decoder if id(p) not in experts), passes=4)
    token += used * _work((p for p in decoder if id(p) in experts), passes=4)
    return patch / token / tower.numbers_a_patch


def _work(parameters: Iterable[Parameter], passes: int) -> float:
    """Return the FLOP of a place multiplied with these weights: `passes` for each, and 2 more if it is trained."""
    multiplied = [p for p in parameters if len(full_shape(p)) > 1]
    return float(sum(math.prod(full_shape(p)) * (passes + 2 * p.requires_grad) for p in multiplied))
