"""Compute the loss of a micro-batch of fixed shape, without a wait for the device, so that it can be captured.

The model's decoder is called with row boundaries that stay on the device. Layers whose attention is Unsloth's look up
the boundaries on the host, so that attention is computed by varlen.py's kernel there too.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from unsloth_ddp.data.order.fixed_shape import FixedShape, StepTensors
from unsloth_ddp.model.forward.compile_options import layer_options, own_call
from unsloth_ddp.model.forward.gradient_checkpointing import TAKES_KEYS
from unsloth_ddp.model.forward.head_loss import Logits, head_loss
from unsloth_ddp.model.modules import base_model, kept_random_numbers, replaced, text_decoder
from unsloth_ddp.model.packing import varlen
from unsloth_ddp.model.packing.short_convolution import convolving_layers

# The function that Unsloth's attention layers of every family call, by this name in the family's module.
UNSLOTH_ATTENTION = "run_attention"
# The function by which Unsloth's decoders and attention layers read the boundaries of rows on the host. Since 2026.10.9
# the decoder calls it for every batch of one sequence.
UNSLOTH_BOUNDARIES = "get_packed_info_from_kwargs"
# Unsloth's kernel that normalises and rotates queries and keys at once, for models like Qwen3, and is off by default in
# Unsloth: the module, the switch in it, and the variable that sets it.
FUSED_NORM = ("unsloth.kernels.qk_norm_rope", "QK_NORM_ROPE_ENABLED", "UNSLOTH_FUSED_QKNORM_ROPE")
# The name of Transformers for an attention that keeps its keys and values for later layers (Gemma 4).
KEEPS_KEYS = "store_full_length_kv"
# varlen.py passes the module on where a mask is given, which is not so here.
NO_MODULE = torch.nn.Identity()


class Rows:
    """The boundaries of the rows that attention stays within, int32 (rows + 1,); None where rows are sequences."""

    boundaries: Tensor | None = None


class PackedForward:
    """Call a causal language model on padded micro-batches (see FixedShape.pad).

    Args:
        model: of Transformers, in PEFT's wrapper or not; with packed rows it uses torch's varlen_attn (attention.py).
        shape: of every micro-batch.
        flash_attention_4: compute attention within rows by it, in place of torch's kernel.
        recompute: compute each layer again in the backward pass, as gradient checkpointing `torch` does. The library's
            own checkpointing is off here, whatever the model is set to.

    Raises:
        NotImplementedError: the model cannot be called in this way; the message says why, in a few words.
    """

    def __init__(
        self, model: Any, shape: FixedShape, *, recompute: bool = False, flash_attention_4: bool = False
    ) -> None:
        self.recompute = recompute
        self.flash_attention_4 = flash_attention_4
        # torch's attention for batches is faster than its kernel for rows of different length, and not faster than this
        # one.
        self.dense = bool(shape.sequences) and not flash_attention_4
        self.model, base = model, base_model(model)
        self.decoder: Any = text_decoder(model)
        self.head: Any = base.get_output_embeddings()
        self.logits = Logits.of(base.config.get_text_config())
        self.shape = shape
        self.layers: list[Any] = list(getattr(self.decoder, "layers", []))
        if not self.layers:
            raise NotImplementedError("its layers are not known")
        if type(self.head) is not torch.nn.Linear or self.head.bias is not None:
            raise NotImplementedError("its output head is not a plain matrix")
        attention = {
            type(module).forward.__module__
            for layer in self.layers
            for module in layer.modules()
            if type(module).__name__.endswith("Attention") and type(module).forward.__module__.startswith("unsloth.")
        }
        self.convolves: bool = bool(convolving_layers(model))
        self.unsloth_modules: list[Any] = [sys.modules[name] for name in attention]
        if any(not hasattr(module, UNSLOTH_ATTENTION) for module in self.unsloth_modules):
            raise NotImplementedError("Unsloth computes its attention in another way")
        self._rows: Rows = Rows()
        # One function for all calls: compiled layers are compiled anew for another one.
        self._attend: Callable[..., Tensor] = _attention_within(self._rows, shape.longest, dense=self.dense)

    def loss_sum(self, step: StepTensors, dtype: torch.dtype) -> Tensor:
        """Return the summed token losses, 0-dim float32; call it and the backward pass inside `passes`."""
        hidden = self._hidden(step)
        selected = hidden.reshape(-1, hidden.shape[-1]).index_select(0, step.head_positions)
        return head_loss(selected, self.head.weight, step.head_labels, dtype, self.logits)

    def _hidden(self, step: StepTensors) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": step.input_ids, "position_ids": step.position_ids, "use_cache": False}
        boundaries = None
        if not self.shape.sequences:
            boundaries = step.boundaries.int()
            # Compiled layers are the same for any number of rows.
            torch._dynamo.mark_dynamic(boundaries, 0)
            if self.convolves:
                inputs["seq_idx"] = (step.position_ids == 0).cumsum(1).int()
        self._rows.boundaries = boundaries
        if not self.unsloth_modules and self.decoder.config._attn_implementation == varlen.NAME:
            longest = self.shape.longest
            inputs["dense"] = self.dense
            if boundaries is not None:
                inputs |= {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
                inputs |= {"max_length_q": longest, "max_length_k": longest}
        return self.decoder(**inputs)[0]

    def draws_random_numbers(self, step: StepTensors) -> bool:
        """Return whether a forward pass draws random numbers in the model's mode, as dropout does in training."""
        device = step.input_ids.device
        with kept_random_numbers(device), torch.no_grad(), self.passes():
            state = _random_state(device)
            self._hidden(step)
            return not torch.equal(state, _random_state(device))

    @contextmanager
    def passes(self) -> Iterator[None]:
        """Prepare the model for forward and backward passes inside the block.

        A layer that is computed again in the backward pass has to find there what it found in the forward pass.
        """
        with ExitStack() as changes:
            if self.flash_attention_4:
                changes.enter_context(varlen.flash_attention_4())
            for owner, name, value in (*self._unsloth_attention(), *self._own_checkpointing(), *self._unread_keys()):
                changes.enter_context(replaced(owner, name, value))
            changes.enter_context(base_model(self.model).get_input_embeddings().register_forward_hook(_with_gradient))
            yield

    def _unsloth_attention(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield what to replace so that Unsloth's layers attend within `_rows`, and use its fused kernel for norms."""
        for module in self.unsloth_modules:
            yield module, UNSLOTH_ATTENTION, self._attend
        if self.unsloth_modules:
            for module in self._unsloth_readers():
                yield module, UNSLOTH_BOUNDARIES, _no_boundaries
            # Unsloth would cut a micro-batch of several packs at the longest row.
            yield self.decoder, "_unsloth_allow_packed_overlength", True
            name, switch, variable = FUSED_NORM
            if name in sys.modules and variable not in os.environ:
                yield sys.modules[name], switch, True

    def _unsloth_readers(self) -> list[Any]:
        """Return Unsloth's modules that read the boundaries of rows on the host, which cannot be captured."""
        decoder = sys.modules[inspect.unwrap(type(self.decoder).forward).__module__]
        modules = {id(module): module for module in (decoder, *self.unsloth_modules)}
        return [module for module in modules.values() if hasattr(module, UNSLOTH_BOUNDARIES)]

    def _own_checkpointing(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield what to replace to turn off the library's gradient checkpointing, and to recompute layers if asked.

        Transformers' checkpointing reads the state of the GPU's random numbers, and Unsloth's is reentrant; neither can
        be captured.
        """
        for module in self.decoder.modules():
            if vars(module).get("gradient_checkpointing"):
                yield module, "gradient_checkpointing", False
        for layer in self.layers if self.recompute else ():
            yield layer, "_compiled_call_impl", _recomputed(layer._compiled_call_impl or layer._call_impl)

    def _unread_keys(self) -> Iterator[tuple[Any, str, Any]]:
        """Yield what to replace so that no layer keeps its keys and values for later layers, if no layer takes them.

        A layer that keeps them would be compiled apart from those that do not.
        """
        keeping = [module for layer in self.layers for module in layer.modules() if hasattr(module, KEEPS_KEYS)]
        if not any(getattr(module, TAKES_KEYS, True) for module in keeping):
            for module in keeping:
                yield module, KEEPS_KEYS, False

    @contextmanager
    def compiled_layers(self) -> Iterator[None]:
        """Run layers and the last norm compiled inside the block; each is compiled at its first call there."""
        norm = getattr(self.decoder, "norm", None)
        # Unsloth computes the last norm without calling the module.
        modules = self.layers if self.unsloth_modules or norm is None else [*self.layers, norm]
        try:
            for module in modules:
                module._compiled_call_impl = torch.compile(own_call(module), dynamic=False, options=layer_options())
            with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=4096):
                yield
        finally:
            for module in modules:
                # torch has no way to take a module's compile() back.
                module._compiled_call_impl = None


def _with_gradient(_: Any, __: Any, embedded: Tensor) -> Tensor:
    """Let embedded tokens have a gradient: the first layer would be compiled apart from those whose input has one.

    A copy, since some models scale it in place.
    """
    if embedded.requires_grad or not torch.is_grad_enabled():
        return embedded
    return embedded.requires_grad_().clone()


def _no_boundaries(*_: Any, **__: Any) -> None:
    """Stand for UNSLOTH_BOUNDARIES: the kit's attention has the boundaries on the device."""


def _recomputed(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer's call that keeps only its inputs, and is repeated in the backward pass.

    The repetition draws its own random numbers: a captured graph cannot set the generator's state back.
    """
    checkpoint = torch.utils.checkpoint.checkpoint
    if checkpoint.__module__ != torch.utils.checkpoint.__name__:
        raise NotImplementedError(f"{checkpoint.__module__} has replaced torch's checkpoint function")
    return functools.partial(checkpoint, call, use_reentrant=False, preserve_rng_state=False)


def _random_state(device: torch.device) -> Tensor:
    """Return the state of the device's random numbers."""
    return torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)


def _attention_within(rows: Rows, longest: int, *, dense: bool) -> Callable[..., Tensor]:
    """Return a function in place of Unsloth's run_attention: causal attention within the rows of a pack."""

    def attend(*, config: Any, context: Any, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        options = config.flash_varlen_kwargs or {}
        if options.get("softcap") or not context.is_causal:
            raise NotImplementedError("its attention has a cap on its scores or looks ahead")
        attended, _ = varlen.attend(
            NO_MODULE,
            Q,
            K,
            V,
            scaling=options.get("softmax_scale"),
            sliding_window=context.sliding_window if (context.sliding_window or 0) > 0 else None,
            cu_seq_lens_q=rows.boundaries,
            max_length_q=longest,
            dense=dense,
        )
        return attended

    return attend
