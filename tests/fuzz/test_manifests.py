"""Checkpoints of rubbish: any manifest, any names in it, links out of the folder; offered if whole, never executed."""

from __future__ import annotations

import json
import os
import pickle
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fuzz import UNPRINTABLE, few, sentence
from tests.runtimes import cpu_runtime
from tests.unpickled import Touch
from unsloth_ddp.checkpoints import manifest, resume_point
from unsloth_ddp.checkpoints.manifest import Damaged, Manifest
from unsloth_ddp.config.options import Settings
from unsloth_ddp.utils.errors import UserError

NEEDED = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's checkpoint-3 with a file of each kind that it needs, and another file beside it."""
    path = tmp_path / "run" / "checkpoint-3"
    path.mkdir(parents=True)
    for name in NEEDED:
        (path / name).write_text('{"global_step": 3}')
    (tmp_path / "run" / "outside").write_text("{}")
    return path


def entry(path: Path) -> dict[str, Any]:
    """Return what a manifest says of a file."""
    return {"bytes": path.stat().st_size, "xxh3_128": manifest.checksum(path)}


def describe(folder: Path, listed: Any = None, **changes: Any) -> None:
    """Write a manifest whose own checksum is right, whatever it holds."""
    own = {name: entry(folder / name) for name in NEEDED}
    content = {
        "format": 1,
        "step": 3,
        "run": {},
        "versions": {},
        "files": {**own, **(listed or {})},
    }
    content |= changes
    text = json.dumps({**content, "checksum": manifest._checksum_of(content)})
    (folder / manifest.FILE_NAME).write_text(text)


def whole(folder: Path) -> Manifest | None:
    """The manifest of a complete checkpoint, or None where it is damaged, which is said in printable words."""
    try:
        return resume_point._verify(folder)
    except Damaged as damage:
        assert str(damage) and not {unicodedata.category(letter) for letter in str(damage)} & UNPRINTABLE, repr(
            str(damage)
        )
        return None


def offered(folder: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether a run goes on from it unasked, and where it is asked for by name: the same answer."""
    runtime = cpu_runtime()
    unasked = resume_point.find_resume_point(Settings(), runtime, folder.parent, continues=True)
    printed = capsys.readouterr().out
    assert ("checkpoint-3 is skipped: " in printed) is (unasked is None)
    try:
        asked = resume_point.find_resume_point(Settings(resume=str(folder)), runtime, folder.parent, continues=True)
    except UserError as refused:
        assert "is not a complete checkpoint: " in sentence(refused)
        asked = None
    assert (asked is None) is (unasked is None)
    return unasked is not None


NAMES = st.text(max_size=12) | st.sampled_from(
    ["../outside", "/etc/passwd", "a/../../outside", "..", ".", "", "a\0b", "x" * 300, "x/" * 3000, "\ud800", "a\nb",
        "manifest.json",
     "trainer_state.json/x", "link", "C:\\x", "\\\\host\\x", "~", "$HOME", "-rf"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)
ENTRIES = st.fixed_dictionaries({"bytes": st.integers(0, 9), "xxh3_128": st.text(max_size=5)}) | JSON


@few
@given(st.dictionaries(NAMES, ENTRIES, min_size=1, max_size=3))
@example({"x" * 300: {"bytes": 1, "xxh3_128": "a"}})
@example({"\ud800": {"bytes": 1, "xxh3_128": "a"}})
def test_whatever_files_a_manifest_lists_the_checkpoint_is_skipped_in_words(
    folder: Path, capsys: pytest.CaptureFixture[str], files: dict[str, Any]
) -> None:
    describe(folder, files)
    assert whole(folder) is None
    assert not offered(folder, capsys)


@few
@given(
    st.dictionaries(
        st.sampled_from(["format", "step", "run", "versions", "files", "checksum", "more"]), JSON, max_size=3
    )
)
def test_whatever_a_manifest_says_it_is_whole_or_skipped(
    folder: Path, capsys: pytest.CaptureFixture[str], changes: dict
) -> None:
    describe(folder, **changes)
    found = whole(folder)
    assert offered(folder, capsys) is (found is not None)
    if found is not None:
        assert manifest.from_text(found.to_text()) == found


@few
@given(st.binary(max_size=60))
@example(b"\xff\xfe")
@example(b'{"format": 1, "x": ' + b"[" * 600 + b"]" * 600 + b"}")
@example(b'{"format": 1' + b"0" * 5000 + b"}")
def test_whatever_bytes_a_manifest_has_the_checkpoint_is_skipped(
    folder: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (folder / manifest.FILE_NAME).write_bytes(content)
    assert not offered(folder, capsys)


def test_a_manifest_that_gives_a_name_twice_is_damaged(folder: Path) -> None:
    describe(folder)
    assert whole(folder) is not None
    path = folder / manifest.FILE_NAME
    path.write_text(path.read_text().replace('{"format"', '{"step": 7, "format"'))
    with pytest.raises(Damaged, match=r"manifest\.json is not JSON \('step' is given twice\)"):
        manifest.verify(folder)


def test_a_manifest_is_no_way_out_of_its_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outside = folder.parent / "outside"
    (folder / "link").symlink_to(outside)
    (folder / "way").symlink_to(folder.parent)
    for name in ("../outside", str(outside), "link", "way/outside"):
        describe(folder, {name: entry(outside)})
        assert whole(folder) is None, name
    (folder / "inside").write_text("{}")
    (folder / "near").symlink_to("inside")
    describe(folder, {"near": entry(outside), "inside": entry(outside)})
    assert whole(folder) is not None
    assert offered(folder, capsys)


def test_folders_and_pipes_in_the_place_of_files_are_damage(folder: Path) -> None:
    describe(folder, {"weights": {"bytes": 0, "xxh3_128": "x"}})
    for make in (Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path)):
        make(folder / "weights")
        assert whole(folder) is None
        (folder / "weights").rmdir() if (folder / "weights").is_dir() else (folder / "weights").unlink()


@few
@given(
    st.dictionaries(st.sampled_from([*manifest.GUARDED, *manifest.SAID, "sharding", "world_size"]), JSON, max_size=4)
)
@example({"world_size": "\x1b[2J"})
def test_any_facts_of_another_run_are_told_in_one_sentence(run: dict[str, Any]) -> None:
    start = resume_point.ResumePoint(Path("checkpoint-3"), Manifest(3, run))
    now = {**dict.fromkeys((*manifest.GUARDED, *manifest.SAID), 1), "sharding": "none"}
    try:
        said = start.compare(now, anyway=False)
    except UserError as refused:
        said = [sentence(refused)]
    assert not {unicodedata.category(letter) for text in said for letter in text} & UNPRINTABLE


def test_looking_at_a_checkpoint_unpickles_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / "optimizer.pt").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    describe(folder, manifest_entries(folder))
    assert whole(folder) is not None
    assert not (tmp_path / "ran").exists()


def manifest_entries(folder: Path) -> dict[str, Any]:
    """Return what a manifest says of every file of a folder."""
    return {
        name: {"bytes": size, "xxh3_128": digest} for name, (size, digest) in manifest.describe_files(folder).items()
    }
