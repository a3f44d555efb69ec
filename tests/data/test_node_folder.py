"""The folder that a node's ranks share: made, removed, and on a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.conftest import demo_rows, write_jsonl
from tests.runtimes import cpu_runtime
from unsloth_ddp.config.options import Settings
from unsloth_ddp.data.node_folder import node_folder, room_for_rows
from unsloth_ddp.data.sources.examples import read_examples
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.utils.errors import UserError

TWO_RANKS = Runtime(Ranks(world_size=2, local_world_size=2), "transformers", "cpu", "fp32", "CPU")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.mark.parametrize(("error", "kept"), [(UserError("another run"), 0), (RuntimeError("rank 1 failed"), 1)])
def test_rows_stay_only_where_a_rank_may_still_read_them(cache: Path, error: Exception, kept: int) -> None:
    with pytest.raises(type(error)), node_folder(TWO_RANKS) as folder:
        (folder / "rows.arrow").write_bytes(b"x")
        raise error
    assert len([*cache.iterdir()]) == kept


def test_a_cache_that_cannot_be_written_is_told_with_the_variable_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    with (
        pytest.raises(UserError, match=r"/file/cache cannot be written: Not a directory; set HF_HOME"),
        node_folder(TWO_RANKS),
    ):
        pass


def test_a_full_disk_of_the_rows_is_told_and_other_errors_are_kept(tmp_path: Path) -> None:
    told = rf"The rows do not fit on the disk of {tmp_path}; free space, or set HF_HOME"
    with pytest.raises(UserError, match=told), room_for_rows(tmp_path / "node"):
        Path("/dev/full").write_bytes(b"x")
    with pytest.raises(FileNotFoundError), room_for_rows(tmp_path / "node"):
        (tmp_path / "missing").read_bytes()


def test_rows_that_do_not_fit_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    rows = write_jsonl(tmp_path / "rows.jsonl", demo_rows()[:3])
    monkeypatch.setattr(datasets.arrow_writer.ArrowWriter, "write", full)
    with pytest.raises(UserError, match="The rows do not fit on the disk of"):
        read_examples(Settings(model="m", dataset=[str(rows)]), cpu_runtime(), tmp_path)
