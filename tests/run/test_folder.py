"""The folder of a run: which one, and what it refuses."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unsloth_ddp.config.options import Settings
from unsloth_ddp.run import folder as run_folder
from unsloth_ddp.run.outcomes import not_finished, not_saved, stopped
from unsloth_ddp.utils.errors import UserError


@pytest.mark.parametrize("resume", ["auto", "no", "{}/elsewhere/checkpoint-3"])
def test_a_run_that_began_meanwhile_is_not_removed(tmp_path, resume, runtime):
    (tmp_path / "elsewhere" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "elsewhere" / "checkpoint-3" / "manifest.json").write_text("{}")
    resume = resume.format(tmp_path)
    settings = Settings(run_name="r", output_dir=str(tmp_path), resume=resume)
    folder = run_folder.choose_run_folder(settings, runtime)
    folder.mkdir()
    (folder / "adapter.txt").write_text("another job's")
    with pytest.raises(UserError, match="holds another run"):
        run_folder.open_run_folder(settings, runtime, folder)
    assert (folder / "adapter.txt").read_text() == "another job's"


def test_a_refused_folder_is_told_with_what_differs_and_checkpoints_only_where_there_are_some(tmp_path, runtime):
    (tmp_path / "r").mkdir()
    Settings(run_name="r", max_steps=300).save(tmp_path / "r" / "settings.yaml")
    (tmp_path / "r" / "adapter.txt").write_text("")
    settings = Settings(run_name="r", output_dir=str(tmp_path), max_steps=3)
    with pytest.raises(UserError) as refused:
        run_folder.choose_run_folder(settings, runtime)
    assert str(refused.value).endswith(
        "r holds another run, started with another max_steps; give another --run_name, or --overwrite to replace it."
    )
    (tmp_path / "r" / "checkpoint-3").mkdir()
    (tmp_path / "r" / "summary.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds a finished run; .* with one of its checkpoints"):
        run_folder.choose_run_folder(settings, runtime)


def test_a_run_is_finished_if_its_folder_holds_the_result_of_the_same_settings(tmp_path):
    here = {"run_name": "r", "output_dir": str(tmp_path), "model": "owner/name"}
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "summary.json").write_text("{}")
    assert not run_folder.is_finished(Settings(**here))
    Settings(**here, model_revision="0123456").save(tmp_path / "r" / "settings.yaml")
    assert run_folder.is_finished(Settings(**here, save_total_limit=3))
    others = {"max_steps": 3}, {"overwrite": True}, {"resume": "no"}, {"run_name": None}, {"model_revision": "89ab"}
    for other in others:
        assert not run_folder.is_finished(Settings(**{**here, **other})), other
    (tmp_path / "r" / "summary.json").unlink()
    assert not run_folder.is_finished(Settings(**here))


@pytest.fixture
def other_job(tmp_path):
    """Another process that writes the run r, as long as it lives."""
    (tmp_path / "r").mkdir()
    Settings(run_name="r", output_dir=str(tmp_path)).save(tmp_path / "r" / "settings.yaml")
    code = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write("far, process 7")
file.flush()
print("locked", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(tmp_path / "r" / "run.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_a_second_job_is_refused_before_it_loads_anything(tmp_path, other_job, monkeypatch, capsys, runtime):
    monkeypatch.setattr(run_folder, "LOCK_PATIENCE", 0.0)
    settings = Settings(run_name="r", output_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"r is being written by another job \(far, process 7\); wait for its end, or"):
        run_folder.choose_run_folder(settings, runtime)


@pytest.mark.parametrize("finished", [False, True])
def test_a_job_that_ends_now_is_waited_for(tmp_path, other_job, monkeypatch, capsys, finished, runtime):
    def end(seconds):
        if finished:
            (tmp_path / "r" / "summary.json").write_text("{}")
        other_job.kill()
        other_job.wait()

    monkeypatch.setattr(run_folder.time, "sleep", end)
    settings = Settings(run_name="r", output_dir=str(tmp_path))
    if finished:
        with pytest.raises(UserError, match="r holds a finished run"):
            run_folder.choose_run_folder(settings, runtime)
    else:
        assert run_folder.choose_run_folder(settings, runtime) == tmp_path / "r"
    assert capsys.readouterr().out.count("(far, process 7); waiting for its end, 30 s at most.") == 1


class Killed(BaseException):
    """Ends a process where it is raised, as kill -9 does."""


def test_a_start_killed_while_it_writes_its_settings_starts_again(tmp_path, monkeypatch, runtime):
    settings = Settings(run_name="r", output_dir=str(tmp_path))
    folder = run_folder.choose_run_folder(settings, runtime)

    def save_half(self, path):
        path.write_text("model: demo\nmeth")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Settings, "save", save_half)
        with pytest.raises(Killed):
            run_folder.open_run_folder(settings, runtime, folder)
    runtime.cleanup.close()
    assert run_folder.choose_run_folder(settings, runtime) == folder
    run_folder.open_run_folder(settings, runtime, folder)
    runtime.cleanup.close()
    assert run_folder.continues(settings, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["logs", "run.lock", "settings.yaml"]


def test_an_overwriting_start_killed_while_it_empties_the_folder_leaves_what_can_be_overwritten(
    tmp_path, monkeypatch, runtime
):
    settings = Settings(run_name="r", output_dir=str(tmp_path), overwrite=True)
    folder = tmp_path / "r"
    (folder / "checkpoint-1").mkdir(parents=True)
    settings.save(folder / "settings.yaml")
    (folder / "summary.json").write_text("{}")

    def killed(path):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("unsloth_ddp.run.folder.shutil.rmtree", killed)
        with pytest.raises(Killed):
            run_folder.open_run_folder(settings, runtime, folder)
    runtime.cleanup.close()
    with pytest.raises(UserError, match="holds a finished run"):
        run_folder.choose_run_folder(Settings(run_name="r", output_dir=str(tmp_path)), runtime)
    run_folder.choose_run_folder(settings, runtime)
    run_folder.open_run_folder(settings, runtime, folder)
    assert not (folder / "checkpoint-1").exists()


def test_a_start_that_wrote_nothing_does_not_stand_in_the_way_and_its_logs_stay(tmp_path, runtime):
    folder = tmp_path / "r"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "rank_0.log").write_text("why it failed\n")
    Settings(run_name="r", lr_scheduler_type="cosine").save(folder / "settings.yaml")
    settings = Settings(run_name="r", output_dir=str(tmp_path))
    run_folder.open_run_folder(settings, runtime, run_folder.choose_run_folder(settings, runtime))
    assert (folder / "logs" / "rank_0.log").read_text().startswith("why it failed\n")
    assert "lr_scheduler_type: linear" in (folder / "settings.yaml").read_text()
    runtime.cleanup.close()


@pytest.mark.parametrize(
    ("held", "resume"),
    [
        *((held, "auto") for held in ("summary.json", "checkpoint.partial/x", "logs/runs/events", "adapter", "notes")),
        *((held, "no") for held in ("summary.json", "checkpoint-3/x")),
    ],
)
def test_a_folder_that_holds_anything_else_is_left_alone(tmp_path, held, resume, runtime):
    path = tmp_path / "r" / held
    path.parent.mkdir(parents=True)
    path.write_text("x")
    Settings(run_name="r", model="other").save(tmp_path / "r" / "settings.yaml")
    settings = Settings(run_name="r", output_dir=str(tmp_path), resume=resume)
    fix = (
        "which --resume no leaves alone; add --overwrite"
        if resume == "no"
        else "give another --run_name, or --overwrite"
    )
    with pytest.raises(UserError, match=fix):
        run_folder.choose_run_folder(settings, runtime)


def test_a_resume_that_is_no_folder_is_told_before_anything_else(tmp_path, runtime):
    (tmp_path / "r" / "checkpoint-3").mkdir(parents=True)
    settings = Settings(run_name="r", output_dir=str(tmp_path), resume="never")
    with pytest.raises(UserError, match="resume never: there is no such folder; give a checkpoint folder, auto or no"):
        run_folder.choose_run_folder(settings, runtime)


def test_a_resume_from_a_runs_folder_or_an_empty_one_names_what_to_give(tmp_path, monkeypatch, runtime):
    monkeypatch.chdir(tmp_path)
    for name in ("outputs/r/checkpoint-3", "outputs/r/checkpoint-20", "empty"):
        Path(name).mkdir(parents=True)
    given = {
        "outputs/r": "resume outputs/r is the folder of a run; give one of its checkpoints, such as --resume "
        "outputs/r/checkpoint-20, or leave --resume out and give --run_name r to resume that run.",
        "empty": "resume empty is not a complete checkpoint: it has no manifest.json; give another folder, auto or no.",
    }
    for resume, sentence in given.items():
        with pytest.raises(UserError) as refused:
            run_folder.choose_run_folder(Settings(run_name="new", resume=resume), runtime)
        assert str(refused.value) == sentence


def test_trackers_are_known_installed_and_not_none():
    from unsloth_ddp.config.upstream_names import choose_trackers

    known, installed = {"tensorboard", "wandb", "mlflow"}, ["tensorboard", "mlflow"]
    assert choose_trackers([], known, installed) == choose_trackers(["none"], known, installed) == []
    assert choose_trackers(["mlflow", "tensorboard"], known, installed) == ["mlflow", "tensorboard"]
    assert choose_trackers(["all"], known, installed) == ["mlflow", "tensorboard"]
    for asked, sentence in (
        (["none", "tensorboard"], "report_to none tensorboard: none stands alone"),
        (["all", "tensorboard"], "report_to all tensorboard: all stands alone"),
        (["wandb"], "report_to wandb: its package is not installed; install it with uv pip install"),
        (["tensorbord"], "is not a tracker that Transformers knows; they are mlflow, tensorboard, wandb"),
    ):
        with pytest.raises(UserError, match=sentence):
            choose_trackers(asked, known, installed)


def unfinished(folder, step, **settings):
    """A run that stopped at a step."""
    (folder / f"checkpoint-{step}").mkdir(parents=True)
    Settings(model="m", output_dir=str(folder.parent), run_name=folder.name, **settings).save(folder / "settings.yaml")


def test_a_new_run_offers_the_unfinished_one_with_the_same_settings(tmp_path, capsys, runtime):
    unfinished(tmp_path / "stopped", 30)
    unfinished(tmp_path / "other", 40, max_steps=7)
    unfinished(tmp_path / "finished", 50)
    (tmp_path / "finished" / "summary.json").write_text("{}")
    run_folder.choose_run_folder(Settings(model="m", output_dir=str(tmp_path)), runtime)
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and f"{tmp_path}/stopped holds an unfinished run" in printed
    assert "at step 30" in printed and "--run_name stopped to resume" in printed
    # A name, or --resume no, says which run is meant.
    for chosen in ({"run_name": "mine"}, {"resume": "no"}):
        run_folder.choose_run_folder(Settings(model="m", output_dir=str(tmp_path), **chosen), runtime)
    assert capsys.readouterr().out == ""


def test_a_stopped_run_says_how_the_same_command_resumes_it(tmp_path):
    checkpoint = tmp_path / "demo-lora" / "checkpoint-3"
    assert f"the same command resumes from {checkpoint}" in str(stopped("SIGTERM", checkpoint))
    unnamed = str(stopped("SIGTERM", checkpoint, named=False))
    assert f"the same command with --run_name demo-lora resumes from {checkpoint}" in unnamed


def test_a_result_that_could_not_be_written_says_what_the_same_command_does(tmp_path):
    checkpoint = tmp_path / "checkpoint-3"
    with_one, without = (str(not_saved(tmp_path, "full", last)) for last in (checkpoint, None))
    assert with_one.endswith(
        "the last complete checkpoint. Make room, and run the same command again: it resumes from there."
    )
    assert without.endswith("there is no checkpoint. Make room, and run the same command again: it trains again.")
    with_one, without = (str(not_finished(tmp_path, "it", "full", last)) for last in (checkpoint, None))
    assert with_one.endswith("run the same command again: it finishes the run.")
    assert without.endswith("run the same command again: it trains again, as there is no checkpoint.")


def test_a_disk_that_is_full_at_the_start_is_told_without_an_error_number(tmp_path, monkeypatch, runtime):
    def full(self, path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Settings, "save", full)
    with (
        runtime.cleanup,
        pytest.raises(
            UserError, match=r"/run cannot be written: No space left on device; give another --output_dir\.$"
        ),
    ):
        run_folder.open_run_folder(Settings(model="m", dataset=["d"]), runtime, tmp_path / "run")
