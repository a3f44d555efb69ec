"""Compile layers so that two compilations compute the same bits, and leave layers uncompiled."""

import functools
import inspect
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from accelerate.utils import patch_environment

# torch.compile times variants of a kernel and takes the fastest. Variants of a sum add in different orders, so that
# weights differ in their last bits between two runs that compile. With the first option it takes one variant of each
# sum without timing; without the second it would time padded matrix products too. TORCHINDUCTOR_DETERMINISTIC=1 does
# not help: Dynamo calls torch.use_deterministic_algorithms() after its first compilation, which resets it.
REPEATABLE = {"test_configs.force_filter_reduction_configs": True, "shape_padding": False}


@functools.cache
def layer_options() -> dict[str, Any]:
    """Return the argument `options` of torch.compile for a layer: those of REPEATABLE that this torch has."""
    import torch._inductor.config as config

    options = config.get_config_copy()
    return {name: value for name, value in REPEATABLE.items() if name in options}


def own_call(module: Any) -> Callable[..., Any]:
    """Return what computes a module: its call, or its class's forward pass, which Unsloth wrapped in a compiled one."""
    wrapped = type(module).forward
    original = inspect.unwrap(wrapped)
    return module._call_impl if original is wrapped else types.MethodType(original, module)


def compile_in_training(module: Any) -> None:
    """Compile a layer for inputs of any length, in its training mode only: evaluation has rows of other kinds."""
    import torch

    compiled, ordinary = torch.compile(own_call(module), dynamic=True, options=layer_options()), module._call_impl
    module._compiled_call_impl = lambda *inputs, **named: (compiled if module.training else ordinary)(*inputs, **named)


def drop_compiled_code(model: Any) -> None:
    """Drop the code that Unsloth compiled for passes so far, so that it keeps what is compiled from here on.

    It drops all compiled code when training begins if a pass before computed gradients, and asks only once.
    """
    unsloth = sys.modules.get("unsloth.models._utils")
    drop = getattr(unsloth, "_unsloth_reset_stray_compile_cache", None)
    if drop is not None:
        with warnings.catch_warnings(action="ignore"):
            drop(types.SimpleNamespace(model=model))


# Unsloth reads it before each call of a layer that it compiles as a whole.
BLOCK_COMPILE = "UNSLOTH_BLOCK_COMPILE"


def uncompiled_layers() -> AbstractContextManager[None]:
    """Compute layers that Unsloth compiles as a whole without compilation inside the block.

    It would compile them for each micro-batch that is tried, and drops all of that when training begins.
    """
    return patch_environment(**{BLOCK_COMPILE: "0"})


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compute without compiled code inside the block, where compiling takes longer than a few passes do."""
    import torch

    with uncompiled_layers(), torch.compiler.set_stance("force_eager"):
        yield


def leave_layers_uncompiled() -> None:
    """Keep Unsloth from compiling whole layers in this process, unless the user has set its variable."""
    os.environ.setdefault(BLOCK_COMPILE, "0")
