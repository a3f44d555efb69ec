"""Tell vLLM of an adapter."""

from __future__ import annotations

from typing import Any

import pytest

from unsloth_ddp.export.serve import _rank_for_vllm
from unsloth_ddp.utils.errors import UserError


@pytest.mark.parametrize(
    ("adapter", "rank"),
    [
        ({"r": 4}, 8),
        ({"r": 16}, 16),
        ({"r": 17}, 32),
        ({"r": 8, "rank_pattern": {"q_proj": 48}}, 64),
        ({"r": 400}, 512),
    ],
)
def test_the_rank_is_rounded_up_to_one_that_vllm_takes(adapter: dict[str, Any], rank: int) -> None:
    assert _rank_for_vllm(adapter) == rank


@pytest.mark.parametrize(
    ("adapter", "sentence"),
    [
        ({"r": 1024}, "rank 512 at most, and this one has 1024"),
        (
            {"r": 8, "target_parameters": ["mlp.experts.down_proj"]},
            r"adapters with experts, .* \(mlp.experts.down_proj\)",
        ),
        ({"r": 8, "modules_to_save": ["lm_head"]}, r"modules trained whole \(lm_head\)"),
    ],
)
def test_an_adapter_that_vllm_does_not_load_is_merged_instead(adapter: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=f"{sentence}.*; export it with --to merged and serve that folder"):
        _rank_for_vllm(adapter)
