"""An adapter is read whole or refused by the name of the weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_models import tiny_model
from unsloth_ddp.model.adapter.weights import load_weights
from unsloth_ddp.utils.errors import UserError

FILE = "adapter_model.safetensors"
TARGETS = r".*language_model.*\.(q_proj|v_proj)"


def adapted() -> Any:
    """Return Mistral 3 with an adapter on its text."""
    model = tiny_model("mistral3", "Mistral3ForConditionalGeneration")
    return get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of which every weight is random."""
    place = tmp_path_factory.mktemp("adapter")
    adapted().save_pretrained(place)
    return place


def changed(folder: Path, place: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Return a folder with the adapter's weights after a change."""
    save_file(change(load_file(folder / FILE)), place / FILE)
    return place


def adapter_of(model: Any) -> dict[str, Tensor]:
    return {name.replace(".default", ""): value for name, value in model.state_dict().items() if ".lora_" in name}


def test_a_whole_adapter_is_read(folder: Path) -> None:
    model = adapted()
    load_weights(model, folder, "base")
    saved = load_file(folder / FILE)
    assert saved and all(torch.equal(value, saved[name]) for name, value in adapter_of(model).items())


def test_a_weight_that_the_model_does_not_have_is_named(folder: Path, tmp_path: Path) -> None:
    tower = "base_model.model.model.vision_tower.transformer.layers.0.attention.q_proj"
    used = {f"{tower}.lora_A.weight": torch.ones(4, 64), f"{tower}.lora_B.weight": torch.ones(64, 4)}
    with pytest.raises(UserError, match=r"holds .*vision_tower.*, which its base model base does not have"):
        load_weights(adapted(), changed(folder, tmp_path, lambda saved: saved | used), "base")


def test_a_weight_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    first = sorted(load_file(folder / FILE))[0]
    lacking = changed(folder, tmp_path, lambda saved: {name: saved[name] for name in saved if name != first})
    with pytest.raises(UserError, match=r"lacks 1 of its \d+ weights \(the first: .*lora_A"):
        load_weights(adapted(), lacking, "base")
