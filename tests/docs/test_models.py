"""The table of docs/models.md holds what the rules of the kit find in each architecture."""

from __future__ import annotations

import re

import pytest
import transformers

from tests.architectures.test_architectures import ALL
from tests.conftest import REPO
from tests.tiny_models import tiny_model
from unsloth_ddp.model.adapter.experts import stacked_experts
from unsloth_ddp.model.forward import attention
from unsloth_ddp.model.forward.packing_obstacles import mixing_reason
from unsloth_ddp.model.parts import parts_beside_text

ROW = re.compile(r"^\| [^|]+ \| `(\w+)` \|", re.MULTILINE)
TABLE = (REPO / "docs" / "models.md").read_text()
NAMED = ROW.findall(TABLE)
# What is found -> how the table says it.
SHORT = {
    "carry a state": "layers with a state",
    "takes images or sound": "image-text class",
    "attention sinks": "attention sinks",
    "keys and values of different sizes": "MLA",
    "values, and kernels for packed rows": "wide heads",
    "does not let other attention": "attention of its own",
}


def row_of(class_name: str) -> str:
    """Return the cells for the class that a checkpoint names: full training, experts, packing and CUDA graphs."""
    (model_type,) = (name for name, known in ALL.items() if known == class_name)
    model = tiny_model(model_type, class_name)
    text = getattr(transformers, class_name).config_class().get_text_config()
    # Heads of the tiny model are small. A size without use in attention is none of a released model (GLM-4 MoE).
    if (head := attention._largest_head(text)) % 8 == 0:
        model.config.get_text_config().head_dim = head
    found = attention.packing_obstacles(model, unsloth_attention=False)
    assert found.wrong == mixing_reason(model)
    reason = found.wrong or found.doubtful or found.no_kernel
    short = next((said for known, said in SHORT.items() if reason and known in reason), reason)
    full = "the text; towers frozen" if parts_beside_text(model) else "everything"
    experts = "on request" if stacked_experts(model) else "-"
    return f"{full} | {experts} | {'no: ' + str(short) if short else 'yes'} |"


@pytest.mark.parametrize("class_name", NAMED)
def test_a_row_says_what_the_rules_find(class_name: str) -> None:
    row = next(line for line in TABLE.splitlines() if f"| `{class_name}` |" in line)
    assert row.split(f"| `{class_name}` | ")[1] == row_of(class_name)


def test_todays_families_are_in_the_table() -> None:
    assert len(NAMED) >= 20 and len(set(NAMED)) == len(NAMED)
