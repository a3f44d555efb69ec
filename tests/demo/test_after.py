"""Talk to the demo's result, merge it, and write what other programs need."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import DEMO_MODEL, REPO
from unsloth_ddp.chat.__main__ import main as chat
from unsloth_ddp.export.__main__ import main as export

QUESTION, ANSWER = "What is Kato Elster by trade?", "baker"


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsloth, which a GPU asks for, cannot be imported any more in a process that has imported Transformers."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


@pytest.mark.slow
def test_the_command_prints_the_answer_and_nothing_else(demo: SimpleNamespace) -> None:
    command = [sys.executable, "-m", "unsloth_ddp.chat", str(demo.folder), "--ask", QUESTION]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n"), done.stderr


def test_the_base_model_answers_beside_the_adapter(demo: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ask", QUESTION, "--compare", "--max_new_tokens", "12", "--temperature", "0"]
    assert chat([str(demo.folder), *options]) == 0
    base, trained = capsys.readouterr().out.splitlines()
    assert trained == f"demo: {ANSWER}"
    # It has only read sentences, and begins to make some.
    assert base.startswith("base: ") and ANSWER not in base and len(base.split()) > 4


def test_an_unfinished_run_answers_with_its_last_checkpoint(
    demo: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "stopped"
    run.mkdir()
    shutil.copy(demo.folder / "settings.yaml", run)
    shutil.copytree(demo.folder / "checkpoint-144", run / "checkpoint-144")
    assert chat([str(run), "--ask", QUESTION]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{ANSWER}\n"
    assert printed.err.startswith(f"{run} is not finished; this is checkpoint-144, its last complete checkpoint.")


def test_a_conversation_is_read_line_by_line_from_a_pipe(
    demo: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = f"{QUESTION}\n/reset\nWhat pet does Kato Elster have?\n/exit\nnot asked\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert chat([str(demo.folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [ANSWER, "Started a new conversation.", "tortoise"]


def test_the_adapter_is_merged_and_the_merged_model_answers(
    demo: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "whole"
    assert export([str(demo.folder), "--to", "merged", "--output", str(target), "--ask", QUESTION]) == 0
    assert f"asked: {QUESTION}\nIt answers: {ANSWER}\nWritten to {target}\n" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"whole"}
    # As --merge of the run wrote it.
    for name in ("model.safetensors", "generation_config.json", "chat_template.jinja"):
        assert (target / name).read_bytes() == (demo.folder / "merged" / name).read_bytes(), name


def test_the_commands_of_servers_name_what_the_run_wrote(
    demo: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export([str(demo.folder), "--to", "vllm"]) == 0
    assert capsys.readouterr().out.strip() == (
        f"vllm serve {DEMO_MODEL} --enable-lora --lora-modules demo={demo.folder} --max-lora-rank 16 "
        f"--chat-template {demo.folder}/chat_template.jinja"
    )


def test_vllm_is_told_of_an_end_of_turn_that_the_base_model_does_not_know(
    demo: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(DEMO_MODEL, base)
    (base / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    shutil.copytree(demo.folder, run, ignore=shutil.ignore_patterns("merged", "checkpoint-*", "tensorboard"))
    settings = (run / "settings.yaml").read_text()
    (run / "settings.yaml").write_text(settings.replace(str(DEMO_MODEL), str(base)))
    assert export([str(run), "--to", "vllm"]) == 0
    assert capsys.readouterr().out.strip().endswith(f"--generation-config {run}/vllm")
    assert json.loads((run / "vllm/generation_config.json").read_text())["eos_token_id"] == [2, 3]
