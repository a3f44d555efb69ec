"""Set the kind of gradient checkpointing of a loaded model, and switch between kinds.

In order of cost: none keeps every activation for the backward pass; torch keeps the input of each layer and
recomputes the rest; unsloth also moves those inputs to host memory.
"""

import weakref
from collections.abc import MutableMapping
from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import UserError

KINDS = ("none", "torch", "unsloth")
# The name of Transformers for an attention that takes the keys and values of an earlier layer.
TAKES_KEYS = "is_kv_shared_layer"
UNSLOTH_NAMES: dict[str, Any] = {"none": False, "torch": True, "unsloth": "unsloth"}


class GradientCheckpointing:
    """Hold the kind of gradient checkpointing of a model, which can be changed between two forward passes.

    Args:
        model: loaded with the first kind of `kinds_here`.
    """

    def __init__(self, model: Any, runtime: Runtime, settings: Settings) -> None:
        self.model = model
        self.backend = runtime.backend
        self.reentrant = reentrant(runtime, settings)
        self.max_length = settings.max_length
        self.kinds = kinds_here(runtime, settings)
        if (self.backend == "unsloth" or self.reentrant) and takes_keys_of_earlier_layers(model):
            self.kinds = kinds_that_keep_gradients(self.kinds, settings, runtime)
        self.kind = self.kinds[0]
        self._shared: list[weakref.ref[MutableMapping[Any, Any]]] = []
        if takes_keys_of_earlier_layers(model):
            from unsloth_ddp.model.modules import text_decoder

            text_decoder(model).layers[0].register_forward_pre_hook(self._note_shared, with_kwargs=True)

    def _note_shared(self, _: Any, __: Any, kwargs: dict[str, Any]) -> None:
        """Note the mapping by which layers hand keys and values to later ones."""
        import torch

        if not torch.compiler.is_compiling():
            mappings = [weakref.ref(value) for value in kwargs.values() if isinstance(value, MutableMapping)]
            self._shared = [ref for ref in self._shared if ref() is not None] + mappings

    def forget_failed_pass(self) -> None:
        """Free what a pass that failed in its backward pass keeps alive.

        The keys that layers share hold the graph, whose recomputed layers hold the mapping of the keys: Python does not
        see the part of this circle that is in C++. On Gemma 4 E4B each trial that ran out of memory kept 3 GiB.
        """
        for shared in self._shared:
            if (mapping := shared()) is not None:
                mapping.clear()
        self._shared = []

    @property
    def recomputes_reentrantly(self) -> bool:
        """Return whether layers are currently recomputed by reentrant checkpointing."""
        return self.kind != "none" and (self.reentrant or self.backend == "unsloth")

    def use(self, kind: str) -> None:
        """Switch the model to `kind`."""
        if self.backend == "unsloth":
            self._use_in_unsloth(UNSLOTH_NAMES[kind])
        elif kind == "none":
            self.model.gradient_checkpointing_disable()
            self.model.disable_input_require_grads()
        else:
            # Enabling registers a hook on the embedding (with PEFT too) and overwrites the handle of an existing one.
            self.model.disable_input_require_grads()
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": self.reentrant})
        self.kind = kind

    def _use_in_unsloth(self, name: Any) -> None:
        from unsloth.models._utils import apply_unsloth_gradient_checkpointing

        dtype = self.model.get_input_embeddings().weight.dtype
        # Unsloth replaces torch's checkpoint function; enabling it again passes the new one to the layers.
        name = apply_unsloth_gradient_checkpointing(name, self.max_length, dtype)
        if name:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        # Unsloth's trainer restores this value after every evaluation.
        self.model._unsloth_gradient_checkpointing = name
        self.model.for_training(use_gradient_checkpointing=name)


def kinds_here(runtime: Runtime, settings: Settings) -> tuple[str, ...]:
    """Return the kinds that this run may use, that of loading first; only one unless gradient_checkpointing is auto.

    With sharding the kind unsloth is not used: what it moves to host memory is recomputed when weights are sharded
    again. On a CPU nothing is estimated, so sharding, which is chosen where memory is short, uses torch.
    """
    if settings.gradient_checkpointing != "auto":
        return (settings.gradient_checkpointing,)
    if runtime.sharding != "none":
        return ("torch",) if runtime.device_type == "cpu" else KINDS[:2]
    return KINDS if runtime.backend == "unsloth" else KINDS[:2]


def takes_keys_of_earlier_layers(model: Any) -> bool:
    """Return whether layers of the model take the keys and values of earlier layers (Gemma 4, Gemma 3n)."""
    return any(getattr(module, TAKES_KEYS, False) is True for module in getattr(model, "modules", list)())


def kinds_that_keep_gradients(kinds: tuple[str, ...], settings: Settings, runtime: Runtime) -> tuple[str, ...]:
    """Return the kinds that do not recompute layers.

    Reentrant checkpointing computes the forward pass without gradients, so what a layer takes of an earlier layer
    beside its input has none: on a small Gemma 4 the gradient of a weight was up to 73 % off
    (benchmarks/results/correctness/shared_keys.json).

    Raises:
        UserError: the user asks for a kind that recomputes.
    """
    without_recomputing = tuple(kind for kind in kinds if kind == "none")
    if without_recomputing:
        return without_recomputing
    way = f"backend {runtime.backend}" if runtime.sharding == "none" else f"sharding {runtime.sharding}"
    raise UserError(
        f"gradient_checkpointing {settings.gradient_checkpointing} with {way} would lose gradients of model "
        f"{settings.model}, whose layers take the keys and values of earlier layers; give --backend transformers "
        "without ZeRO-3, or --gradient_checkpointing none."
    )


def reentrant(runtime: Runtime, settings: Settings) -> bool:
    """Return whether the kind torch uses reentrant checkpointing with the transformers backend.

    ZeRO-3 with adapters recomputes correctly only with reentrant checkpointing (TRL issue 2514).
    """
    return runtime.sharding == "zero3" and settings.method != "full"
