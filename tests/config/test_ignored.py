"""Options that do nothing beside others are named once; those that do something are not."""

from __future__ import annotations

import dataclasses

import pytest

from tests.conftest import REPO
from unsloth_ddp.config.options import OPTIONS, Settings
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.config.questionable import ADAPTER, ignored_settings

GIVEN = Settings(model="m", dataset=["d"])


def named(**options: object) -> list[str]:
    return [sentence.split()[0] for sentence in ignored_settings(dataclasses.replace(GIVEN, **options))]


def test_adapter_options_do_nothing_for_every_parameter() -> None:
    assert ignored_settings(dataclasses.replace(GIVEN, method="full", lora_r=64)) == [
        "lora_r 64 is ignored: method full trains every weight, without an adapter."
    ]
    assert named(method="lora", lora_r=64) == named(method="qlora", lora_r=64) == []
    assert {name for name in OPTIONS if name.startswith("lora_") or name == "use_rslora"} == set(ADAPTER)


@pytest.mark.parametrize(
    ("without", "with_effect"),
    [
        ({"full_weights": "bf16", "method": "qlora"}, {"full_weights": "bf16", "method": "full"}),
        ({"hub_model_id": "me/it"}, {"hub_model_id": "me/it", "push_to_hub": True}),
        ({"hub_private_repo": False}, {"hub_private_repo": False, "push_to_hub": True}),
        ({"save_steps": 7, "save_strategy": "no"}, {"save_steps": 7}),
        ({"warmup_steps": 7, "lr_scheduler_type": "constant"}, {"warmup_steps": 7, "lr_scheduler_type": "linear"}),
    ],
)
def test_an_option_is_named_only_where_it_does_nothing(
    without: dict[str, object], with_effect: dict[str, object]
) -> None:
    assert named(**without) == [next(iter(without))]
    assert named(**with_effect) == []


def test_recipes_give_nothing_that_is_ignored() -> None:
    for recipe in sorted((REPO / "recipes").glob("*.yaml")):
        settings = parse_settings(["--config", str(recipe), "--dataset", "d"], "")
        assert ignored_settings(settings) == [], recipe.name


def test_an_argument_of_ddp_that_the_kit_sets_is_named() -> None:
    given = dataclasses.replace(GIVEN, trainer_args={"ddp_broadcast_buffers": True})
    assert ignored_settings(given)[0].startswith("trainer_args ddp_broadcast_buffers is ignored")
    assert not any(
        "buffers" in one for one in ignored_settings(dataclasses.replace(given, ddp_find_unused_parameters=True))
    )
