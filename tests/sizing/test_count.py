"""The shape of a model from its config: parameters, adapters, experts, and work per token."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.conftest import REPO
from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.towers import image_tower, kept_a_patch
from unsloth_ddp.sizing.count import read_model_shape


def test_the_demos_shape_is_the_one_training_reports(demo_shape):
    # As the table before step 1 has it: 163,840 trainable parameters, 14.50 % of all.
    assert demo_shape.adapter == 163_840
    assert demo_shape.adapter / (demo_shape.parameters + demo_shape.adapter) == pytest.approx(0.1450, abs=5e-5)
    assert (demo_shape.layers, demo_shape.vocabulary, demo_shape.layer_input) == (4, 883, 128 * 2)
    # q, k, v, o and three of the feed-forward, four times.
    assert demo_shape.linear == 4 * (4 * 128 * 128 + 3 * 128 * 384)
    assert demo_shape.layer_kept > 3 * 384 * 2


def test_stacked_experts_are_counted_though_they_are_no_linear_layers(tmp_path):
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    transformers.Qwen3MoeConfig(**sizes, **heads, num_experts=8, num_experts_per_tok=2).save_pretrained(tmp_path)
    shape = read_model_shape(Settings(model=str(tmp_path)))
    assert shape.has_experts and shape.experts == 2 * 8 * 3 * 16 * 32
    assert shape.active_experts == shape.experts // 4
    # All but the embedding, norms and routers.
    assert shape.flops_a_token("full") == 6 * (shape.linear + shape.active_experts + shape.head)
    assert 0.95 * shape.parameters < shape.linear + shape.experts + 2 * shape.head <= shape.parameters


@pytest.mark.slow
def test_a_published_mixture_has_its_published_counts(tmp_path):
    # config.json of Qwen3-30B-A3B, whose card says 30.5 billion parameters, 3.3 of them active.
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
    transformers.Qwen3MoeConfig(
        **sizes, **heads, **experts, vocab_size=151936, tie_word_embeddings=False
    ).save_pretrained(tmp_path)
    shape = read_model_shape(Settings(model=str(tmp_path)))
    assert shape.parameters == 30_532_122_624
    assert (shape.experts, shape.active_experts) == (48 * 128 * 3 * 768 * 2048, 48 * 8 * 3 * 768 * 2048)
    # The embedding is in memory, and no work.
    active = shape.linear + shape.active_experts + 2 * shape.head
    assert active == pytest.approx(3.3e9, rel=0.02)
    assert shape.flops_a_token("lora") < 0.12 * 4 * shape.parameters
    # Without experts an adapter is on q, k, v and o: 16 x (in + out) of each.
    assert shape.adapter == 48 * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))
    assert shape.adapted_experts == 0
    on_experts = read_model_shape(Settings(model=str(tmp_path), lora_target_parameters=["all-experts"]))
    assert on_experts.adapter - shape.adapter == 48 * 16 * 128 * ((2048 + 1536) + (768 + 2048))
    assert on_experts.adapted_experts == shape.experts


def test_work_a_token_counts_weight_gradients_of_trained_weights_only(demo_shape):
    n = demo_shape.linear + demo_shape.head
    assert demo_shape.flops_a_token("full") == 6 * n
    assert demo_shape.flops_a_token("lora") == 4 * (n + 163_840) + 2 * 163_840


SHAPES_MODEL = REPO / "demo" / "vision_model"


def test_the_tower_of_images_is_counted():
    frozen, trained = (
        read_model_shape(Settings(model=str(SHAPES_MODEL), train_towers=trained_towers))
        for trained_towers in (False, True)
    )
    assert (frozen.numbers_a_patch, frozen.tower_layers, frozen.tower_input) == (3 * 2 * 14 * 14, 2, 64 * 2)
    assert (frozen.tower_trained, trained.tower_trained) == (False, True)
    assert trained.adapter > frozen.adapter and trained.tokens_a_pixel > 1.9 * frozen.tokens_a_pixel > 0
    full = read_model_shape(Settings(model=str(SHAPES_MODEL), method="full"))
    # A token has three passes through the weights, a patch of a frozen tower one.
    assert full.tokens_a_pixel == pytest.approx(
        read_model_shape(Settings(model=str(SHAPES_MODEL), method="full", train_towers=True)).tokens_a_pixel / 3
    )


def test_a_layer_of_a_tower_keeps_about_what_is_counted():
    model = transformers.AutoModelForImageTextToText.from_pretrained(SHAPES_MODEL, dtype=torch.float32)
    block, saved_tensors = image_tower(model).blocks[0], {}
    weight_addresses = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor):
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in weight_addresses:
            saved_tensors[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    patches = 256
    states = torch.randn(patches, 64, requires_grad=True)
    rotary = (torch.ones(patches, 32), torch.zeros(patches, 32))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        block(states, cu_seqlens=torch.tensor([0, patches]), position_embeddings=rotary)
    numbers = sum(tensor.untyped_storage().nbytes() / 4 for tensor in saved_tensors.values()) / patches
    assert kept_a_patch(block) == pytest.approx(numbers, rel=0.4)
