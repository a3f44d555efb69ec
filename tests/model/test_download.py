"""Test what is downloaded of a Hub model, and what is shown of it, with stand-ins for the Hub."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.model.files.download import download_model, needed_files

CPU = cpu_runtime()
FILES = {
    "README.md": 9, "config.json": 1000, "tokenizer.json": 2000, "chat_template.jinja": 1, "merges.txt": 1,
    "model-00001-of-00002.safetensors": 5 << 30, "model-00002-of-00002.safetensors": 4 << 30,
    "model.safetensors.index.json": 10, "pytorch_model.bin": 9 << 30, "original/consolidated.safetensors": 9 << 30,
    "onnx/model.safetensors": 1 << 30,
}  # fmt: skip


def test_one_format_and_no_subfolder_is_needed() -> None:
    found = needed_files(list(FILES), safetensors_only=False)
    assert set(FILES) - set(found) == {
        "README.md", "pytorch_model.bin", "original/consolidated.safetensors", "onnx/model.safetensors",
    }  # fmt: skip
    pickled = [file for file in FILES if not file.endswith("safetensors")]
    assert "pytorch_model.bin" in needed_files(pickled, safetensors_only=False)
    assert "pytorch_model.bin" not in needed_files(pickled, safetensors_only=True)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Hub with FILES, of which a cache holds some, and a record of what is downloaded."""
    found = SimpleNamespace(cached={"config.json"}, downloaded=[], bars=[])
    siblings = [SimpleNamespace(rfilename=name, size=size) for name, size in FILES.items()]

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> None:
        from huggingface_hub.utils import are_progress_bars_disabled

        found.downloaded += allow_patterns
        found.bars.append(not are_progress_bars_disabled())

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=siblings))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda name, file, revision: "/c" if file in found.cached else None
    )
    return found


def test_missing_files_are_downloaded_with_a_bar_and_their_size(hub: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    disable_progress_bars()
    try:
        download_model(Settings(model="owner/name"), CPU)
        assert are_progress_bars_disabled(), "the bars are as they were"
    finally:
        enable_progress_bars()
    assert capsys.readouterr().out == "Downloading 6 files of owner/name (9.0 GiB) ...\n"
    assert set(hub.downloaded) == set(needed_files(list(FILES), safetensors_only=True)) - {"config.json"}
    assert hub.bars == [True]


def test_nothing_is_said_of_a_cached_a_local_or_an_unreachable_model(
    hub: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.cached = set(FILES)
    download_model(Settings(model="owner/name"), CPU)
    download_model(Settings(model="./folder"), CPU)
    # Unsloth decides which repository it reads.
    download_model(Settings(model="o/n", method="qlora"), Runtime(Ranks(), "unsloth", "cuda", "bf16", "H200"))

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    download_model(Settings(model="owner/name"), CPU)
    assert hub.downloaded == [] and capsys.readouterr().out == ""
