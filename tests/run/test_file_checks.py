"""Mistakes that options and files show are refused before anything slow is imported."""

from __future__ import annotations

import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL, write_jsonl
from unsloth_ddp.config.options import Settings
from unsloth_ddp.run import file_checks
from unsloth_ddp.run.file_checks import check_files
from unsloth_ddp.run.folder import check_run_folder
from unsloth_ddp.utils.errors import UserError

CHAT = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]}


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A file of good rows."""
    return str(write_jsonl(tmp_path / "rows.jsonl", [CHAT] * 4))


def settings(rows: str, **given: Any) -> Settings:
    """Settings of a run that check_files takes, but for what is given."""
    return Settings(**{"model": str(DEMO_MODEL), "dataset": [rows], **given})


@pytest.mark.parametrize(
    ("given", "processes", "said"),
    [
        ({"global_batch_size": 6}, 4, "global_batch_size 6 does not divide into 1 row a device x 4 processes"),
        ({"per_device_train_batch_size": 1, "global_batch_size": 8, "gradient_accumulation_steps": 2}, 1, "disagree"),
        ({"report_to": ["dvclive"]}, 1, "uv pip install dvclive"),
        ({"chat_template": "nope.jinja"}, 1, "chat_template nope.jinja: there is no such file"),
        ({"dataset_revision": ["main"]}, 1, "name 0 Hub datasets"),
        ({"model": "Qwen Qwen3"}, 1, "model Qwen Qwen3: there is no such folder"),
        ({"model": "https://hf.co/Qwen/Qwen3-8B/tree/main"}, 1, "is a URL; give .*on the Hub: Qwen/Qwen3-8B"),
        (
            {"reference_model": "a/missing/one"},
            1,
            "reference_model: model a/missing/one: there is no such folder; give",
        ),
        ({"model": str(DEMO_MODEL.parent)}, 1, f"no config.json; did you mean {DEMO_MODEL}"),
    ],
)
def test_a_mistake_is_refused(rows: str, given: dict[str, Any], processes: int, said: str) -> None:
    check_files(settings(rows), processes)
    with pytest.raises(UserError, match=said):
        check_files(settings(rows, **given), processes)


def test_a_user_without_a_home_is_told_to_set_one(rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(number: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    check_files(settings(rows), 1)
    monkeypatch.delenv("HOME")
    with pytest.raises(
        UserError, match=r"^HOME is not set and user id \d+ has no entry in the list of users, .* set HOME to"
    ):
        check_files(settings(rows), 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"resume": "nope"}, "resume nope: there is no such folder"),
        ({"resume": "."}, "resume . is not a complete checkpoint: it has no manifest.json"),
        ({"output_dir": "rows.jsonl"}, "rows.jsonl/.* cannot be written"),
        ({"output_dir": "/proc/runs"}, "/proc/runs/.* cannot be written"),
        ({"output_dir": ".", "run_name": "done"}, "done holds a finished run"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "done").mkdir()
    for name in ("settings.yaml", "summary.json"):
        (tmp_path / "done" / name).write_text("{}")
    check_run_folder(settings(rows))
    # On several nodes only node 0 needs the checkpoint.
    check_files(settings(rows, resume="nope"), 2)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=said):
        check_run_folder(settings(rows, **given))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_bad_row_of_any_file_is_refused_by_its_line(rows: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "bad.jsonl", [CHAT, {"messages": [{"role": "robot", "content": "beep"}]}])
    for given in ({"dataset": [rows, str(tmp_path / "bad.jsonl")]}, {"eval_dataset": [str(tmp_path / "bad.jsonl")]}):
        with pytest.raises(UserError, match=r"bad\.jsonl:2: .*robot"):
            check_files(settings(rows, **given), 1)


def test_the_first_row_of_a_json_list_of_any_size_is_checked(rows: str, tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[1,")
    os.truncate(path, 1 << 40)  # takes no room on the disk
    with pytest.raises(UserError, match=r"list\.json:1: "):
        check_files(settings(str(path)), 1)


@pytest.mark.parametrize("name", ["models/tinny", "./models/tinny", "modles/tiny", "{0}/models/tinyy"])
def test_a_mistyped_model_folder_is_answered_with_the_folder(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "models/tiny").mkdir(parents=True)
    (tmp_path / "models/tinier").mkdir()
    (tmp_path / "models/tiny/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(file_checks, "_is_on_hub", lambda name: False)
    with pytest.raises(UserError, match=r"no such folder or Hub id; did you mean .*models/tiny\?"):
        check_files(settings(rows, model=name.format(tmp_path)), 1)


def test_a_model_of_the_hub_is_not_taken_for_a_similar_folder(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Qwen/Qwen3-4B").mkdir(parents=True)
    (tmp_path / "Qwen/Qwen3-4B/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(file_checks, "_is_on_hub", lambda name: name == "Qwen/Qwen3-8B")
    check_files(settings(rows, model="Qwen/Qwen3-8B"), 1)
