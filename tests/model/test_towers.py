"""Towers, projectors and the work of an image are found from the modules of a model, in tiny models of every family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_vision import KINDS, draw, save_vision
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.images.processing import load_processing
from unsloth_ddp.model.parts import parts_beside_text
from unsloth_ddp.model.towers import image_tower, projectors, tokens_a_pixel

PROJECTORS = {
    "qwen3_vl": {"model.visual.merger", "model.visual.deepstack_merger_list"},
    "qwen3_5": {"model.visual.merger"},
    "gemma3": {"model.multi_modal_projector"},
    "gemma4": {"model.embed_vision", "model.embed_audio"},
    "mistral3": {"model.multi_modal_projector"},
    "internvl": {"model.multi_modal_projector"},
    "smolvlm": {"model.connector"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_tower_sees_as_many_patches_as_are_counted(kind, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
    model = save_vision(kind, tmp_path).eval()
    processing = load_processing(Settings(model=str(tmp_path)))
    image = str(draw(tmp_path / "a.png", "red", "circle", (84, 56)))
    expanded = processing.expand(f"x {processing.image_token}", [image])
    tower = image_tower(model)
    assert tower is not None
    assert set(projectors(model)) == PROJECTORS[kind]
    patches, hidden = [], []

    def note(module, args, kwargs):
        states = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
        patches.append(states.shape[:-1].numel())
        hidden.append(states.shape[-1])

    handle = tower.blocks[0].register_forward_pre_hook(note, with_kwargs=True)
    row = {"input_ids": expanded.ids, "rendered": f"x {processing.image_token}", "images": [image]}
    tensors = processing.tensors(row)
    with torch.no_grad():
        model(**tensors)
    handle.remove()
    # Some towers add a place for the class.
    of_class = expanded.pixels / tower.numbers_a_patch / 4 if kind == "internvl" else 0
    assert patches == [expanded.pixels / tower.numbers_a_patch + of_class]


def test_the_work_of_a_patch_is_that_of_the_towers_weights(tmp_path: Path):
    model = save_vision("qwen3_vl", tmp_path)
    tower = image_tower(model)
    linear = lambda modules: sum(  # noqa: E731
        one.weight.numel() for m in modules for one in m.modules() if isinstance(one, torch.nn.Linear)
    )
    patch, token = linear(tower.blocks), linear([model.model.language_model, model.lm_head])
    # All weights are trained: three passes in both.
    assert tokens_a_pixel(model) * tower.numbers_a_patch == pytest.approx(patch / token)
    for parameter in parts_beside_text(model)["model.visual"].parameters():
        parameter.requires_grad_(False)
    # A frozen tower has a forward pass alone.
    assert tokens_a_pixel(model) * tower.numbers_a_patch == pytest.approx(patch / token / 3)


def test_a_model_of_text_has_none(tiny_model):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    assert image_tower(model) is None and projectors(model) == {} and tokens_a_pixel(model) == 0
