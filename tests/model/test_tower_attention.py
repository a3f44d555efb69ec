"""Test that a tower computes the attention of all images at once, and the same as image by image."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.tiny_vision import KINDS, draw, save_vision
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.images.processing import load_processing
from unsloth_ddp.model.packing import tower_attention
from unsloth_ddp.model.towers import image_tower

# Their towers join the patches of all images.
JOINED = ("qwen3_vl", "qwen3_5", "mistral3")


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Let a CPU compute as torch's kernel does, in fp32; return where the boundaries of its calls go."""
    calls: list[tuple[int, ...]] = []

    def kernel(query, key, value, ends, ends_of_keys, longest, longest_key, *, scale, window_size):
        assert window_size == (-1, -1) and longest == longest_key == max(ends.diff()) and ends_of_keys is ends
        calls.append(tuple(ends.tolist()))
        image = torch.arange(len(ends) - 1).repeat_interleave(ends.diff())
        heads = (one.transpose(0, 1)[None] for one in (query, key, value))
        mask = image[:, None] == image[None]
        return torch.nn.functional.scaled_dot_product_attention(*heads, mask, scale=scale)[0].transpose(0, 1)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(tower_attention, "by_kernel", lambda *_: True)
    return calls


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("kind", JOINED)
def test_images_together_are_as_they_are_apart(kind: str, kernel: bool, tmp_path: Path, monkeypatch) -> None:
    save_vision(kind, tmp_path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    images = [draw(tmp_path / f"{size}.png", "red", "circle", (size, 56)) for size in (28, 84, 56)]
    processing = load_processing(Settings(model=str(tmp_path)))
    shown = processing.processor.image_processor(
        images=[processing._open(str(one)) for one in images], return_tensors="pt"
    )
    weights = [p for p in model.parameters() if p.requires_grad]

    def features_and_gradients() -> list[torch.Tensor]:
        features = torch.cat(tuple(model.get_image_features(**shown, return_dict=True).pooler_output))
        gradients = torch.autograd.grad(features.square().sum(), weights, allow_unused=True)
        return [features.detach(), *(one for one in gradients if one is not None)]

    expected = features_and_gradients()
    calls = as_on_a_gpu(monkeypatch) if kernel else []
    layers = tower_attention.joined_layers(model)
    assert layers is not None and tower_attention.use(layers)
    monkeypatch.setattr("transformers.models.pixtral.modeling_pixtral.generate_block_attention_mask", None)
    for found, wanted in zip(features_and_gradients(), expected, strict=True):
        assert (found - wanted).norm() <= 1e-6 * wanted.norm()
    if kernel:
        # Of one call a layer, with patches of 14 x 14.
        tower = image_tower(model)
        assert tower is not None and calls == [(0, 8, 32, 48)] * len(tower.blocks)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {*JOINED, "smolvlm"}))
def test_other_towers_stay_as_they_are(kind: str, tmp_path: Path) -> None:
    save_vision(kind, tmp_path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert tower_attention.joined_layers(model) is None
