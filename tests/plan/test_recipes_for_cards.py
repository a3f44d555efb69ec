"""The memory beside each recipe for a size of card is what was measured, or else what the plan says for it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.models import make_config
from tests.conftest import REPO
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.data.order.packing import BatchRequest, plan_step
from unsloth_ddp.distributed.precision import AMPERE
from unsloth_ddp.model.backend import with_backend
from unsloth_ddp.plan.__main__ import with_precision_of
from unsloth_ddp.plan.compute import Hardware, make_plan
from unsloth_ddp.sizing.choose import planned_packing
from unsloth_ddp.sizing.count import read_model_shape
from unsloth_ddp.sizing.estimate import MemoryEstimate
from unsloth_ddp.sizing.micro_batch import RowLengths
from unsloth_ddp.utils.units import GIB, parse_memory

RECIPES = sorted((REPO / "recipes").glob("*.yaml"))
BY_PLAN = [path for path in RECIPES if "Memory by the plan" in path.read_text()]
MEASURED = re.compile(
    r"limited to (?P<card>\d+) GB.*?(?P<units>\d+) (?:packs|rows).*? at once,[\s#]+gradient checkpointing[\s#]+"
    r"(?P<kind>\w+),[\s#]+at most (?P<held>[\d.]+) GiB held[\s#]+\((?P<results>\S+\.json)\)",
    re.DOTALL,
)
PLANNED = re.compile(
    r"\(--gpu_memory (?P<memory>\w+)\): (?P<least>at least )?(?P<peak>[\d.]+) of (?P<of>[\d.]+) GiB, with "
    r"(?P<units>\d+) (?P<unit>packs|rows) of (?P<tokens>\d+) tokens "
    r"at once and gradient checkpointing (?P<kind>\w+)\."
)
ON_A_T4 = re.compile(
    r"\(--compute_capability (?P<capability>7\.5)\).*: (?P<peak>[\d.]+) of (?P<of>[\d.]+) GiB, with (?P<units>\d+) "
    r"rows of (?P<tokens>\d+) "
)


def plan_of(
    recipe: Path, folder: Path, memory: float, capability: tuple[int, int]
) -> tuple[MemoryEstimate, str, str, int, str]:
    """Plan a recipe on one card with rows of max_length: memory, verdict, checkpointing, units at once, unit."""
    settings = parse_settings(["--config", str(recipe), "--dataset", "rows.jsonl"])
    make_config(settings.model.rpartition("/")[2].lower().replace("-", "_")).save_pretrained(folder)
    settings = with_precision_of(
        parse_settings(["--config", str(recipe), "--model", str(folder), "--dataset", "rows.jsonl"]), capability
    )
    # Long enough for CUDA graphs.
    settings = dataclasses.replace(with_backend(settings), num_train_epochs=1000)
    rows = RowLengths(np.full(64, settings.max_length), np.full(64, settings.max_length))
    shape = read_model_shape(settings)
    decision = planned_packing(settings, shape, capability)
    batch, packing, _ = plan_step(BatchRequest.of(settings, 1), rows.each, decision)
    rows = rows.packed(packing)
    hardware = Hardware(1, 1, gpu_memory=memory, capability=capability)
    plan = make_plan(settings, shape, rows, batch, hardware)
    (chosen,) = (row for row in plan.memory if (row.method, row.sharding) == (settings.method, "none"))
    return chosen.memory, chosen.verdict, chosen.checkpointing, plan.batch.per_device, rows.unit


# The smallest card, and a mixture of experts, of which a plan knows a lower bound only.
QUICK = ("qwen3_4b_qlora_12gb", "gpt_oss_20b_lora_80gb")


@pytest.mark.parametrize(
    "recipe",
    [pytest.param(path, id=path.stem, marks=() if path.stem in QUICK else pytest.mark.slow) for path in BY_PLAN],
)
def test_the_figures_in_the_recipe_are_the_plans(recipe, tmp_path):
    text = recipe.read_text()
    found = PLANNED.search(text)
    assert found, text
    assert recipe.stem.endswith(f"_{found['memory'].lower()}")
    memory = parse_memory("--gpu_memory", found["memory"])
    assert found["of"] == f"{memory / GIB:.1f}"
    estimate, verdict, kind, units, unit = plan_of(recipe, tmp_path, memory, AMPERE)
    # For mixtures of experts the plan has a lower bound.
    assert (verdict, estimate.lower_bound) == (("unknown", True) if found["least"] else ("fits", False))
    assert (f"{estimate.total / GIB:.1f}", kind, str(units), unit) == (
        found["peak"],
        found["kind"],
        found["units"],
        found["unit"],
    )
    assert parse_settings(["--config", str(recipe), "--dataset", "rows.jsonl"]).max_length == int(found["tokens"])


def test_a_recipe_for_a_card_has_figures_and_measured_ones_are_in_the_results() -> None:
    measured = {path: MEASURED.search(path.read_text()) for path in RECIPES}
    assert [path.stem for path in RECIPES if path.stem.endswith("gb") and not measured[path]] == [
        "qwen3_14b_qlora_24gb", "qwen3_32b_qlora_48gb", "qwen3_4b_qlora_12gb",
    ]  # fmt: skip
    for path, line in measured.items():
        if line:
            cells = json.loads((REPO / line["results"]).read_text())["cells"]
            (cell,) = (cell for cell in cells if cell["cell"] == f"{path.stem}_{line['card']}")
            assert float(line["held"]) == pytest.approx(cell["most_reserved_gib"], abs=0.05)
            assert line["kind"] == cell["gradient_checkpointing"]
            assert int(line["units"]) == cell["per_device_train_batch_size"]


def test_the_recipe_for_16_gb_fits_a_t4(tmp_path):
    recipe = REPO / "recipes" / "qwen3_8b_qlora_16gb.yaml"
    found = ON_A_T4.search(recipe.read_text())
    assert found
    estimate, verdict, _, units, unit = plan_of(recipe, tmp_path, parse_memory("--gpu_memory", "16GB"), (7, 5))
    assert verdict == "fits"
    assert (f"{estimate.total / GIB:.1f}", str(units), unit) == (found["peak"], found["units"], "rows")
