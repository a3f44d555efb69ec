"""What attention can do with packed rows here: is there a kernel for them, and does the model keep them apart.

Attention over a pack is many small squares. A kernel for rows of different length computes only those; without one
a mask of the whole pack has to be built and mostly thrown away.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from unsloth_ddp.config.parse import Settings
from unsloth_ddp.data.packing import PackingDecision, decide_packing, describe_backend
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model import varlen

# Layers that carry something over from one token to the next, and so from the end of a row into the next row.
CARRYING_LAYERS = re.compile(
    r"mamba|deltanet|rwkv|shortconv|recurrent|linear_?attention|lightning|xlstm|retention|v4\w+compressor",
    re.IGNORECASE,
)
# Attention within fixed stretches of the whole sequence, whatever rows it holds.
FIXED_STRETCHES = ("chunked_attention",)
# Positions are distances in the sequence, which position_ids do not change.
ALIBI_MODELS = ("bloom", "mpt")
# Speech models whose text part does not pass positions on.
LOSING_POSITIONS = ("moshi",)
# Their masks are made without positions, so that only a kernel is told where rows begin.
LOSING_IN_MASKS = ("afmoe", "biogpt", "falcon", "gpt_oss", "granitemoehybrid", "opt", "xglm")
# Their flash attention is called without positions, so that only a mask is.
LOSING_IN_FLASH = ("gpt_neo", "gptj")
LARGEST_HEAD = 256
TORCH_KERNEL = "torch's varlen_attn"


@dataclass(frozen=True)
class Kernels:
    """What decides whether attention has a kernel for rows of different length.

    Args:
        unsloth_attention: Unsloth has replaced the model's attention layers by its own.
        implementation: the attention of Transformers (sdpa, flash_attention_2, ...), for models where it has not.
        replaceable: varlen.py can take the place of that attention.
        capability: major compute capability of the GPU.
        torch_varlen: torch has a varlen_attn that takes grouped heads and windows.
    """

    device_type: str
    sixteen_bit: bool
    head_dim: int
    implementation: str = "sdpa"
    unsloth_attention: bool = False
    replaceable: bool = False
    capability: int = 0
    flash_attn: bool = False
    xformers: bool = False
    torch_varlen: bool = False


def find_kernel(facts: Kernels) -> str | None:
    """The kernel that packed rows go through, in Unsloth's order of preference; None where they would be masked.

    In 32 bit there is none: torch's refuses, and flash-attn would round.
    """
    if facts.device_type != "cuda" or not facts.sixteen_bit or facts.head_dim > LARGEST_HEAD or facts.head_dim % 8:
        return None
    torchs = TORCH_KERNEL if facts.torch_varlen and facts.capability >= 8 else None
    if not facts.unsloth_attention:
        if "flash" in facts.implementation:
            return "flash-attn"
        return torchs if facts.implementation in ("sdpa", varlen.NAME) and facts.replaceable else None
    if facts.flash_attn and facts.capability >= 8:
        return "flash-attn"
    return torchs or ("xformers" if facts.xformers else None)


def why_mixed(model: Any) -> str | None:
    """Why rows of a pack would see each other, or be told apart wrongly, in this model; None where they would not."""
    base = _base(model)
    config = base.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if text is not config:
        return "the model takes images or sound, whose positions are not those of packed rows"
    if getattr(config, "is_encoder_decoder", False):
        return "the model has an encoder, which sees whole packs"
    if getattr(config, "alibi", False) or config.model_type in ALIBI_MODELS:
        return "the model's attention (ALiBi) goes by distance in the sequence"
    if "mrope_section" in _rope(config):
        return "the model's positions (M-RoPE) do not tell rows apart"
    parameters = inspect.signature(base.forward).parameters
    hidden = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
    if "position_ids" not in parameters and not hidden:
        return "the model takes no position_ids, which tell rows apart"
    if config.model_type in LOSING_POSITIONS:
        return "the model does not pass on the positions that tell rows apart"
    if any(_begins_after_padding(*named) for named in base.named_modules()):
        return "the model's positions begin after that of its padding token, and those of packed rows at 0"
    stretches = [kind for kind in getattr(config, "layer_types", None) or [] if kind in FIXED_STRETCHES]
    if stretches:
        return f"the model's {stretches[0].replace('_', ' ')} goes by place in the sequence"
    carrying = next(_carrying_layers(base), None)
    if carrying is not None:
        return f"the model's {carrying} layers carry a state from one row into the next"
    return _blocked_by_unsloth(config.model_type)


def why_lost(model_type: str, kernel: str | None, implementation: str) -> str | None:
    """Why attention of Transformers as it is used here is not told where rows begin; None where it is."""
    if kernel is None and model_type in LOSING_IN_MASKS:
        return f"the masks of {model_type} models do not tell rows apart"
    if "flash" in implementation and model_type in LOSING_IN_FLASH:
        return f"{model_type} models do not tell flash attention where rows begin"
    return None


def why_doubtful(model: Any) -> str | None:
    """Why packing has not been tried with such a model, though nothing is known to be wrong."""
    if "token_type_ids" in inspect.signature(_base(model).forward).parameters:
        return "the model takes token_type_ids, with which packing has not been tried"
    return None


def choose_packing(settings: Settings, runtime: Runtime, model: Any) -> PackingDecision:
    """Whether this run packs its rows, the same on every rank; attention of Transformers takes the kernel found for it.

    Raises:
        UserError: packing was asked for, and this model would mix rows.
    """
    facts = _kernels(settings, runtime, model) if settings.packing != "off" else None
    kernel = find_kernel(facts) if facts else None
    everywhere = kernel if None not in runtime.gather(kernel) else None
    choice = decide_packing(
        settings.packing,
        "a CPU" if runtime.device_type == "cpu" else describe_backend(runtime.backend, runtime.precision, settings),
        everywhere,
        why_mixed(model) or why_lost(_base(model).config.model_type, everywhere, _implementation(model)),
        why_doubtful(model),
    )
    if choice.packed and facts and not facts.unsloth_attention and kernel == TORCH_KERNEL:
        varlen.use(_base(model))
    return choice


def keys_for_packs(runtime: Runtime, model: Any) -> Literal["unsloth", "flash", "positions"]:
    """What a batch of packs has to carry beside positions (see data.Flatten)."""
    implementation = _implementation(model)
    if implementation == varlen.NAME or (runtime.backend == "transformers" and "flash" in implementation):
        return "flash"
    return "unsloth" if runtime.backend == "unsloth" else "positions"


def prepare_for_packs(runtime: Runtime, model: Any) -> None:
    """Let models whose attention Unsloth leaves to Transformers use its kernels too; its own trainer does the same."""
    if runtime.backend == "unsloth" and _implementation(model) != varlen.NAME:
        from unsloth.utils.hf_packed_attention import enable_hf_packed_attention

        enable_hf_packed_attention()


def _kernels(settings: Settings, runtime: Runtime, model: Any) -> Kernels:
    base, unsloth = _base(model), runtime.backend == "unsloth"
    cuda = runtime.device_type == "cuda"
    xformers = flash_attn = False
    torch_varlen = cuda and varlen.is_available()
    if unsloth:
        from unsloth.utils import attention_dispatch

        # What Unsloth would take; SDPA stands for torch's own kernels.
        selected = attention_dispatch.select_attention_backend(use_varlen=True)
        xformers = selected == attention_dispatch.XFORMERS
        flash_attn = selected == attention_dispatch.FLASH_VARLEN
        # Unsloth has looked at its switch and at what torch's kernel takes when it was imported.
        torch_varlen = torch.version.hip is None and attention_dispatch._TORCH_VARLEN_ATTN is not None
    facts = Kernels(
        device_type=runtime.device_type,
        sixteen_bit=runtime.precision != "fp32",
        head_dim=_largest_head(base.config),
        implementation=_implementation(model),
        unsloth_attention=unsloth and any(_is_unsloths(module) for module in model.modules()),
        replaceable=unsloth or settings.attn_implementation is None,
        capability=torch.cuda.get_device_capability()[0] if cuda else 0,
        flash_attn=flash_attn,
        xformers=xformers,
        torch_varlen=torch_varlen,
    )
    if find_kernel(facts) == TORCH_KERNEL and not facts.unsloth_attention and not varlen.can_replace(base):
        return dataclasses.replace(facts, replaceable=False)
    return facts


def _largest_head(config: Any) -> int:
    """Numbers of one head; layers may differ, and such configs refuse to name one for all."""
    try:
        heads = getattr(config, "num_attention_heads", 0) or 1
        return getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    except RuntimeError:
        return max(_largest_head(layer) for layer in config.per_layer_config)


def _is_unsloths(module: torch.nn.Module) -> bool:
    return type(module).__name__.endswith("Attention") and type(module).forward.__module__.startswith("unsloth.models")


def _begins_after_padding(name: str, module: torch.nn.Module) -> bool:
    positions = isinstance(module, torch.nn.Embedding) and name.endswith("position_embeddings")
    return positions and module.padding_idx is not None


def _base(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _implementation(model: Any) -> str:
    return str(getattr(_base(model).config, "_attn_implementation", None) or "")


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def _carrying_layers(model: torch.nn.Module) -> Iterator[str]:
    for module in model.modules():
        name = type(module).__name__
        convolves = isinstance(module, torch.nn.Conv1d) and module.kernel_size != (1,)
        if CARRYING_LAYERS.search(name) or hasattr(module, "A_log") or convolves:
            yield name


def _blocked_by_unsloth(model_type: str) -> str | None:
    trainer = sys.modules.get("unsloth.trainer")
    if trainer is not None and any(name in model_type for name in trainer.PADDING_FREE_BLOCKLIST):
        return f"Unsloth does not pack {model_type} models"
    return None
