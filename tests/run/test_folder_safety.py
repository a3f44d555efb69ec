"""Test that links which somebody else put into a shared folder are not written through."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from unsloth_ddp.config.options import Settings
from unsloth_ddp.run import folder as run_folder
from unsloth_ddp.run import logs
from unsloth_ddp.utils.errors import UserError
from unsloth_ddp.utils.files import safe as safe_files


@pytest.fixture
def place(tmp_path) -> Path:
    """The folder of run r, before the run; beside it the victim of links."""
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "r").mkdir()
    return tmp_path / "r"


def settings_of(place: Path) -> Settings:
    return Settings(run_name="r", output_dir=str(place.parent))


def test_a_link_in_the_place_of_the_lock_is_refused(place, runtime):
    (place / "run.lock").symlink_to(place.parent / "victim")
    with pytest.raises(UserError, match=r"r cannot be written \(.*it is a symbolic link\); give another --output_dir"):
        run_folder.choose_run_folder(settings_of(place), runtime)
    assert (place.parent / "victim").read_text() == "precious"


def test_a_link_that_comes_later_is_refused_too(place, runtime):
    settings = settings_of(place)
    folder = run_folder.choose_run_folder(settings, runtime)
    (place / "run.lock").unlink()
    (place / "run.lock").symlink_to(place.parent / "victim")
    with pytest.raises(UserError, match="it is a symbolic link"):
        run_folder.open_run_folder(settings, runtime, folder)
    assert (place.parent / "victim").read_text() == "precious"


def test_settings_are_not_written_through_a_link(place, runtime):
    (place / "settings.partial").symlink_to(place.parent / "victim")
    settings = settings_of(place)
    run_folder.open_run_folder(settings, runtime, run_folder.choose_run_folder(settings, runtime))
    runtime.cleanup.close()
    assert (place.parent / "victim").read_text() == "precious"
    assert (place / "settings.yaml").is_file() and not (place / "settings.yaml").is_symlink()


def test_a_log_is_not_written_through_a_link(place):
    (place / "rank_0.log").symlink_to(place.parent / "victim")
    with pytest.raises(OSError, match="it is a symbolic link"):
        logs._LogFile(place / "rank_0.log", encoding="utf-8")
    (place / "rank_0.log").unlink()
    for text in ("first", "second"):
        file = logs._LogFile(place / "rank_0.log", encoding="utf-8")
        file.emit(logging.makeLogRecord({"msg": text}))
        file.close()
    assert (place / "rank_0.log").read_text() == "first\nsecond\n"


def test_a_folder_of_another_user_is_refused(place, runtime, monkeypatch):
    monkeypatch.setattr(run_folder, "foreign_owner", lambda folder: 4_000_000 if folder == place else None)
    with pytest.raises(UserError, match=r"r belongs to another user \(user id 4000000\), who could replace what"):
        run_folder.choose_run_folder(settings_of(place), runtime)
    assert list(place.iterdir()) == []
    assert run_folder.foreign_owner is not safe_files.foreign_owner
