"""Decide whether DDP may take it that every weight gets a gradient, or has to search for those that get none."""

import re
from collections.abc import Iterator

import libcst as cst

from unsloth_ddp.notebook.analyse.graph import Graph
from unsloth_ddp.notebook.syntax.arguments import code, keyword
from unsloth_ddp.notebook.syntax.effects import is_loader_call
from unsloth_ddp.notebook.syntax.tree import walk

_IMAGES = re.compile(r"image|pixel|picture|video|audio|spectrogram|VisionDataCollator", re.IGNORECASE)


def without_search(graph: Graph, unsloth: bool) -> str | None:
    """Return why no search for unused weights is wanted; None where it is left to Transformers.

    Unsloth's checkpointing, and the reentrant one of PyTorch, compute layers anew inside the backward pass: DDP, which
    searches before it, takes their weights for unused and then sees their gradients.
    """
    if unsloth:
        return None if adapts_idle_tower(graph) else "Unsloth trains, and every weight takes part in the loss"
    adapts = any(path.split(".")[0] == "peft" for path in graph.imports.values())
    if (
        adapts
        and any(map(_checkpoints, graph.sites))
        and not _says(graph, '"use_reentrant": False', "use_reentrant=False")
    ):
        return "checkpointing computes the adapted layers anew in the backward pass"
    return None


def adapts_idle_tower(graph: Graph) -> bool:
    """Return whether adapters reach a tower for images while no row of the notebook has one: they get no gradient."""
    vision = any(is_loader_call(site.path) and site.path.split(".")[0] == "FastVisionModel" for site in graph.sites)
    adapted = [site for site in graph.sites if site.tail == "get_peft_model"]
    flags = [keyword(site.node, "finetune_vision_layers") for site in adapted]
    reaches = any(code(arg.value) != "False" if arg is not None else vision for arg in flags)
    return reaches and not any(_IMAGES.search(word) for word in _words(graph))


def _checkpoints(site) -> bool:  # type: ignore[no-untyped-def]
    flag = keyword(site.node, "gradient_checkpointing")
    prepares = (
        site.tail == "prepare_model_for_kbit_training" and keyword(site.node, "use_gradient_checkpointing") is None
    )
    return prepares or site.tail == "gradient_checkpointing_enable" or (flag is not None and code(flag.value) == "True")


def _says(graph: Graph, *texts: str) -> bool:
    lines = [code(statement.node).replace("'", '"').replace(" = ", "=") for statement in graph.statements]
    return any(text in line for line in lines for text in texts)


def _words(graph: Graph) -> Iterator[str]:
    """Yield the names and the keys in a notebook's code, not its prompts and comments."""
    for statement in graph.statements:
        for node in walk(statement.node):
            if isinstance(node, cst.Name):
                yield node.value
            elif isinstance(node, cst.SimpleString) and isinstance(node.evaluated_value, str):
                yield node.evaluated_value if len(node.evaluated_value) < 20 else ""
