"""The summary of a finished run, and its upload."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from unsloth_ddp.config.options import Settings
from unsloth_ddp.run import summary, upload
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
    assert {"checkpoint*", "logs/*", "report.html", "record.json"} <= set(hub[1][1]["ignore_patterns"])
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


def test_an_upload_needs_a_token_and_a_hub_before_the_run_begins(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    upload.check_upload(Settings())
    with pytest.raises(UserError, match="push_to_hub needs a token"):
        upload.check_upload(Settings(push_to_hub=True))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    upload.check_upload(Settings(push_to_hub=True))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="push_to_hub needs the Hub, which is switched off"):
        upload.check_upload(Settings(push_to_hub=True))


def test_the_table_names_schedule_and_warm_up():
    assert summary.describe_schedule(Settings()) == "linear schedule without warm-up"
    cosine = Settings(lr_scheduler_type="cosine", warmup_steps=0.05)
    assert summary.describe_schedule(cosine) == "cosine schedule with 5% of all steps of warm-up"
    assert summary.describe_schedule(Settings(warmup_steps=20)) == "linear schedule with 20 steps of warm-up"
