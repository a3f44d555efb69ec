"""The output folder's last step: the summary and the upload."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from unsloth_ddp.config.options import Settings
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.run import folder as run_folder
from unsloth_ddp.run import summary
from unsloth_ddp.utils.errors import UserError

SUMMARY = {"steps": 3, "train_seconds": 1.0, "train_loss": 2.0, "eval_loss": None, "tokens_per_second": 10.0}


@pytest.fixture
def hub(monkeypatch):
    """A Hub that records what it is asked."""
    asked = []

    class Api:
        def whoami(self):
            return {"name": "me"}

        def create_repo(self, repo_id, **given):
            asked.append(("create", repo_id, given))
            return SimpleNamespace(repo_id=repo_id, url=f"https://hub/{repo_id}")

        def upload_folder(self, **given):
            asked.append(("upload", given))

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    return asked


def test_the_summary_is_written_and_nothing_uploaded_unasked(tmp_path, hub, capsys):
    summary.finish(Settings(run_name="r"), tmp_path, SUMMARY)
    assert json.loads((tmp_path / "summary.json").read_text()) == SUMMARY
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert "3 steps in 1 s, train_loss 2.0000, 10 tokens/s" in capsys.readouterr().out
    assert hub == []


def test_an_upload_is_private_and_leaves_logs_and_checkpoints_out(tmp_path, hub, capsys):
    summary.finish(Settings(run_name="r", push_to_hub=True, merge=True), tmp_path, SUMMARY)
    assert hub[0] == ("create", "me/r", {"private": True, "exist_ok": True})
    assert {"checkpoint*", "logs/*"} <= set(hub[1][1]["ignore_patterns"])
    assert hub[2][1]["path_in_repo"] == "merged"
    assert "Uploaded to https://hub/me/r" in capsys.readouterr().out


def test_a_failed_upload_says_that_the_run_is_whole(tmp_path, monkeypatch):
    class Api:
        def whoami(self):
            raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    with pytest.raises(UserError, match=r"whole in .* not uploaded: no route"):
        summary.finish(Settings(run_name="r", push_to_hub=True), tmp_path, SUMMARY)
    assert (tmp_path / "summary.json").is_file()


@pytest.mark.parametrize("resume", ["auto", "no", "{}/elsewhere/checkpoint-3"])
def test_a_run_that_began_meanwhile_is_not_removed(tmp_path, resume):
    (tmp_path / "elsewhere" / "checkpoint-3").mkdir(parents=True)
    resume = resume.format(tmp_path)
    settings = Settings(run_name="r", output_dir=str(tmp_path), resume=resume)
    runtime = Runtime(Ranks(), "transformers", "cpu", "fp32", "CPU")
    folder = run_folder.choose_run_folder(settings, runtime)
    folder.mkdir()
    (folder / "adapter.txt").write_text("another job's")
    with pytest.raises(UserError, match="holds another run"):
        run_folder.open_run_folder(settings, runtime, folder)
    assert (folder / "adapter.txt").read_text() == "another job's"


def test_a_refused_folder_is_told_with_what_differs_and_checkpoints_only_where_there_are_some(tmp_path):
    (tmp_path / "r").mkdir()
    Settings(run_name="r", max_steps=300).save(tmp_path / "r" / "settings.yaml")
    (tmp_path / "r" / "adapter.txt").write_text("")
    settings = Settings(run_name="r", output_dir=str(tmp_path), max_steps=3)
    runtime = Runtime(Ranks(), "transformers", "cpu", "fp32", "CPU")
    with pytest.raises(UserError) as refused:
        run_folder.choose_run_folder(settings, runtime)
    assert str(refused.value).endswith(
        "r holds another run, started with another max_steps; give another --run_name, or --overwrite to replace it."
    )
    (tmp_path / "r" / "checkpoint-3").mkdir()
    (tmp_path / "r" / "summary.json").write_text("{}")
    with pytest.raises(UserError, match=r"holds a finished run; .* with one of its checkpoints"):
        run_folder.choose_run_folder(settings, runtime)


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


def test_a_second_job_is_refused_before_it_loads_anything(tmp_path, other_job, monkeypatch, capsys):
    monkeypatch.setattr(run_folder, "LOCK_PATIENCE", 0.0)
    settings = Settings(run_name="r", output_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"r is being written by another job \(far, process 7\); wait for its end, or"):
        run_folder.choose_run_folder(settings, Runtime(Ranks(), "transformers", "cpu", "fp32", "CPU"))


@pytest.mark.parametrize("finished", [False, True])
def test_a_job_that_ends_now_is_waited_for(tmp_path, other_job, monkeypatch, capsys, finished):
    def end(seconds):
        if finished:
            (tmp_path / "r" / "summary.json").write_text("{}")
        other_job.kill()
        other_job.wait()

    monkeypatch.setattr(run_folder.time, "sleep", end)
    settings = Settings(run_name="r", output_dir=str(tmp_path))
    runtime = Runtime(Ranks(), "transformers", "cpu", "fp32", "CPU")
    if finished:
        with pytest.raises(UserError, match="r holds a finished run"):
            run_folder.choose_run_folder(settings, runtime)
    else:
        assert run_folder.choose_run_folder(settings, runtime) == tmp_path / "r"
    assert capsys.readouterr().out.count("(far, process 7); waiting for its end, 30 s at most.") == 1


def test_an_upload_needs_a_token_and_a_hub_before_the_run_begins(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    run_folder.check_upload(Settings())
    with pytest.raises(UserError, match="push_to_hub needs a token"):
        run_folder.check_upload(Settings(push_to_hub=True))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    run_folder.check_upload(Settings(push_to_hub=True))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="push_to_hub needs the Hub, which is switched off"):
        run_folder.check_upload(Settings(push_to_hub=True))


class Killed(BaseException):
    """Ends a process where it is raised, as kill -9 does."""


def test_a_start_killed_while_it_writes_its_settings_starts_again(tmp_path, monkeypatch):
    settings = Settings(run_name="r", output_dir=str(tmp_path))
    runtime = Runtime(Ranks(), "transformers", "cpu", "fp32", "CPU")
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


def test_an_overwriting_start_killed_while_it_empties_the_folder_leaves_what_can_be_overwritten(tmp_path, monkeypatch):
    settings = Settings(run_name="r", output_dir=str(tmp_path), overwrite=True)
    runtime = Runtime(Ranks(), "transformers", "cpu", "fp32", "CPU")
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


def test_a_start_that_wrote_nothing_does_not_stand_in_the_way_and_its_logs_stay(tmp_path):
    runtime = Runtime(Ranks(), "transformers", "cpu", "fp32", "CPU")
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
def test_a_folder_that_holds_anything_else_is_left_alone(tmp_path, held, resume):
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
        run_folder.choose_run_folder(settings, Runtime(Ranks(), "transformers", "cpu", "fp32", "CPU"))


def test_a_resume_that_is_no_folder_is_told_before_anything_else(tmp_path):
    (tmp_path / "r" / "checkpoint-3").mkdir(parents=True)
    settings = Settings(run_name="r", output_dir=str(tmp_path), resume="never")
    with pytest.raises(UserError, match="resume never: there is no such folder; give a checkpoint folder, auto or no"):
        run_folder.choose_run_folder(settings, Runtime(Ranks(), "transformers", "cpu", "fp32", "CPU"))


def test_trackers_are_known_installed_and_not_none():
    from unsloth_ddp.config.upstream_names import choose_trackers

    known, installed = {"tensorboard", "wandb", "mlflow"}, ["tensorboard", "mlflow"]
    assert choose_trackers([], known, installed) == choose_trackers(["none"], known, installed) == []
    assert choose_trackers(["mlflow", "tensorboard"], known, installed) == ["mlflow", "tensorboard"]
    assert choose_trackers(["all"], known, installed) == ["mlflow", "tensorboard"]
    for asked, sentence in (
        (["none", "tensorboard"], "report_to none tensorboard: none stands alone"),
        (["all", "tensorboard"], "report_to all tensorboard: all stands alone"),
        (["wandb"], "report_to wandb: its package is not installed"),
        (["tensorbord"], "is no tracker that Transformers knows; they are mlflow, tensorboard, wandb"),
    ):
        with pytest.raises(UserError, match=sentence):
            choose_trackers(asked, known, installed)
