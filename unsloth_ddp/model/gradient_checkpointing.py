"""Gradient checkpointing of a loaded model: which kinds there are, and how one is exchanged for another.

Ordered by what they cost. none keeps every activation for the backward pass; torch keeps the input of each layer and
recomputes the rest; unsloth also moves those inputs to host memory.
"""

from __future__ import annotations

from typing import Any

from unsloth_ddp.config.parse import Settings
from unsloth_ddp.distributed.runtime import Runtime

KINDS = ("none", "torch", "unsloth")
UNSLOTH_NAMES: dict[str, Any] = {"none": False, "torch": True, "unsloth": "unsloth"}


class GradientCheckpointing:
    """The kind of gradient checkpointing that a model is trained with, which can be changed between two passes.

    Args:
        model: loaded with the first of `kinds_here`.
    """

    def __init__(self, model: Any, runtime: Runtime, settings: Settings) -> None:
        self.model = model
        self.backend = runtime.backend
        self.max_length = settings.max_length
        self.kinds = kinds_here(runtime, settings)
        self.kind = self.kinds[0]

    @property
    def level(self) -> int:
        """How many kinds have been left behind."""
        return self.kinds.index(self.kind)

    @property
    def next(self) -> str | None:
        """The kind that needs less memory than this one; None where there is none, or none is allowed."""
        return self.kinds[self.level + 1] if self.level + 1 < len(self.kinds) else None

    def use(self, kind: str) -> None:
        """Train with `kind` from now on."""
        if self.backend == "unsloth":
            self._use_in_unsloth(UNSLOTH_NAMES[kind])
        elif kind == "none":
            self.model.gradient_checkpointing_disable()
            self.model.disable_input_require_grads()
        else:
            # Enabling hooks the embedding, through PEFT too, and forgets the hook that is there.
            self.model.disable_input_require_grads()
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.kind = kind

    def _use_in_unsloth(self, name: Any) -> None:
        from unsloth.models._utils import apply_unsloth_gradient_checkpointing

        dtype = self.model.get_input_embeddings().weight.dtype
        # It exchanges torch's checkpoint function, which the layers then have to be given.
        name = apply_unsloth_gradient_checkpointing(name, self.max_length, dtype)
        if name:
            self.model.gradient_checkpointing_enable({"use_reentrant": True})
        # What its trainer goes back to after every evaluation.
        self.model._unsloth_gradient_checkpointing = name
        self.model.for_training(use_gradient_checkpointing=name)


def kinds_here(runtime: Runtime, settings: Settings) -> tuple[str, ...]:
    """The kinds that a run may use, the one it begins with first: one alone unless `gradient_checkpointing` is auto.

    Where weights or gradients are shared out, a rank that runs out of memory would leave the others waiting in the
    middle of a step, so that nothing can be tried there.
    """
    if settings.gradient_checkpointing != "auto":
        return (settings.gradient_checkpointing,)
    if runtime.sharding != "none":
        return ("torch",)
    return KINDS if runtime.backend == "unsloth" else KINDS[:2]


def loaded_with(runtime: Runtime, settings: Settings) -> str:
    """The kind that the model is loaded with."""
    return kinds_here(runtime, settings)[0]
