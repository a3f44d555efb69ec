"""The folder of an adapter given as model: its base is named, and how to train it further."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unsloth_ddp.model.files_check import check_local_model
from unsloth_ddp.utils.errors import UserError


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as refused:
        check_local_model(str(folder), safetensors_only=True)
    return str(refused.value)


def test_an_adapter_is_named_with_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    assert refusal(tmp_path).startswith(
        f"model {tmp_path} is an adapter of org/base; give the base to train a new adapter."
    )
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "config.json").write_text("{}")
    assert refusal(tmp_path).endswith(
        f"is an adapter of org/base; to train it further, give its merged model {tmp_path}/merged."
    )


def test_an_adapter_whose_config_is_broken_is_still_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("[")
    assert "is an adapter of a base that its adapter_config.json does not name;" in refusal(tmp_path)
