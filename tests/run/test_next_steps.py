"""The command that a finished run prints works where it is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import REPO
from unsloth_ddp.run.next_steps import chat_command


def test_the_chat_command_in_the_kits_folder_and_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    assert chat_command(Path("outputs/my run"), trust=True) == (
        "uv run python -m unsloth_ddp.chat 'outputs/my run' --trust_remote_code"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    assert chat_command(Path("run"), trust=False) == (
        f"uv run --directory {REPO} python -m unsloth_ddp.chat {tmp_path}/run"
    )
