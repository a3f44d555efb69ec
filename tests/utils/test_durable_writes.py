"""What is written reaches the disk, can be read by those whom the umask allows, and why it could not be written."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from unsloth_ddp.utils.files.durable import flush, is_write_error, write_problem


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


def test_weights_keep_the_modes_that_they_were_given(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    path.chmod(0o664)
    before = os.umask(0o077)
    try:
        flush(tmp_path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o664


def test_a_file_system_without_modes_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr(Path, "chmod", refuse)
    flush(tmp_path)


def test_every_file_and_folder_is_brought_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    for name in ("a.safetensors", "inner/b.json"):
        (tmp_path / name).touch()
    synced = set()
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    flush(tmp_path)
    assert synced == {path.stat().st_ino for path in (tmp_path, *tmp_path.rglob("*"))}


CUT_OFF = RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")


@pytest.mark.parametrize(
    ("error", "free", "said"),
    [
        (OSError(errno.ENOSPC, "x"), 1 << 30, "no space is left on the disk of {}"),
        (OSError(errno.EDQUOT, "x"), 1 << 30, "no space is left on the disk of {}"),
        (SafetensorError("I/O error: No space left on device (os error "
            "28)"), 1 << 30, "no space is left on the disk of {}"),
        (Exception("Disk quota exceeded (os error 122)"), 1 << 30, "no space is left on the disk of {}"),
        (Exception("I/O error (os error 5)"), 1 << 30, "Input/output error ({})"),
        (CUT_OFF, 1 << 10, "no space is left on the disk of {}"),
        (CUT_OFF, 1 << 30,
            "a file in {} could not be written to its end: a quota, a limit on file sizes, or a failing disk"),
        (OSError(errno.EROFS, "x", "/a/b"), 1 << 30, "Read-only file system (/a/b)"),
        # The folder may be what is missing.
        (OSError(errno.ENOENT, "x"), None, "No such file or directory ({})"),
        (RuntimeError("the file\nis locked"), 1 << 30, "the file is locked"),
    ],
)  # fmt: skip
def test_it_is_said_why_a_write_failed(
    error: Exception, free: int | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(folder: Path) -> SimpleNamespace:
        if free is None:
            raise FileNotFoundError(errno.ENOENT, "x")
        return SimpleNamespace(free=free)

    monkeypatch.setattr("shutil.disk_usage", usage)
    assert write_problem(error, tmp_path) == said.format(tmp_path)


@pytest.mark.parametrize(
    ("error", "write"),
    [
        (OSError(errno.EIO, "x"), True), (Exception("File too large (os error 27)"), True), (Exception("x"), False),
        (CUT_OFF, True), (SafetensorError("x"), True), (MemoryError(), True), (ValueError("x"), False),
        # RuntimeErrors too, and no disk is to blame for them.
        (torch.distributed.DistBackendError("x"), False), (torch.OutOfMemoryError("x"), False),
    ],
)  # fmt: skip
def test_errors_of_writes_are_told_from_others(error: Exception, write: bool) -> None:
    assert is_write_error(error) is write


def test_a_tokenizer_that_meets_a_full_disk_raises_an_error_of_a_write(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(Exception) as failed:
            Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(tmp_path / "tokenizer.json"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert is_write_error(failed.value) and write_problem(failed.value, tmp_path) == f"File too large ({tmp_path})"
