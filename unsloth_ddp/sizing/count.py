"""Count a model's parameters and activations from its config.json: an empty model is built on the meta device.

To count the activations kept for the backward pass, a forward pass is run over the empty model, which computes nothing,
and every tensor that autograd saves is added up.
"""

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import torch

from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.adapter.experts import EXPERTS, EXPERTS_A_TOKEN, adapted_parameters, number_in, stacked_experts
from unsloth_ddp.model.loading.classes import model_class, read_config
from unsloth_ddp.model.modules import text_decoder, without_kernels
from unsloth_ddp.model.packing.attention import packing_obstacles
from unsloth_ddp.model.parts import freeze_beside_text, parts_beside_text
from unsloth_ddp.model.towers import image_tower, kept_a_patch, tokens_a_pixel, trained_beside
from unsloth_ddp.sizing.choose import backend_of
from unsloth_ddp.sizing.shape import ModelShape
from unsloth_ddp.utils.errors import UserError, one_line

# Tokens of that forward pass; the result is per token.
COUNTED_TOKENS = 512


def read_model_shape(settings: Settings) -> ModelShape:
    """Return the shape of the model and adapter that `settings` name, from config.json without weights.

    Raises:
        UserError: the config cannot be read or downloaded, or its model cannot be built.
    """
    from accelerate import init_empty_weights

    from unsloth_ddp.model.loading.load import describe_load_error

    try:
        config = read_config(settings)
        # The empty model is built of plain linear layers, also for a quantized checkpoint.
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with init_empty_weights():
            model: Any = model_class(config, settings).from_config(
                config,
                dtype=torch.bfloat16,
                attn_implementation=_without_scores(),
                trust_remote_code=settings.trust_remote_code,
            )
    except (OSError, ValueError) as error:
        raise UserError(f"model {settings.model} cannot be planned for: {describe_load_error(error)}") from None
    # Tied parameters are separated when they are made empty.
    model.tie_weights()
    model.to("meta")
    return count_shape(model, settings)


def count_shape(model: Any, settings: Settings) -> ModelShape:
    """Return the counts of an empty model; the adapter of `settings` is added to it."""
    from peft import get_peft_model
    from transformers.modeling_layers import GradientCheckpointingLayer

    from unsloth_ddp.model.adapter.lora import lora_config

    head = model.get_output_embeddings()
    linear = [m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    parameters = sum(p.numel() for p in model.parameters())
    text = model.config.get_text_config()
    stacked = stacked_experts(model)
    experts = sum(p.numel() for p in stacked.values())
    expert_count, used = number_in(text, EXPERTS), number_in(text, EXPERTS_A_TOKEN)
    # Experts that are linear layers of their own are counted among those.
    counted = not expert_count or bool(stacked and used)
    vocabulary, head_size = head.weight.shape[0], head.weight.numel()
    backend = backend_of(settings)
    unsloths = backend == "unsloth" and _is_file_of_unsloth(model.config.model_type)
    packing = packing_obstacles(model, backend, unsloth_attention=unsloths)
    beside = {id(module): module for part in parts_beside_text(model).values() for module in part.modules()}
    blocks = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and id(m) not in beside]
    towers = {id(p): p for module in beside.values() for p in module.parameters()}
    tower_linear = sum(module.weight.numel() for module in beside.values() if isinstance(module, torch.nn.Linear))
    tower = image_tower(model)
    beside_trained = trained_beside(model, settings.train_towers)
    freeze_beside_text(model, beside_trained)
    frozen = sum(p.numel() for p in towers.values() if not p.requires_grad)
    tower_trained = any(p.requires_grad for block in tower.blocks for p in block.parameters()) if tower else False
    work = tokens_a_pixel(model)
    try:
        adapted: Any = get_peft_model(model, lora_config(settings, model), low_cpu_mem_usage=True)
    except ValueError as error:
        raise UserError(f"lora_target_modules: {one_line(error)}") from None
    adapter = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    if tower and settings.method != "full":
        tower_trained = any(p.requires_grad for block in tower.blocks for p in block.parameters())
    with_adapter = sum(
        p.numel() for _, p in adapted_parameters(adapted) if any(p is weight for weight in stacked.values())
    )
    adapted.to(torch.bfloat16)
    _without_adapted_experts(adapted)
    model.enable_input_require_grads()
    layer_input, layer_kept, outside = _kept_bytes(model, blocks)
    return ModelShape(
        parameters=parameters,
        linear=sum(linear),
        largest_linear=max(linear, default=0),
        head=head_size,
        vocabulary=vocabulary,
        adapter=adapter,
        layers=len(blocks),
        layer_input=layer_input,
        layer_kept=layer_kept,
        outside_kept=outside,
        experts=experts,
        active_experts=experts * used // expert_count if counted and expert_count else experts,
        adapted_experts=with_adapter,
        has_experts=expert_count > 0,
        towers=frozen,
        tower_linear=tower_linear,
        numbers_a_patch=tower.numbers_a_patch if tower else 0,
        tower_layers=len(tower.blocks) if tower else 0,
        tower_input=2 * tower.hidden if tower else 0,
        tower_kept=2 * kept_a_patch(tower.blocks[0]) if tower else 0,
        tower_trained=tower_trained,
        tokens_a_pixel=work if settings.method == "full" else tokens_a_pixel(adapted),
        packing=packing,
    )


def _is_file_of_unsloth(model_type: str) -> bool:
    """Return whether Unsloth has a file for this architecture, which replaces its attention."""
    spec = importlib.util.find_spec("unsloth")
    return bool(spec and spec.origin and (Path(spec.origin).parent / "models" / f"{model_type}.py").is_file())


def _without_adapted_experts(model: torch.nn.Module) -> None:
    """Leave adapters of stacked experts out of forward passes: PEFT uses autocast there, which meta does not have."""
    from peft.tuners.lora.layer import ParamWrapper

    for module in model.modules():
        if isinstance(module, ParamWrapper):
            module.forward = module.get_base_layer().forward  # type: ignore[method-assign]


class _Attention(torch.autograd.Function):
    """An attention that keeps its inputs, its output and one number per row, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise AssertionError("an empty model has no backward pass")


def _attend(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **_: Any) -> tuple[Any, None]:
    return _Attention.apply(query, key, value).transpose(1, 2), None


def _without_scores() -> str:
    """Register that attention with Transformers; return its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("unsloth_ddp_counted", _attend)
    AttentionMaskInterface.register("unsloth_ddp_counted", sdpa_mask)
    return "unsloth_ddp_counted"


def _kept_bytes(model: Any, blocks: list[Any]) -> tuple[float, float, float]:
    """Return bytes per token: input of a block, kept by the block that keeps most, kept outside blocks."""
    weight_storages = {p.untyped_storage()._cdata for p in model.parameters()}
    kept_tensors: dict[int, torch.Tensor] = {}
    kept_by_block = [0] * (len(blocks) + 1)
    inside, inputs = [-1], [0]

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weight_storages and storage._cdata not in kept_tensors:
            # Kept alive, so that no later tensor gets its address.
            kept_tensors[storage._cdata] = tensor
            kept_by_block[inside[0]] += storage.nbytes()
        return tensor

    def enter(index: int, hidden: Any) -> None:
        inside[0] = index
        if isinstance(hidden, torch.Tensor):
            inputs[0] = max(inputs[0], hidden.numel() * hidden.element_size())

    ids = torch.zeros((1, COUNTED_TOKENS), dtype=torch.long, device="meta")
    # Four dimensions, so that Transformers uses this mask as it is.
    mask = torch.ones((1, 1, COUNTED_TOKENS, COUNTED_TOKENS), dtype=torch.bool, device="meta")
    model.train()
    with without_kernels(), contextlib.ExitStack() as hooks:
        for index, block in enumerate(blocks):
            hooks.enter_context(block.register_forward_pre_hook(lambda m, a, i=index: enter(i, a[0] if a else None)))
            hooks.enter_context(block.register_forward_hook(lambda m, a, o: inside.__setitem__(0, -1)))
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor))
        text_decoder(model)(input_ids=ids, attention_mask=mask, use_cache=False)
    blocks_kept = max(kept_by_block[:-1], default=0)
    return inputs[0] / COUNTED_TOKENS, blocks_kept / COUNTED_TOKENS, kept_by_block[-1] / COUNTED_TOKENS
