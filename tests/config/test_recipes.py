"""Recipes and accelerate configs are what the README says they are, and stay valid."""

from __future__ import annotations

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from tests.conftest import REPO
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.data.order.batch_plan import plan_batch

RECIPES = sorted((REPO / "recipes").glob("*.yaml"))
CONFIGS = sorted((REPO / "accelerate_configs").glob("*.yaml"))


def test_all_are_here():
    assert {p.stem for p in CONFIGS} == {
        "cpu", "single_gpu", "ddp", "multi_node", "zero2", "zero3", "fsdp2", "zero2_offload", "zero3_offload",
        "fsdp2_offload", "fsdp2_hybrid",
    }  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_recipe_is_valid_and_divides_on_1_to_8_gpus(recipe):
    settings = parse_settings(["--config", str(recipe), "--dataset", "rows.jsonl"])
    assert settings.method in recipe.stem or recipe.stem.startswith("demo")
    for processes in (1, 2) if recipe.stem.endswith("_cpu") else (1, 2, 4, 8):
        plan_batch(settings.rows_at_once, processes, settings.global_batch_size, None)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_accelerate_config_loads_and_leaves_precision_to_the_settings(config):
    loaded = load_config_from_file(str(config))
    assert loaded.mixed_precision == "no"
    # MULTI_GPU is the type that also starts one process, or CPU processes, through torchrun's launcher.
    sharded = {"zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}
    assert yaml.safe_load(config.read_text())["distributed_type"] == sharded.get(
        config.stem.partition("_")[0], "MULTI_GPU"
    )
    assert loaded.num_processes == {"cpu": 2, "single_gpu": 1}.get(config.stem, "gpu")
