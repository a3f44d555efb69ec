"""What an adapter changes by default, and what full training freezes, is found from the modules of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny_models import tiny_model
from unsloth_ddp.model.modules import name_present_layers
from unsloth_ddp.model.parts import adaptable_layers, freeze_beside_text, parts_beside_text
from unsloth_ddp.model.towers import describe_beside_text, trained_beside

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
PER_LAYER = {"per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"}


@pytest.mark.parametrize(
    ("model_type", "class_name", "leaves"),
    [
        ("mistral3", "Mistral3ForConditionalGeneration", ATTENTION | MLP),
        # Fused kernels read the weight of its mixer's out_proj.
        ("falcon_h1", "FalconH1ForCausalLM", ATTENTION | MLP | {"in_proj"}),
        # Its router is a linear layer in the block of experts.
        ("jamba", "JambaForCausalLM", ATTENTION | MLP | {"in_proj", "x_proj", "out_proj"}),
        ("gpt_oss", "GptOssForCausalLM", ATTENTION),
        # Its router is a plain linear layer outside a block of experts.
        ("gemma3n_text", "Gemma3nForCausalLM", ATTENTION | MLP | PER_LAYER | {"linear_left", "linear_right", "0"}),
    ],
)
def test_leaf_names_are_those_of_the_text(model_type: str, class_name: str, leaves: set[str]) -> None:
    model = tiny_model(model_type, class_name)
    found = adaptable_layers(model)
    assert {path.rpartition(".")[2] for path in found} <= leaves | {"dt_proj"}
    assert {path.rpartition(".")[2] for path in found} >= ATTENTION
    assert not any("vision" in path or "router" in path for path in found)


def test_towers_are_adapted_and_trained_if_asked_for() -> None:
    model = tiny_model("gemma4", "Gemma4ForConditionalGeneration")
    parts = set(parts_beside_text(model))
    assert parts == {"model.vision_tower", "model.audio_tower", "model.embed_vision", "model.embed_audio"}
    text, everything = adaptable_layers(model), adaptable_layers(model, trained_beside(model, True))
    assert text.keys() < everything.keys()
    # Rows hold no sound, so its tower would get no gradient.
    assert {path.split(".")[1] for path in everything.keys() - text.keys()} == {"vision_tower", "embed_vision"}
    assert str(describe_beside_text(model)).endswith(" of them are trained")
    freeze_beside_text(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained and all(name.startswith(("model.language_model.", "lm_head")) for name in trained)
    assert "frozen; --train_towers trains them" in str(describe_beside_text(model))


def test_only_layers_that_the_model_has_are_named_for_sharding() -> None:
    model: Any = tiny_model("gemma4", "Gemma4ForConditionalGeneration")
    model.audio_tower = None
    named = set(model._no_split_modules)
    name_present_layers(model)
    kinds = {type(module).__name__ for module in model.modules()}
    assert set(model._no_split_modules) == named & kinds and "Gemma4TextDecoderLayer" in model._no_split_modules
    without: Any = torch.nn.Linear(1, 1)
    name_present_layers(without)
    assert without._no_split_modules == []
