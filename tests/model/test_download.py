"""Test what is downloaded of a Hub model, and what is shown of it, with stand-ins for the Hub."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.utils import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    filter_repo_objects,
)

from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.files.find import download_model

CPU = cpu_runtime()
FILES = {
    "README.md": 9, "config.json": 1000, "tokenizer.json": 2000, "chat_template.jinja": 1, "merges.txt": 1,
    "model-00001-of-00002.safetensors": 5 << 30, "model-00002-of-00002.safetensors": 4 << 30,
    "model.safetensors.index.json": 10, "pytorch_model.bin": 9 << 30, "original/consolidated.safetensors": 9 << 30,
    "onnx/model.safetensors": 1 << 30,
}  # fmt: skip


class Hub:
    """Stand in for the Hub: with FILES, of which a cache holds some, and a record of what is downloaded."""

    def __init__(self) -> None:
        self.cached = {"config.json"}
        self.downloaded: list[str] = []
        self.bars: list[bool] = []

    def snapshot_download(
        self, name: str, *, dry_run: bool = False, revision: str | None = None, **patterns: Any
    ) -> Any:
        found = [file for file in filter_repo_objects(FILES, **patterns) if file not in self.cached or dry_run]
        if dry_run:
            return [
                SimpleNamespace(filename=file, file_size=FILES[file], will_download=file not in self.cached)
                for file in found
            ]
        self.downloaded += found
        self.bars.append(not are_progress_bars_disabled())
        return None


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    found = Hub()
    monkeypatch.setattr("huggingface_hub.snapshot_download", found.snapshot_download)
    return found


NEEDED = {
    "tokenizer.json", "chat_template.jinja", "merges.txt", "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors", "model.safetensors.index.json",
}  # fmt: skip


@pytest.mark.parametrize("safe", [True, False])
def test_one_format_and_no_subfolder_is_downloaded(hub: Hub, safe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    download_model(Settings(model="owner/name", use_safetensors=safe), CPU)
    assert set(hub.downloaded) == NEEDED
    hub.downloaded.clear()
    for file in [file for file in FILES if file.endswith(".safetensors")]:
        monkeypatch.delitem(FILES, file)
    download_model(Settings(model="owner/name", use_safetensors=safe), CPU)
    assert ("pytorch_model.bin" in hub.downloaded) is not safe


def test_missing_files_are_downloaded_with_a_bar_and_their_size(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    disable_progress_bars()
    try:
        download_model(Settings(model="owner/name"), CPU)
        assert are_progress_bars_disabled(), "the bars are as they were"
    finally:
        enable_progress_bars()
    assert capsys.readouterr().out == "Downloading 6 files of owner/name (9.0 GiB) ...\n"
    assert hub.bars == [True]


def test_nothing_is_said_of_a_cached_a_local_or_an_unreachable_model(
    hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cached = set(FILES)
    download_model(Settings(model="owner/name"), CPU)
    download_model(Settings(model="./folder"), CPU)
    # Unsloth decides which repository it reads.
    download_model(Settings(model="o/n", method="qlora"), Runtime(Ranks(), "unsloth", "cuda", "bf16", "H200"))

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    download_model(Settings(model="owner/name"), CPU)
    assert hub.downloaded == [] and capsys.readouterr().out == ""
