"""The table of docs/models.md holds what the rules of the kit find in each architecture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from peft import get_peft_model
from transformers.conversion_mapping import get_model_conversion_mapping

from tests.architectures.test_architectures import ALL
from tests.conftest import REPO
from tests.tiny_models import save_tiny
from unsloth_ddp.config.options import Settings
from unsloth_ddp.model.adapter.experts import stacked_experts
from unsloth_ddp.model.adapter.lora import lora_config
from unsloth_ddp.model.adapter.merge import plan_merge
from unsloth_ddp.model.loading import sharded_load
from unsloth_ddp.model.packing import attention
from unsloth_ddp.model.parts import parts_beside_text

ROW = re.compile(r"^\| [^|]+ \| `(\w+)` \|", re.MULTILINE)
TABLE = (REPO / "docs" / "models.md").read_text()
NAMED = ROW.findall(TABLE)
# What is found -> how the table says it.
SHORT = {
    "carry a state": "layers with a state",
    "values, and kernels for packed rows": "wide heads",
    "does not let other attention": "attention of its own",
}


def packing(model: Any, class_name: str) -> str:
    """Return the cell for packing and CUDA graphs."""
    text = getattr(transformers, class_name).config_class().get_text_config()
    # Heads of the tiny model are small. A size without use in attention is none of a released model (GLM-4 MoE).
    if (head := attention._largest_head(text)) % 8 == 0:
        model.config.get_text_config().head_dim = head
    found = attention.packing_obstacles(model, "transformers", unsloth_attention=False)
    reason = found.wrong or found.no_kernel
    return f"no: {next((said for known, said in SHORT.items() if known in reason), reason)}" if reason else "yes"


def shards(model: Any) -> str:
    """Return the cell for loading in shards."""
    assert model._no_split_modules
    whole = sharded_load._read_whole(get_model_conversion_mapping(model) or [])
    return "some read whole" if any(one in name for one in whole for name in model.state_dict()) else "yes"


def merge(model: Any, folder: Path) -> str:
    """Return the cell for the merge of an adapter with the default targets."""
    settings = Settings(model=str(folder), dataset=["d"])
    get_peft_model(model, lora_config(settings, model)).save_pretrained(folder / "adapter")
    return "by weight" if plan_merge(settings, folder / "adapter") else "by PEFT"


def row_of(class_name: str, folder: Path) -> str:
    """Return the cells after the class that a checkpoint names."""
    (model_type,) = (name for name, known in ALL.items() if known == class_name)
    model = save_tiny(model_type, class_name, folder)
    experts = bool(stacked_experts(model))
    cells = [
        "text; experts on request" if experts else "text",
        "experts with Unsloth only" if experts else "yes",
        "text" if parts_beside_text(model) else "everything",
        packing(model, class_name),
        shards(model),
        merge(model, folder),
    ]
    return f"{' | '.join(cells)} |"


# The default tests read these rows of the table, and the slow ones every row.
EXAMPLES = (
    "Qwen3ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "GptOssForCausalLM",
    "Mistral3ForConditionalGeneration",
    "Lfm2ForCausalLM",
    "DeepseekV4ForCausalLM",
    "Qwen3VLForConditionalGeneration",
)


@pytest.mark.parametrize(
    "class_name", [name if name in EXAMPLES else pytest.param(name, marks=pytest.mark.slow) for name in NAMED]
)
def test_a_row_says_what_the_rules_find(class_name: str, tmp_path: Path) -> None:
    row = next(line for line in TABLE.splitlines() if f"| `{class_name}` |" in line)
    assert row.split(f"| `{class_name}` | ")[1] == row_of(class_name, tmp_path)


def test_todays_families_are_in_the_table() -> None:
    assert set(EXAMPLES) < set(NAMED)
    assert len(NAMED) >= 20 and len(set(NAMED)) == len(NAMED)
