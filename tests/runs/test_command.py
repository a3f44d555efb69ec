"""python -m unsloth_ddp.runs: the table, the comparison, the report, and folders that are none of it."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys

import pytest

from tests.conftest import REPO
from tests.run.run_folders import FACTS, PART, SUMMARY, TOKEN, log_entries, make_run
from unsloth_ddp.run.documents.record import read_run
from unsloth_ddp.runs.__main__ import main
from unsloth_ddp.runs.compare import compare_runs
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
    make_run(tmp_path / "outputs" / "other")
    file = tmp_path / "runs.json"
    assert main([str(tmp_path / "outputs"), "--json", str(file)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("r ")]
    assert " nan " in line
    assert "NaN" not in file.read_text()
    assert main(["--compare", *(str(tmp_path / "outputs" / name) for name in ("r", "other"))]) == 0
    assert "r: The training loss was not a number (NaN or infinite) in 1 of 2 log lines" in capsys.readouterr().out


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
    assert main(["--compare", str(outputs / "killed"), str(outputs / "halted")]) == 2
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


def test_two_runs_are_compared_in_settings_data_machine_results_and_curves(tmp_path, capsys):
    facts = {**FACTS, "data": {**FACTS["data"], "train": {**FACTS["data"]["train"], "rows": 90}}}
    first = make_run(tmp_path / "a", settings={"learning_rate": 1e-4})
    second = make_run(
        tmp_path / "b", settings={"learning_rate": 2e-4}, facts=facts, history=log_entries(20, rate=0.05),
        summary={**SUMMARY, "world_size": 4, "tokens_per_second": 800.0, "versions": {"torch": "2.15.0"}},
    )  # fmt: skip
    compared = compare_runs(read_run(first), read_run(second))
    assert compared.settings == {"learning_rate": [1e-4, 2e-4]}
    assert compared.data == {"rows": [60, 90], "checksum of the rows": ["rows of a", "rows of b"]}
    assert compared.machine == {"world_size": [2, 4], "torch version": ["2.14.0", "2.15.0"]}
    assert [step for step, _, _ in compared.losses] == list(range(1, 21))
    assert all(b - a == pytest.approx(0.05 * step) for step, a, b in compared.losses)
    assert [step for step, _, _ in compared.evaluations] == [10, 20]
    assert main(["--compare", str(first), str(second), "--json", str(tmp_path / "c.json")]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "learning_rate 0.0001 0.0002" in lines and "tokens/s 400 800 +100.0%" in lines
    assert "step 20 0.0000 1.0000 +1.0000" in lines
    assert json.loads((tmp_path / "c.json").read_text())["settings"] == {"learning_rate": [1e-4, 2e-4]}


@pytest.mark.parametrize("words", ["{0} --compare a b", "{0} --compare {0}/a b", "--compare {0}/a {0}/b"])
def test_runs_are_named_by_path_or_by_their_name_in_the_folder(tmp_path, capsys, words):
    for name in ("a", "b"):
        make_run(tmp_path / "runs" / name)
    assert main(words.format(tmp_path / "runs").split()) == 0
    assert capsys.readouterr().out.startswith("A  a\nB  b\n")
    assert main([str(tmp_path / "runs"), "--report", "b"]) == 0
    assert (tmp_path / "runs/b/report.html").exists()


def test_a_long_curve_is_shown_in_part_and_written_whole(tmp_path, capsys):
    for name in ("a", "b"):
        make_run(tmp_path / name, history=log_entries(300))
    file = tmp_path / "c.json"
    assert main([str(tmp_path), "--compare", "a", "b", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "20 of the 300 steps that both runs logged; --json FILE writes all." in out
    assert "step 1 " in out and "step 300 " in out
    assert len(json.loads(file.read_text())["losses"]) == 300


def test_long_names_stay_whole_on_eighty_columns(tmp_path, capsys, monkeypatch):
    names = [f"Qwen3-8B-Instruct-lora-20261123-23130{i}" for i in (1, 2)]
    for name in names:
        make_run(tmp_path / name)
    monkeypatch.setattr("unsloth_ddp.utils.tables.output_width", lambda: 80)
    main([str(tmp_path)])
    main([str(tmp_path), "--compare", *names])
    out = capsys.readouterr().out
    # Between them stands the table of the rows, which hold the name in these runs.
    shown = out.partition("Settings:")[0] + out.partition("Results")[2]
    assert max(map(len, shown.splitlines())) <= 80
    assert all(name in out for name in names)


def test_runs_that_do_not_differ_say_so(tmp_path, capsys):
    first, second = (make_run(tmp_path / folder / "same") for folder in ("a", "b"))
    main(["--compare", str(first), str(second)])
    out = capsys.readouterr().out
    for part in ("Settings", "Data", "Machine"):
        assert f"{part}: no difference." in out
    assert "a/same" in out and "b/same" in out


def test_unfinished_and_older_runs_are_compared_with_a_sentence(outputs, capsys):
    (outputs / "done" / "record.json").unlink()
    with (outputs / "done" / "settings.yaml").open("a") as file:
        file.write("an_old_option: 3\n")
    assert main(["--compare", str(outputs / "done"), str(outputs / "killed")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "killed is unfinished; it is compared by its newest checkpoint, of step 5." in out
    assert "done was made by another version of the kit: this one has no option an_old_option." in out
    assert "done has no record.json" in out


@pytest.mark.parametrize(
    "first, second, steps",
    [([1, 5, 9], [1, 3, 9], [1, 9]), ([1, 2], [5, 6], []), ([], [1], [])],
)
def test_losses_are_compared_at_the_steps_that_both_logged(tmp_path, capsys, first, second, steps):
    for name, logged in (("a", first), ("b", second)):
        make_run(tmp_path / name, history=[{"step": step, "loss": 1.0} for step in logged])
    assert [step for step, *_ in compare_runs(read_run(tmp_path / "a"), read_run(tmp_path / "b")).losses] == steps
    assert main([str(tmp_path), "--compare", "a", "b"]) == 0
    assert ("Loss: no step was logged by both runs." in capsys.readouterr().out) == (steps == [])


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
        (["--compare", "outputs/done", "empty"], "empty is not a run of this kit"),
        (["--compare", "outputs/done", "outputs/done"], "names one run twice; name two"),
        (["--compare", "done", "halted", "--report", "outputs/done"], "give one of them"),
        (
            ["outputs", "--compare", "done", "haltd"],
            "there is no run haltd, here or in outputs; did you mean outputs/halted?",
        ),
        (["--report", "nope"], "there is no run nope, here or in outputs; python -m unsloth_ddp.runs outputs lists"),
        (["--report", "outputs/done", "--json", "x"], "--json writes the table or the comparison"),
        (["outputs", "--json", "outputs/done/settings.yaml/x"], "cannot be written"),
        (["--compare", "outputs/done"], "expected 2 arguments"),
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
    make_run(tmp_path / "other")
    main([str(tmp_path)])
    main(["--compare", str(tmp_path / f"r-{TOKEN}"), str(tmp_path / "other")])
    out = capsys.readouterr().out
    assert TOKEN not in out.replace("\n", "") and "[hidden]" in out


def test_it_runs_as_a_module(outputs):
    command = [sys.executable, "-m", "unsloth_ddp.runs", str(outputs)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0 and "halted" in done.stdout and done.stderr == ""
