"""Links and folders that somebody else put in the way are neither followed nor believed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from unsloth_ddp.utils.files import json as json_file
from unsloth_ddp.utils.files import safe as safe_files


@pytest.fixture
def victim(tmp_path) -> Path:
    """A file that a link points to."""
    path = tmp_path / "victim"
    path.write_text("precious")
    return path


def test_a_link_is_not_opened(tmp_path, victim):
    (tmp_path / "link").symlink_to(victim)
    with pytest.raises(OSError, match="it is a symbolic link") as found:
        safe_files.open_without_following_links(tmp_path / "link", os.O_RDWR | os.O_CREAT)
    assert found.value.errno == errno.ELOOP


def test_a_file_is_opened_or_made(tmp_path, victim):
    os.close(safe_files.open_without_following_links(victim, os.O_RDONLY))
    os.close(safe_files.open_without_following_links(tmp_path / "new", os.O_RDWR | os.O_CREAT))
    assert (tmp_path / "new").is_file()


@pytest.mark.parametrize("dangling", [False, True])
def test_a_new_file_takes_the_place_of_a_link(tmp_path, victim, dangling):
    link = tmp_path / "settings.partial"
    link.symlink_to(tmp_path / "nothing" if dangling else victim)
    safe_files.write_new_file(link, "new")
    assert (link.read_text(), link.is_symlink()) == ("new", False)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "nothing").exists()


def test_json_is_not_written_through_a_link(tmp_path, victim):
    (tmp_path / "summary.json.partial").symlink_to(victim)
    json_file.write_json(tmp_path / "summary.json", {"a": 1})
    assert victim.read_text() == "precious"
    assert (tmp_path / "summary.json").read_text() == '{\n  "a": 1\n}\n'


def test_own_folders_have_no_foreign_owner(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    assert safe_files.foreign_owner(tmp_path) is None
    assert safe_files.foreign_owner(tmp_path / "link") is None


def test_a_folder_of_another_user_is_told(tmp_path, monkeypatch):
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    monkeypatch.setattr(os, "fstat", lambda _: os.stat_result((0o600, 0, 0, 1, mine + 1, 0, 0, 0, 0, 0)))
    assert safe_files.foreign_owner(tmp_path) == mine


def test_a_disk_that_gives_every_file_one_owner_is_this_users(tmp_path, monkeypatch):
    mine = os.geteuid()
    # New files get the folder's owner, whoever writes them.
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert safe_files.foreign_owner(tmp_path) is None
