"""Select the attention kernel for packed rows, and decide by it whether a run packs its rows.

Attention over a pack is block-diagonal, one block per row. A kernel for rows of different length (varlen) computes
only the blocks; without one, a mask of the whole pack is built and most of the computed scores are discarded.
"""

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.task_options import PAIR_TASKS
from unsloth_ddp.data.images.processing import ImageProcessing
from unsloth_ddp.data.order.collate import Flatten, PadRight
from unsloth_ddp.data.order.packing import (
    PackingDecision,
    PackingObstacles,
    decide_packing,
    describe_backend,
    describe_older_gpu,
)
from unsloth_ddp.distributed.precision import AMPERE
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.distributed.sharding import shards_weights
from unsloth_ddp.model.forward.compile_options import leave_layers_uncompiled
from unsloth_ddp.model.modules import base_model
from unsloth_ddp.model.packing import varlen
from unsloth_ddp.model.packing.obstacles import lookahead_reason, mixing_reason, state_reason
from unsloth_ddp.model.packing.row_check import prompts_differ, rows_mix
from unsloth_ddp.model.packing.short_convolution import convolve_within_rows, convolving_layers
from unsloth_ddp.model.towers import keep_boundaries_from_towers, own_positions

logger = logging.getLogger("unsloth_ddp")
# Of the kernels that varlen.py takes.
LARGEST_HEAD = 512
TORCH_KERNEL = "torch's varlen_attn"
# Attention of Transformers that Unsloth lets varlen.py replace.
REPLACED = ("sdpa", varlen.NAME)


@dataclass(frozen=True)
class AttentionSetup:
    """Hold the properties that decide which attention kernel computes packed rows.

    Args:
        sixteen_bit: whether attention is computed in bf16 or fp16.
        head_dim: size of the largest attention head.
        implementation: attention of Transformers (sdpa, flash_attention_2, ...), used where Unsloth has none.
        unsloth_attention: whether Unsloth has replaced the model's attention layers.
        replaceable: whether varlen.py may replace that attention.
        chosen_by_unsloth: whether Unsloth has chosen the implementation, without attention layers of its own.
        obstacle: the reason why varlen.py cannot replace it, as far as it was looked for.
        capability: major compute capability of the GPU, 0 on a CPU.
        flash_attn, xformers: whether Unsloth would use them.
        torch_varlen: whether torch has a varlen_attn that takes grouped heads and windows.
    """

    device_type: str
    sixteen_bit: bool
    head_dim: int
    implementation: str = "sdpa"
    unsloth_attention: bool = False
    replaceable: bool = False
    chosen_by_unsloth: bool = False
    obstacle: str | None = None
    capability: int = 0
    flash_attn: bool = False
    xformers: bool = False
    torch_varlen: bool = False

    @property
    def kept_by_unsloth(self) -> bool:
        """Return whether Unsloth has chosen another implementation, beside which it changes layers."""
        return self.chosen_by_unsloth and self.implementation not in REPLACED


def select_varlen_kernel(setup: AttentionSetup) -> str | None:
    """Return the kernel for packed rows, in Unsloth's order of preference; None if a mask has to be used.

    No kernel is selected for fp32: torch's refuses it, and flash-attn would round to 16 bit.
    """
    if setup.device_type != "cuda" or not setup.sixteen_bit or setup.head_dim > LARGEST_HEAD or setup.head_dim % 8:
        return None
    torch_kernel = TORCH_KERNEL if setup.torch_varlen and setup.capability >= AMPERE[0] else None
    wide = setup.head_dim > varlen.LARGEST_FLASH_HEAD
    if not setup.unsloth_attention:
        if "flash" in setup.implementation:
            return None if wide else "flash-attn"
        usable = setup.replaceable and not setup.kept_by_unsloth and not setup.obstacle
        return torch_kernel if usable else None
    if wide:
        return None
    if setup.flash_attn and setup.capability >= AMPERE[0]:
        return "flash-attn"
    return torch_kernel or ("xformers" if setup.xformers else None)


def choose_packing(settings: Settings, runtime: Runtime, model: Any, *, images: bool = False) -> PackingDecision:
    """Decide whether this run packs its rows; every rank gets the same decision.

    If torch's kernel is selected for Transformers' attention, the model is switched to it.

    Raises:
        UserError: --packing is on, but this model would mix rows.
    """
    setup = _attention_setup(settings, runtime, model) if settings.packing != "off" else None
    ahead = lookahead_reason(model) if setup and images else None
    kernel = select_varlen_kernel(setup) if setup and not ahead else None
    everywhere = kernel if None not in runtime.gather(kernel) else None
    choice = decide_packing(
        settings.packing,
        _why_no_kernel(setup) or ahead or f"{_place(settings, runtime)} has no attention kernel for packed rows",
        everywhere,
        mixing_reason(model) or _kept_state(runtime, model),
    )
    if choice.packed and setup and not setup.unsloth_attention and kernel == TORCH_KERNEL:
        varlen.use(base_model(model))
    if choice.packed and images:
        keep_boundaries_from_towers(model)
    if choice.packed and _convolves_here(runtime, model):
        convolve_within_rows(model)
    return choice


def _kept_state(runtime: Runtime, model: Any) -> str | None:
    """Return why a layer carries a state from row to row; None where kernels may reset it, which is tried later."""
    obstacle = state_reason(model)
    if obstacle is None or shards_weights(runtime.sharding):
        return obstacle
    if runtime.backend == "unsloth":
        from unsloth.utils.packing import patch_hybrid_linear_attention_varlen

        return None if patch_hybrid_linear_attention_varlen(model) else obstacle
    return None


def prove_rows_apart(
    settings: Settings,
    runtime: Runtime,
    model: Any,
    token_ids: np.ndarray,
    choice: PackingDecision,
    processing: ImageProcessing | None = None,
) -> PackingDecision:
    """Return the decision to pack rows if a trial shows that they stay apart; every rank gets the same decision.

    Weights that are sharded cannot be used before training begins. There a kernel that gets the boundaries of rows is
    trusted, and a mask is not; nor is either with images.

    Args:
        token_ids: int (n,), tokens of rows.
        processing: of images, if rows have some.

    Raises:
        UserError: --packing is on, but this model mixes rows.
    """
    if not choice.packed:
        return choice
    mixed = None
    if all(runtime.gather(_can_compute(runtime, model))):
        prepare_for_packs(runtime, model)
        flatten = flatten_for(runtime, model, PadRight(0, processing))
        mixed = rows_mix(model, flatten, token_ids, runtime.precision, processing)
    elif processing is not None:
        mixed = "packs with images cannot be tried before training while its weights are sharded"
    elif runtime.backend != "unsloth" and not _gets_boundaries(_implementation(model)):
        mixed = "its masks cannot be tried before training while its weights are sharded"
    mixed = next((obstacle for obstacle in runtime.gather(mixed) if obstacle), None)
    if mixed is None:
        if runtime.backend == "unsloth" and _implementation(model) == varlen.NAME:
            # Train what was tried; CUDA graphs compile layers themselves, and compare what they compute.
            leave_layers_uncompiled()
        return choice
    return decide_packing(settings.packing, "", None, state_reason(model) or mixed)


def prove_prompts_shared(
    settings: Settings, runtime: Runtime, model: Any, token_ids: np.ndarray, choice: PackingDecision
) -> PackingDecision:
    """Return the decision, with whether the prompt of a pair is computed once for both answers; the same on every rank.

    It is if torch's kernel computes the packs, and a trial gives equal loss and gradients; not with sharded weights.

    Args:
        token_ids: int (n,), tokens of rows.
    """
    if not choice.packed or settings.task not in PAIR_TASKS:
        return choice
    obstacle = "only torch's kernel does that"
    if all(runtime.gather(_can_compute(runtime, model) and _implementation(model) == varlen.NAME)):
        differences = runtime.gather(prompts_differ(model, flatten_for(runtime, model), token_ids, runtime.precision))
        obstacle = next((difference for difference in differences if difference), "")
    logger.info("prompts of pairs are computed once%s", f" for each answer: {obstacle}" if obstacle else "")
    return dataclasses.replace(choice, prompts_once=not obstacle)


def _gets_boundaries(implementation: str) -> bool:
    return implementation == varlen.NAME or "flash" in implementation


def _can_compute(runtime: Runtime, model: Any) -> bool:
    """Return whether the model's weights are whole and where it trains."""
    weight = model.get_input_embeddings().weight
    return weight.device.type == runtime.device_type and not varlen.is_sharded(model)


def _why_no_kernel(setup: AttentionSetup | None) -> str | None:
    """Return what in the model keeps a GPU from computing packed rows with a kernel; None if it is something else."""
    if setup is None or setup.device_type != "cuda" or not setup.sixteen_bit:
        return None
    if setup.kept_by_unsloth:
        return (
            f"Unsloth computes the model's attention with {setup.implementation or 'code of its own'}, which takes no "
            "boundaries of rows; --backend transformers may pack them"
        )
    if setup.head_dim > LARGEST_HEAD or setup.head_dim % 8:
        return (
            f"the model's attention heads have {setup.head_dim} values, and kernels for packed rows take multiples of "
            f"8 up to {LARGEST_HEAD}"
        )
    return setup.obstacle


def packing_obstacles(model: Any, backend: str, *, unsloth_attention: bool) -> PackingObstacles:
    """Return what in a model, which may be empty, is against packing its rows on a GPU in 16 bit.

    Args:
        backend: unsloth or transformers.
        unsloth_attention: whether Unsloth will have replaced the model's attention layers.
    """
    base = base_model(model)
    setup = AttentionSetup(
        "cuda",
        sixteen_bit=True,
        head_dim=_largest_head(base.config.get_text_config()),
        # The model may be built with other attention than it trains with.
        implementation="sdpa" if base._supports_sdpa else "",
        chosen_by_unsloth=backend == "unsloth" and not unsloth_attention,
        obstacle=None if unsloth_attention else varlen.obstacle(base),
    )
    wrong = mixing_reason(model) or state_reason(model)
    return PackingObstacles(wrong, _why_no_kernel(setup), lookahead_reason(model))


def _place(settings: Settings, runtime: Runtime) -> str:
    """Describe where attention runs; name the generation of an older GPU, which is why it has no kernel."""
    if runtime.device_type == "cpu":
        return "a CPU"
    capability = torch.cuda.get_device_capability()
    older = "" if capability >= AMPERE else describe_older_gpu(runtime.device_name, capability)
    return describe_backend(runtime.backend, runtime.precision, settings) + older


def keys_for_packs(runtime: Runtime, model: Any) -> Literal["unsloth", "flash", "positions"]:
    """Return which keys a batch of packs needs besides position_ids (see data.order.collate.Flatten)."""
    implementation = _implementation(model)
    if implementation == varlen.NAME or (runtime.backend == "transformers" and "flash" in implementation):
        return "flash"
    return "unsloth" if runtime.backend == "unsloth" else "positions"


def flatten_for(runtime: Runtime, model: Any, padded: PadRight | None = None) -> Flatten:
    """Return what collates packs for this model; `padded` knows the images of rows, if they have some."""
    keys, convolves = keys_for_packs(runtime, model), _convolves_here(runtime, model)
    return Flatten(keys, row_of_token=convolves, padded=padded, positions=own_positions(model))


def _convolves_here(runtime: Runtime, model: Any) -> bool:
    """Return whether the model has short convolutions, and Unsloth does not keep their rows apart."""
    unsloths = runtime.backend == "unsloth" and state_reason(model) is not None
    return not unsloths and bool(convolving_layers(model))


def prepare_for_packs(runtime: Runtime, model: Any) -> None:
    """Enable Unsloth's packed attention for models that use Transformers' attention, as Unsloth's own trainer does."""
    if runtime.backend == "unsloth" and _implementation(model) != varlen.NAME:
        from unsloth.utils.hf_packed_attention import enable_hf_packed_attention

        enable_hf_packed_attention()


def _attention_setup(settings: Settings, runtime: Runtime, model: Any) -> AttentionSetup:
    base, unsloth = base_model(model), runtime.backend == "unsloth"
    cuda = runtime.device_type == "cuda"
    xformers = flash_attn = False
    torch_varlen = cuda and varlen.is_available()
    if unsloth:
        from unsloth.utils import attention_dispatch

        # Unsloth returns SDPA when it uses torch's own kernels.
        selected = attention_dispatch.select_attention_backend(use_varlen=True)
        xformers = selected == attention_dispatch.XFORMERS
        flash_attn = selected == attention_dispatch.FLASH_VARLEN
        # At import Unsloth has read its environment variable and checked the arguments of torch's kernel.
        torch_varlen = torch.version.hip is None and attention_dispatch._TORCH_VARLEN_ATTN is not None
    layers_of_unsloth = unsloth and any(_is_unsloth_attention(module) for module in model.modules())
    setup = AttentionSetup(
        device_type=runtime.device_type,
        sixteen_bit=runtime.precision != "fp32",
        head_dim=_largest_head(base.config.get_text_config()),
        implementation=_implementation(model),
        unsloth_attention=layers_of_unsloth,
        replaceable=unsloth or settings.attn_implementation is None,
        chosen_by_unsloth=unsloth and not layers_of_unsloth,
        capability=torch.cuda.get_device_capability()[0] if cuda else 0,
        flash_attn=flash_attn,
        xformers=xformers,
        torch_varlen=torch_varlen,
    )
    if select_varlen_kernel(setup) == TORCH_KERNEL and not setup.unsloth_attention:
        # Runs a forward pass, so it is called only where its answer matters.
        return dataclasses.replace(setup, obstacle=varlen.obstacle(base))
    return setup


def _largest_head(config: Any) -> int:
    """Return the size of the largest head; some configs with different layers raise RuntimeError on a common size."""
    try:
        heads = getattr(config, "num_attention_heads", 0) or 1
        return getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    except RuntimeError:
        return max(_largest_head(layer) for layer in config.per_layer_config)


def _is_unsloth_attention(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("Attention") and type(module).forward.__module__.startswith("unsloth.models")


def _implementation(model: Any) -> str:
    return str(getattr(base_model(model).config.get_text_config(), "_attn_implementation", None) or "")
