"""Set the kind of gradient checkpointing of a loaded model, and switch between kinds.

In order of cost: none keeps every activation for the backward pass; torch keeps the input of each layer and
recomputes the rest; unsloth also moves those inputs to host memory.
"""

from typing import Any

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.runtime import Runtime

KINDS = ("none", "torch", "unsloth")
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
        self.kind = self.kinds[0]

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

    With sharding the kind unsloth is not used: what it moves to host memory is recomputed when weights are sharded again.
    On a CPU nothing is estimated, so sharding, which is chosen where memory is short, uses torch.
    """
    if settings.gradient_checkpointing != "auto":
        return (settings.gradient_checkpointing,)
    if runtime.sharding != "none":
        return ("torch",) if runtime.device_type == "cpu" else KINDS[:2]
    return KINDS if runtime.backend == "unsloth" else KINDS[:2]


def reentrant(runtime: Runtime, settings: Settings) -> bool:
    """Return whether the kind torch uses reentrant checkpointing with the transformers backend.

    ZeRO-3 with adapters recomputes correctly only with reentrant checkpointing (TRL issue 2514).
    """
    return runtime.sharding == "zero3" and settings.method != "full"
