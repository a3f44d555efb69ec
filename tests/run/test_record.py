"""Read a run from its folder: record.json, states, parts, and folders that are no run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tests.run.run_folders import FACTS, PART, SUMMARY, make_run
from unsloth_ddp.run.documents.record import begin_record, end_record, find_runs, read_run
from unsloth_ddp.utils.errors import UserError


@pytest.mark.parametrize("state", ["finished", "stopped", "unfinished"])
def test_a_run_is_read_in_every_state(tmp_path, state):
    run = read_run(make_run(tmp_path / "r", state=state, step=10))
    assert (run.state, run.name, run.step, run.max_steps) == (state, "r", 10, 20)
    assert [step for step, _ in run.series("loss")] == list(range(1, 11))
    assert run.last("eval_loss") == 0.1
    assert run.fact("device") == "NVIDIA H100" and run.fact("unheard_of") is None
    assert (run.seconds is None) == (state == "unfinished")


def test_a_run_that_was_killed_before_its_first_checkpoint_has_settings_only(tmp_path):
    folder = make_run(tmp_path / "r", state="unfinished")
    shutil.rmtree(folder / "checkpoint-20")
    run = read_run(folder)
    assert (run.state, run.step, run.max_steps, run.history, run.checkpoint) == ("unfinished", 0, 20, [], None)


def test_a_checkpoint_that_is_not_whole_is_not_read(tmp_path):
    folder = make_run(tmp_path / "r", state="unfinished", step=10)
    (folder / "checkpoint-15").mkdir()
    (folder / "checkpoint-15" / "trainer_state.json").write_text("{")
    assert read_run(folder).step == 10


def test_parts_are_kept_over_a_resume_and_a_new_run_begins_again(tmp_path):
    folder = make_run(tmp_path / "r", state="stopped", step=10)
    begin_record(folder, FACTS, {**PART, "first_step": 10}, continued=True)
    assert [part["first_step"] for part in read_run(folder).parts] == [0, 10]
    # The newest part has no cause yet.
    assert read_run(folder).state == "unfinished"
    end_record(folder, step=20, seconds=5.0)
    assert [part["last_step"] for part in read_run(folder).parts] == [10, 20]
    begin_record(folder, FACTS, PART, continued=False)
    assert len(read_run(folder).parts) == 1


def test_seconds_are_those_of_the_parts_and_not_of_the_pause_between(tmp_path):
    folder = make_run(tmp_path / "r")
    record = json.loads((folder / "record.json").read_text())
    killed = {**PART, "began": "2026-01-10T00:00:00+00:00"}
    record["parts"] = [{**PART, "seconds": 60.0}, killed, {**PART, "seconds": 30.0}]
    (folder / "record.json").write_text(json.dumps(record))
    assert read_run(folder).seconds == 90
    (folder / "record.json").unlink()
    assert read_run(folder).seconds == SUMMARY["train_seconds"]


def test_values_that_are_no_numbers_are_left_out_of_a_series(tmp_path):
    history = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": float("nan")}, {"step": 3, "loss": "x"}, {"loss": 1.0}, 7]
    assert read_run(make_run(tmp_path / "r", history=history)).series("loss") == [(1.0, 1.0)]


@pytest.mark.parametrize(
    "file, content, said",
    [
        ("settings.yaml", "a: [", "settings.yaml is not YAML"),
        ("settings.yaml", "- 1", "holds no options"),
        ("summary.json", "{", "summary.json is damaged: it is not JSON"),
        ("summary.json", "[]", "summary.json is damaged: it holds no mapping"),
        ("record.json", '{"format": 7}', "record.json is of format 7, and this release of the kit reads 1"),
        ("record.json", "\xff", "record.json is damaged"),
    ],
)
def test_a_damaged_or_newer_file_is_one_sentence(tmp_path, file, content, said):
    folder = make_run(tmp_path / "r")
    (folder / file).write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=said):
        read_run(folder)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"is not a run of this kit: it holds no settings\.yaml"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        read_run(tmp_path / "missing")


def test_runs_are_found_and_unreadable_ones_named(tmp_path):
    for name in ("a", "b", "c"):
        make_run(tmp_path / name)
    (tmp_path / "b" / "summary.json").write_text("{")
    (tmp_path / "notes").mkdir()
    runs, problems = find_runs(tmp_path)
    assert sorted(run.name for run in runs) == ["a", "c"]
    assert len(problems) == 1 and "b/summary.json is damaged" in problems[0]
    assert [run.name for run in find_runs(tmp_path / "a")[0]] == ["a"]
    with pytest.raises(UserError, match="holds no run"):
        find_runs(tmp_path / "notes")


def test_reading_runs_does_not_load_torch():
    code = "import sys, unsloth_ddp.run.documents.report, unsloth_ddp.runs.__main__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)
