"""python -m unsloth_ddp.runs: the table, the report, and folders that are none of it."""

from __future__ import annotations

import fcntl
import itertools
import json
import subprocess
import sys

import pytest

from tests.conftest import REPO
from tests.run.run_folders import PART, TOKEN, make_run
from unsloth_ddp.runs.__main__ import main
from unsloth_ddp.runs.table import is_locked


@pytest.fixture
def outputs(tmp_path):
    """Three runs: finished, stopped, killed."""
    make_run(tmp_path / "outputs/done")
    make_run(tmp_path / "outputs/halted", state="stopped", step=10)
    make_run(tmp_path / "outputs/killed", state="unfinished", step=5)
    return tmp_path / "outputs"


def test_the_table_shows_each_run_and_fits_a_hundred_columns(outputs, capsys):
    make_run(outputs / ("a-long-name-of-a-model-" * 4 + "lora-20260101"), state="stopped", step=10)
    assert main([str(outputs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:] if len(line.split()) > 3}
    assert rows["done"][:8] == ["finished", "20/20", "0.0000", "0.7500", "400", "2", "x", "H100"]
    assert rows["halted"][:8] == ["stopped", "10/20", "1.0000", "0.1000", "410", "2", "x", "H100"]
    assert rows["killed"][:7] == ["unfinished", "5/20", "1.5000", "405", "2", "x", "H100"]


def test_a_run_whose_loss_is_no_number_shows_that(tmp_path, capsys):
    history = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": float("nan")}]
    make_run(tmp_path / "outputs" / "r", state="stopped", history=history)
    file = tmp_path / "runs.json"
    assert main([str(tmp_path / "outputs"), "--json", str(file)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("r ")]
    assert " nan " in line
    assert "NaN" not in file.read_text()


def test_the_json_file_has_the_values(outputs, tmp_path, capsys):
    assert main([str(outputs), "--json", str(tmp_path / "runs.json")]) == 0
    found = json.loads((tmp_path / "runs.json").read_text())
    (done,) = [run for run in found["runs"] if run["name"] == "done"]
    assert (done["state"], done["step"], done["eval_loss"], done["processes"]) == ("finished", 20, 0.75, 2)
    assert found["problems"] == []


def test_a_run_of_another_version_or_with_damage_is_a_sentence_below_the_table(outputs, capsys):
    (outputs / "done" / "record.json").write_text('{"format": 9}')
    (outputs / "killed" / "record.json").write_text('{"format": 1, "parts": [{"versions": 5}], "steps": "many"}')
    assert main([str(outputs)]) == 0
    out = capsys.readouterr().out
    assert "done/record.json is of format 9, and this release of the kit reads 1" in out
    assert "halted" in out and "killed" in out
    assert main(["--report", str(outputs / "killed")]) == 2
    assert "lacks a part or holds a value of the wrong type" in capsys.readouterr().err


def test_a_run_that_is_being_written_is_running(tmp_path, capsys):
    folder = make_run(tmp_path / "r", state="unfinished", step=5)
    (folder / "run.lock").touch()
    assert not is_locked(folder)
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    command = [sys.executable, "-c", code, str(folder / "run.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout and writer.stdout.readline()
        assert is_locked(folder)
        main([str(tmp_path)])
        writer.communicate(b"\n")
    assert "running" in capsys.readouterr().out
    # Looking gave nothing away and kept nothing.
    with open(folder / "run.lock", "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("words", ["{0} --report b", "{0} --report {0}/b", "--report {0}/b"])
def test_a_run_is_named_by_its_path_or_by_its_name_in_the_folder(tmp_path, capsys, words):
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name)
    assert main(words.format(tmp_path / "runs").split()) == 0
    assert f"Wrote {tmp_path}/runs/b/report.html" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "runs/b/report.html").exists() and not (tmp_path / "runs/a/report.html").exists()


def test_long_names_stay_whole_on_eighty_columns(tmp_path, capsys, monkeypatch):
    names = [f"Qwen3-8B-Instruct-lora-20261123-23130{i}" for i in (1, 2)]
    for name in names:
        make_run(tmp_path / name)
    monkeypatch.setattr("unsloth_ddp.utils.tables.output_width", lambda: 80)
    main([str(tmp_path)])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    lines = [line.split()[0] for line in out.splitlines()]
    assert all(any(first + second == name for first, second in itertools.pairwise(lines)) for name in names)


def test_the_report_of_a_killed_run_is_written_on_request(outputs, capsys):
    assert main(["--report", str(outputs / "killed")]) == 0
    assert "Wrote" in capsys.readouterr().out
    text = (outputs / "killed" / "report.html").read_text()
    assert "the run was killed or failed, or still runs" in text and "It goes on after step 5." in text


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["missing"], "missing is not a folder"),
        (["empty"], "empty holds no run"),
        (["--report", "empty"], "empty is not a run of this kit: it holds no settings.yaml"),
        (["outputs", "--report", "haltd"], "there is no run haltd, here or in outputs; did you mean outputs/halted?"),
        (["--report", "nope"], "there is no run nope, here or in outputs; python -m unsloth_ddp.runs outputs lists"),
        (["--report", "outputs/done", "--json", "x"], "--json writes the table"),
        (["outputs", "--json", "outputs/done/settings.yaml/x"], "cannot be written"),
        (["--report", "outputs/broken"], "lacks a part or holds a value of the wrong type"),
    ],
)
def test_a_mistake_is_one_sentence(outputs, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(outputs.parent)
    (outputs.parent / "empty").mkdir()
    broken = make_run(outputs / "broken", part={**PART, "versions": 5}, state="unfinished")
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("runs: error: ") and said in error and error.count("\n") == 1
    assert not (broken / "report.html").exists()


def test_secrets_in_names_are_hidden(tmp_path, capsys):
    make_run(tmp_path / f"r-{TOKEN}", settings={"dataset": [TOKEN]})
    main([str(tmp_path)])
    out = capsys.readouterr().out
    assert TOKEN not in out.replace("\n", "") and "[hidden]" in out


def test_it_runs_as_a_module(outputs):
    command = [sys.executable, "-m", "unsloth_ddp.runs", str(outputs)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0 and "halted" in done.stdout and done.stderr == ""
