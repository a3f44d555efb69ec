"""Test that towers, projectors and the work of an image are found from the modules of tiny models of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.tiny_vision import KINDS, draw, save_vision
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.images.processing import load_processing
from unsloth_ddp.model.adapter.lora import adapted_paths
from unsloth_ddp.model.parts import freeze_beside_text, parts_beside_text
from unsloth_ddp.model.towers import (
    describe_beside_text,
    image_tower,
    parts_of_images,
    projectors,
    tokens_a_pixel,
    trained_beside,
)
from unsloth_ddp.utils.errors import UserError

PROJECTORS = {
    "qwen3_vl": {"model.visual.merger", "model.visual.deepstack_merger_list"},
    "qwen3_5": {"model.visual.merger"},
    "gemma3": {"model.multi_modal_projector"},
    "gemma4": {"model.embed_vision"},
    "mistral3": {"model.multi_modal_projector"},
    "internvl": {"model.multi_modal_projector"},
    "smolvlm": {"model.connector"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_are_found_and_the_tower_sees_as_many_patches_as_are_counted(kind, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", str)
    model = save_vision(kind, tmp_path).eval()
    processing = load_processing(Settings(model=str(tmp_path)))
    image = str(draw(tmp_path / "a.png", "red", "circle", (84, 56)))
    expanded = processing.expand(f"x {processing.image_token}", [image])
    tower = image_tower(model)
    assert tower is not None
    assert set(projectors(model)) == PROJECTORS[kind]
    chosen = {one: trained_beside(model, one) for one in (True, "tower", "projector")}
    names = {
        one: {name for name, _ in model.named_parameters() if is_trained(name)} for one, is_trained in chosen.items()
    }
    assert names["tower"] and names["projector"] and names["tower"].isdisjoint(names["projector"])
    assert names[True] == names["tower"] | names["projector"]
    patches = []

    def note(module, args, kwargs):
        states = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
        patches.append(states.shape[:-1].numel())
        assert states.shape[-1] == tower.hidden

    handle = tower.blocks[0].register_forward_pre_hook(note, with_kwargs=True)
    row = {"input_ids": expanded.ids, "rendered": f"x {processing.image_token}", "images": [image]}
    model(**processing.tensors(row)).logits.sum().backward()
    handle.remove()
    reached = {
        path
        for path, part in parts_beside_text(model).items()
        if any(p.grad is not None and p.grad.any() for p in part.parameters())
    }
    assert reached == set(parts_of_images(model))
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
    with pytest.raises(UserError, match=r"train_towers projector: the model \(LlamaForCausalLM\) has no projector"):
        trained_beside(model, "projector")
    with pytest.raises(UserError, match=r"train_towers true: .* has no tower"):
        trained_beside(model, True)


@pytest.mark.parametrize("choice", ["tower", "projector"])
def test_only_the_asked_part_is_trained(choice, tmp_path: Path):
    model = save_vision("qwen3_vl", tmp_path)
    settings = Settings(model=str(tmp_path), train_towers=choice)
    paths = adapted_paths(settings, model)
    beside = {path for path in paths if path.startswith("model.visual.")}
    assert beside and {"merger" in path for path in beside} == {choice == "projector"}
    assert paths - beside == adapted_paths(Settings(model=str(tmp_path)), model)
    freeze_beside_text(model, trained_beside(model, choice))
    trained = {name for name, p in model.named_parameters() if p.requires_grad and "visual" in name}
    assert trained and {"merger" in name for name in trained} == {choice == "projector"}
    assert str(describe_beside_text(model)).endswith(" of them are trained")


def test_parts_and_adapters_of_4_bit_weights_are_those_of_whole_ones(tmp_path: Path):
    whole = save_vision("qwen3_vl", tmp_path)
    kind: Any = transformers.AutoModelForImageTextToText
    packed = kind.from_pretrained(
        tmp_path, quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True), device_map="cpu"
    )
    for model in (whole, packed):
        model.requires_grad_(False)
    assert any(hasattr(p, "quant_state") for p in parts_beside_text(packed)["model.visual"].parameters())
    assert tokens_a_pixel(packed) == tokens_a_pixel(whole) > 0
    for choice in (False, True, "tower", "projector"):
        settings = Settings(model=str(tmp_path), train_towers=choice)
        assert adapted_paths(settings, packed) == adapted_paths(settings, whole)
