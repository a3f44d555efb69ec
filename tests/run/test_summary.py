"""The summary of a finished run, and its upload."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from huggingface_hub.utils import filter_repo_objects

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

        def upload_file(self, **given):
            asked.append(("file", given))

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    return asked


def test_the_summary_is_written_and_nothing_uploaded_unasked(tmp_path, hub, capsys):
    summary.finish(Settings(run_name="r"), tmp_path, SUMMARY)
    assert json.loads((tmp_path / "summary.json").read_text()) == SUMMARY
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
    assert "3 steps in 1.0 s, train_loss 2.0000, 10 tokens/s" in capsys.readouterr().out
    assert hub == []


@pytest.mark.parametrize("has_processor", [False, True])
def test_a_model_with_a_processor_is_shown_with_the_option_for_images(has_processor, tmp_path, capsys):
    if has_processor:
        (tmp_path / "processor_config.json").write_text("{}")
    summary.finish(Settings(run_name="r"), tmp_path, SUMMARY)
    printed = capsys.readouterr().out
    assert ("To talk to it, with --image FILE to show it an image:\n" in printed) is has_processor
    assert ("To talk to it:\n" in printed) is not has_processor


def test_an_upload_is_private_and_leaves_logs_and_checkpoints_out(tmp_path, hub, capsys):
    summary.finish(Settings(run_name="r", push_to_hub=True, merge=True), tmp_path, SUMMARY)
    assert hub[0] == ("create", "me/r", {"private": True, "exist_ok": True})
    assert {"checkpoint*", "logs/*", "report.html", "record.json"} <= set(hub[1][1]["ignore_patterns"])
    assert [kind for kind, *_ in hub] == ["create", "upload", "upload"]
    assert hub[2][1]["path_in_repo"] == "merged"
    assert "Uploaded to https://hub/me/r" in capsys.readouterr().out


def test_what_is_uploaded_names_no_folder_user_or_host_of_this_machine(whole_run, hub, tmp_path):
    """Every file of a real run that goes to the Hub, by its name and its content."""
    folder = tmp_path / "r"
    shutil.copytree(whole_run(1), folder)
    upload.upload(Settings(run_name="r", push_to_hub=True, method="lora"), folder)
    (_, given), (_, adapter) = hub[1:3]
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    sent = set(filter_repo_objects(paths, ignore_patterns=given["ignore_patterns"]))
    assert {"README.md", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= sent
    assert not [name for name in sent if socket.gethostname() in name]
    local = [str(tmp_path.parents[1]).encode(), str(Path(__file__).parents[2]).encode()]
    assert {name for name in sent if any(word in paths[name].read_bytes() for word in local)} == set()
    config = json.loads((folder / "adapter_config.json").read_text())
    assert adapter["path_in_repo"] == "adapter_config.json" and Path(config["base_model_name_or_path"]).is_absolute()
    named = Path(config["base_model_name_or_path"]).name
    assert json.loads(adapter["path_or_fileobj"]) == {**config, "base_model_name_or_path": named}


def test_a_base_model_of_the_hub_keeps_its_name_in_the_uploaded_adapter(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    config = upload.shared_adapter_config(tmp_path)
    assert config is not None and json.loads(config)["base_model_name_or_path"] == "Qwen/Qwen3-8B"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("no route to host"), "no route to host"),
        (httpx.ConnectError("[Errno 111] Connection refused"), r"\[Errno 111\] Connection refused"),
        (RuntimeError("Data processing error: CAS"), "Data processing error: CAS"),
        (httpx.ReadTimeout(""), "ReadTimeout"),
    ],
)
def test_a_failed_upload_says_that_the_run_is_whole(tmp_path, monkeypatch, error, said):
    class Api:
        def whoami(self):
            raise error

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    with pytest.raises(
        UserError,
        match=f"complete in .* not uploaded: {said}; try again with uv run python -m unsloth_ddp.export {tmp_path} "
        f"--to hub.$",
    ):
        summary.finish(Settings(run_name="r", push_to_hub=True), tmp_path, SUMMARY)
    assert (tmp_path / "summary.json").is_file()


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"run_name": "my run (1)"}, r"run_name my run \(1\) cannot name a repository"),
        ({"run_name": "ü"}, "run_name ü cannot name a repository"),
        ({"run_name": "r" * 97}, "cannot name a repository"),
        ({"run_name": "r", "hub_model_id": "a/b/c"}, "hub_model_id a/b/c cannot name a repository"),
        ({"run_name": "r", "hub_model_id": "me/-r"}, "hub_model_id me/-r cannot name a repository"),
    ],
)
def test_a_name_that_the_hub_refuses_is_refused_before_the_run_begins(monkeypatch, named, said):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match=said):
        upload.check_upload(Settings(push_to_hub=True, **named))
    upload.check_upload(Settings(push_to_hub=True, run_name="my run (1)", hub_model_id="me/my-run"))
    upload.check_upload(Settings(**named))


def test_an_upload_needs_a_token_and_a_hub_before_the_run_begins(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    upload.check_upload(Settings())
    with pytest.raises(UserError, match="push_to_hub needs a token"):
        upload.check_upload(Settings(push_to_hub=True))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    upload.check_upload(Settings(push_to_hub=True, run_name="r"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="push_to_hub needs the Hub, which is switched off"):
        upload.check_upload(Settings(push_to_hub=True, run_name="r"))


def test_the_table_names_schedule_and_warm_up():
    assert summary.describe_schedule(Settings()) == "linear schedule, no warm-up"
    cosine = Settings(lr_scheduler_type="cosine", warmup_steps=0.05)
    assert summary.describe_schedule(cosine) == "cosine schedule, warm-up of 5% of the steps"
    assert summary.describe_schedule(Settings(warmup_steps=20)) == "linear schedule, 20 warm-up steps"
    assert summary.describe_schedule(Settings(warmup_steps=1)) == "linear schedule, 1 warm-up step"


@pytest.mark.parametrize(
    ("sharding", "offload", "name"),
    [
        ("zero2", "none", "adamw_torch, learning rate"),
        ("zero2", "optimizer", "adamw_torch as DeepSpeed's CPU Adam, learning rate"),
        ("fsdp2", "parameters", "adamw_torch, learning rate"),
    ],
)
def test_the_table_names_the_optimizer_that_runs(sharding, offload, name):
    runtime = SimpleNamespace(sharding=sharding, offload=offload)
    assert summary.describe_optimizer(Settings(optim="adamw_torch"), runtime).startswith(name)
