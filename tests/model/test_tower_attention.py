"""Test that a tower computes the attention of all images at once, and the same as image by image."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.tiny_vision import KINDS, draw, save_vision
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.images.processing import load_processing
from unsloth_ddp.model.forward import tower_attention
from unsloth_ddp.model.towers import image_tower

# Their towers join the patches of all images.
JOINED = ("qwen3_vl", "qwen3_5")


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
    tower = image_tower(model)
    images = [draw(tmp_path / f"{size}.png", "red", "circle", (size, 56)) for size in (28, 84, 56)]
    processing = load_processing(Settings(model=str(tmp_path)))
    shown = processing.processor.image_processor(
        images=[processing._open(str(one)) for one in images], return_tensors="pt"
    )
    given = shown["pixel_values"], shown["image_grid_thw"]
    expected = model.model.visual(*given).pooler_output
    calls = as_on_a_gpu(monkeypatch) if kernel else []
    assert tower_attention.use(tower.blocks)
    torch.testing.assert_close(model.model.visual(*given).pooler_output, expected, rtol=1e-5, atol=1e-5)
    if kernel:
        # Of one call a layer, with patches of 14 x 14.
        assert calls == [(0, 8, 32, 48)] * len(tower.blocks)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {*JOINED, "smolvlm"}))
def test_other_towers_stay_as_they_are(kind: str, tmp_path: Path) -> None:
    save_vision(kind, tmp_path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert not tower_attention.joins_images(image_tower(model))
