"""Name the dtypes of a model, unwrap it from PEFT, find its text decoder, and change it inside a block."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def base_model(model: Any) -> Any:
    """Return the Transformers model inside PEFT's wrapper, or the model itself if it is not wrapped."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def text_decoder(model: Any) -> Any:
    """Return the decoder that text runs through, without the output head: the part with the token embedding.

    Some classes of Transformers return a model with its head (Llama 4), or another module (ModernBERT's decoder).
    """
    base = base_model(model)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base.base_model
    while head is not None and hasattr(decoder, "get_decoder") and any(module is head for module in decoder.modules()):
        inner = decoder.get_decoder()
        if inner is decoder:
            break
        decoder = inner
    return decoder if any(module is embedding for module in decoder.modules()) else base.base_model


def name_present_layers(model: Any) -> None:
    """Leave out of _no_split_modules the classes of layers that this model has none of; FSDP2 refuses to look for them.

    Composite classes list the layers of every tower that their configs can name.
    """
    present = {type(module).__name__ for module in model.modules()}
    model._no_split_modules = [name for name in getattr(model, "_no_split_modules", None) or () if name in present]


def embedding_ids(model: torch.nn.Module) -> set[int]:
    """Return the ids of the parameters of a model's embeddings."""
    return {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}


def evaluation_mode(model: Any) -> AbstractContextManager[None]:
    """Turn dropout off inside the block, and restore the mode the model was in."""
    return training_mode(model, False)


@contextmanager
def training_mode(model: Any, dropout: bool = True) -> Iterator[None]:
    """Turn dropout on inside the block, or off, and restore the mode the model was in."""
    was_training = model.training
    model.train(mode=dropout)
    try:
        yield
    finally:
        model.train(mode=was_training)


def kept_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Restore the random numbers of the CPU and of `device` after the block."""
    return torch.random.fork_rng(devices=[] if device.type == "cpu" else [device])


@contextmanager
def without_dropout(model: Any) -> Iterator[bool]:
    """Set every probability of dropout to 0 inside the block, in training mode too; yield whether there was one.

    These are those of dropout layers, and those that modules pass to functions, such as attention_dropout.
    """
    dropouts = [
        (module, name)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float)
        and value > 0
        and (name == "p" if isinstance(module, torch.nn.Dropout) else "drop" in name)
    ]
    with ExitStack() as stack:
        for module, name in dropouts:
            stack.enter_context(replaced(module, name, 0.0))
        yield bool(dropouts)


@contextmanager
def without_kernels() -> Iterator[None]:
    """Compute layers with a state by Transformers' torch functions inside the block: on a CPU, with empty models.

    Kernels of installed packages (fla, causal_conv1d, mamba_ssm) take tensors of a GPU only. Transformers has the same
    need where it exports a model, and chooses at each call. Where it compiles, it does not advise to install a package.
    """
    from transformers.integrations import hub_kernels

    exporting, compiling = (
        replaced(hub_kernels, f"is_torchdynamo_{state}", lambda: True) for state in ("exporting", "compiling")
    )
    with exporting, compiling:
        yield


@contextmanager
def kept_gradients(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Begin the block without gradients of these parameters, and put their own back after it."""
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """Set an attribute of a module or an object to `new` inside the block; remove it afterwards if there was none."""
    missing = object()
    original = getattr(owner, name, missing)
    setattr(owner, name, new)
    try:
        yield
    finally:
        if original is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
