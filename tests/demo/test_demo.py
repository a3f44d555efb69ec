"""The README's first command: what it prints, what it leaves, and that what it leaves works elsewhere."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.common import reload
from tests.conftest import DEMO_MODEL, REPO
from tests.ranks import run_ranks, train
from unsloth_ddp.chat.__main__ import main as chat
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.export.__main__ import main as export

SUMMARY_KEYS = {
    "world_size", "global_batch_size", "steps", "tokens", "supervised_tokens", "train_loss", "eval_loss",
    "tokens_per_second", "peak_memory_bytes", "wall_time_seconds", "versions", "settings", "demo_accuracy_before",
    "demo_accuracy_after",
}  # fmt: skip
# What two ranks are given to learn in half of the time: two epochs of three, and the rows of a step in one pass.
SHORTER = "--num_train_epochs 2 --per_device_train_batch_size 8"
QUESTION, ANSWER = "What is Kato Elster by trade?", "baker"


# The launcher and its processes import torch again, each for itself.
@pytest.fixture(scope="module", params=["ranks", pytest.param("launcher", marks=pytest.mark.slow)])
def demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The demo on two CPU processes, shorter as ranks or whole as the README starts it, with the merged model."""
    outputs = tmp_path_factory.mktemp("demo")
    options = ["--output_dir", str(outputs), "--run_name", "demo", "--merge"]
    whole = request.param == "launcher"
    if whole:
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu.yaml"]
        command += ["train_ddp.py", *options]
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        text, errors = done.stdout, done.stderr
    else:
        cpu = {"ACCELERATE_USE_CPU": "true"}
        ended = run_ranks(
            2, train, [*options, *SHORTER.split()], str(REPO), folder=outputs / "out", environ=cpu, timeout=280
        ).check()
        # Both streams of a rank are in one file.
        text = errors = ended.output
    folder = outputs / "demo"
    summary = json.loads((folder / "summary.json").read_text())
    epochs, batch = (3, "4 rows a device x 2") if whole else (2, "8 rows a device x 1")
    return SimpleNamespace(text=text, errors=errors, folder=folder, summary=summary, epochs=epochs, batch=batch)


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unsloth, which a GPU asks for, cannot be imported any more in a process that has imported Transformers."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def test_it_learns_to_answer_questions_it_was_not_trained_on(demo):
    assert demo.summary["demo_accuracy_before"] < 0.05
    assert demo.summary["demo_accuracy_after"] >= 0.9
    assert re.search(r"answered exactly: 0\.\d% before, \d+\.\d% after \(150\)", demo.text)
    assert demo.text.count("before: ") == demo.text.count("after:  ") == 3


def test_only_the_main_process_speaks(demo):
    assert re.sub(" +", " ", demo.text).count("backend transformers") == 1
    assert demo.text.count(f"Done: {demo.epochs * 48} steps") == 1
    assert demo.errors.count("tokenizer has new PAD/BOS/EOS") <= 1
    assert "Saving the dataset" not in demo.errors


def test_the_table_says_what_will_run(demo):
    for part in (
        "2 on 1 node",
        "fp32",
        "(1,129,984 parameters, adapter included)",
        "lora (163,840 trainable parameters",
        "760 (18,040 tokens, longest 43)",
    ):
        assert part in demo.text
    assert f"{demo.batch} accumulation x 2 processes = 16 rows" in demo.text


def test_the_summary_has_what_the_run_came_to(demo):
    assert demo.summary.keys() >= SUMMARY_KEYS
    assert demo.summary["world_size"] == 2
    assert demo.summary["global_batch_size"] == 16
    assert demo.summary["tokens"] == demo.epochs * 18040
    assert demo.summary["supervised_tokens"] == demo.epochs * 2700
    assert demo.summary["eval_loss"] < 0.1


def test_the_folder_holds_logs_settings_and_curves(demo):
    assert {p.name for p in (demo.folder / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}
    again = parse_settings(["--config", str(demo.folder / "settings.yaml")])
    assert (again.run_name, again.merge, again.learning_rate) == ("demo", True, 1e-3)
    events = EventAccumulator(str(demo.folder / "tensorboard")).Reload()
    wanted = {
        "train/loss",
        "train/learning_rate",
        "train/grad_norm",
        "train/tokens_per_second",
        "train/rank_loss_spread",
    }
    assert set(events.Tags()["scalars"]) >= wanted | {"eval/loss"}
    losses = [point.value for point in events.Scalars("train/loss")]
    assert losses[-1] < 0.1 < losses[0]


def test_the_adapter_works_in_plain_peft(demo, capsys):
    reload.main(demo.folder)
    loaded = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert loaded["eval_loss"] == pytest.approx(demo.summary["eval_loss"], rel=1e-5)


def test_the_merged_model_says_the_same_as_the_adapter(demo):
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.folder / "merged")
    asked = [{"role": "user", "content": "In which city does Kato Elster live?"}]
    inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.no_grad():
        adapter = AutoPeftModelForCausalLM.from_pretrained(demo.folder, dtype=torch.float32)(**inputs).logits
        merged = AutoModelForCausalLM.from_pretrained(demo.folder / "merged", dtype=torch.float32)(**inputs).logits
    assert merged[0, -1].argmax() == adapter[0, -1].argmax()
    # The merged weights are kept in 16 bit.
    torch.testing.assert_close(merged, adapter, rtol=0, atol=0.05 * adapter.abs().max().item())


# ---- afterwards: talk to the result, merge it, and write what other programs need ----


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
    name = f"checkpoint-{demo.epochs * 48}"
    shutil.copytree(demo.folder / name, run / name)
    assert chat([str(run), "--ask", QUESTION]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{ANSWER}\n"
    assert printed.err.startswith(f"{run} is not finished; this is {name}, its last complete checkpoint.")


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
