"""What is written can be read by those whom the umask allows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from unsloth_ddp.disk import flush


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_weights_are_as_readable_as_other_files(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        (tmp_path / "inner").mkdir()
        save_file({"a": torch.zeros(1)}, tmp_path / "inner" / "adapter_model.safetensors")
        (tmp_path / "config.json").write_text("{}")
        flush(tmp_path)
        assert os.umask(umask) == umask, "the umask stays"
    finally:
        os.umask(before)
    for path in (tmp_path / "inner" / "adapter_model.safetensors", tmp_path / "config.json"):
        assert path.stat().st_mode & 0o777 == mode, path
