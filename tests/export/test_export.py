"""The export command on runs of the tiny model: what is written, and that nothing half-written stays."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoTokenizer, LlamaForCausalLM

from unsloth_ddp.chat.__main__ import main as chat
from unsloth_ddp.config.options import Settings
from unsloth_ddp.config.parse import parse_settings
from unsloth_ddp.export import merged
from unsloth_ddp.export.__main__ import main
from unsloth_ddp.run.documents.record import read_run
from unsloth_ddp.run.next_steps import next_steps


@pytest.fixture
def run(whole_run, tmp_path: Path) -> Path:
    """The folder of a finished run with an adapter."""
    folder = tmp_path / "mine"
    shutil.copytree(whole_run(1), folder, ignore=shutil.ignore_patterns("checkpoint-*", "logs"))
    return folder


@pytest.fixture
def full_run(tiny_model: Path, tmp_path: Path) -> Path:
    """The folder of a finished run that trained every parameter; it stops at both ends of its answers."""
    folder = tmp_path / "whole"
    shutil.copytree(tiny_model, folder)
    Settings(model=str(tiny_model), method="full", dataset=["d"], run_name="whole").save(folder / "settings.yaml")
    (folder / "summary.json").write_text("{}")
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_gguf_file_ends_generation_where_the_answers_of_the_run_end(
    run: Path, llama_cpp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert AutoTokenizer.from_pretrained(run).eos_token == "<|eos|>"
    before = names(run)
    assert main([str(run), "--to", "gguf", "--llama_cpp", str(llama_cpp), "--ask", "Who?"]) == 0
    printed = capsys.readouterr().out
    assert f"asked: Who?\nIt answers: I was asked: Who?\nWritten to {run}/gguf\n" in printed
    assert names(run) - before == {"gguf"} and names(run / "gguf") == {"mine-bf16.gguf"}
    # The demo's template ends an answer with <|end|>, token 3; the tiny model knows only its EOS, token 2.
    assert json.loads((run / "gguf/mine-bf16.gguf").read_text()) == {
        "type": "bf16", "eos": "<|end|>", "template": True, "weights": True, "stops": [2, 3],
    }  # fmt: skip


def test_other_types_are_made_by_the_quantizer_and_ollama_gets_a_modelfile(
    full_run: Path, llama_cpp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMA_CPP", str(llama_cpp))
    before = {path.name: path.read_bytes() for path in full_run.iterdir()}
    assert main([str(full_run), "--to", "ollama", "--quantize", "Q4_K_M", "--ask", "Who?"]) == 0
    printed = capsys.readouterr().out
    # The demo's template writes a BOS once at the beginning of a chat, which its tokenizer does not add.
    assert (
        f"ollama create whole -f {full_run}/ollama/Modelfile" in printed and "The Modelfile has no TEMPLATE" in printed
    )
    assert names(full_run / "ollama") == {"whole-q4_k_m.gguf", "Modelfile"}
    assert (full_run / "ollama/whole-q4_k_m.gguf").read_text().startswith('Q4_K_M of {"type": "bf16", "eos": "<|end|>"')
    assert (full_run / "ollama/Modelfile").read_text() == 'FROM ./whole-q4_k_m.gguf\nPARAMETER stop "<|end|>"\n'
    # The run's own files, which were linked for the conversion.
    assert {name: (full_run / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        (
            "CONVERTER_SAYS",
            "ERROR: Model X is not supported",
            "refuses the model (exit code 1: ERROR: Model X is not supported); if",
        ),
        ("ANSWERER_FAILS", "yes", "so it is not kept (exit code 3: unknown tensor)"),
    ],
)
def test_nothing_is_left_of_an_export_that_fails(
    full_run: Path,
    llama_cpp: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    variable: str,
    value: str,
    sentence: str,
) -> None:
    before = names(full_run)
    monkeypatch.setenv(variable, value)
    assert main([str(full_run), "--to", "gguf", "--llama_cpp", str(llama_cpp)]) == 2
    assert sentence in capsys.readouterr().err
    assert names(full_run) == before


def test_a_full_disk_leaves_no_merged_model(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = names(run)

    def write(result: object, target: Path) -> None:
        (target / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merged, "write_merged", write)
    assert main([str(run), "--to", "merged"]) == 2
    assert capsys.readouterr().err == (
        f"export: error: {run}/merged could not be written: no space is left on the disk of {run}; nothing is left of "
        "it.\n"
    )
    assert names(run) == before


def test_a_base_model_that_cannot_be_loaded_is_named(
    run: Path, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny_model, base)
    (base / "config.json").write_text('{"model_type": "of another planet"}')
    settings = (run / "settings.yaml").read_text()
    (run / "settings.yaml").write_text(settings.replace(f"model: {tiny_model}", f"model: {base}"))
    before = names(run)
    assert main([str(run), "--to", "merged"]) == 2
    assert f"The base model of {run} cannot be " in capsys.readouterr().err
    assert names(run) == before


def test_a_checkpoint_is_exported_under_its_own_name(whole_run, tmp_path: Path) -> None:
    run = tmp_path / "stopped"
    shutil.copytree(whole_run(1), run, ignore=shutil.ignore_patterns("checkpoint-[1-8]", "logs", "summary.json"))
    assert main([str(run), "--to", "merged"]) == 0
    model = LlamaForCausalLM.from_pretrained(run / "merged-checkpoint-9")
    assert model.generation_config.eos_token_id == [2, 3]


def test_a_finished_run_is_uploaded_without_what_is_private_and_an_unfinished_one_is_not(
    run: Path, whole_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[Any] = []

    class Api:
        def whoami(self) -> dict[str, str]:
            return {"name": "me"}

        def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> Any:
            sent.append((repo_id, private))
            return SimpleNamespace(repo_id=repo_id, url=f"https://hub/{repo_id}")

        def upload_folder(self, *, repo_id: str, folder_path: Path, ignore_patterns: list[str]) -> None:
            paths = [path.relative_to(folder_path).as_posix() for path in folder_path.rglob("*") if path.is_file()]
            sent.extend(sorted(filter_repo_objects(paths, ignore_patterns=ignore_patterns)))

        def upload_file(self, *, path_in_repo: str, **given: Any) -> None:
            sent.append(path_in_repo)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("gguf", "merged-checkpoint-9"):
        (run / name).mkdir()
        (run / name / "weights").write_text("exported")
    assert main([str(run), "--to", "hub"]) == 0
    assert capsys.readouterr().out == "Uploaded to https://hub/me/mine\n"
    assert sent == [
        ("me/mine", True), "README.md", "adapter_model.safetensors", "chat_template.jinja", "tokenizer.json",
        "tokenizer_config.json", "adapter_config.json",
    ]  # fmt: skip
    sent.clear()
    assert main([str(run), "--to", "hub", "--hub_model_id", "us/ours", "--hub_private_repo", "false"]) == 0
    assert sent[0] == ("us/ours", False)
    stopped = tmp_path / "stopped"
    shutil.copytree(whole_run(1), stopped, ignore=shutil.ignore_patterns("checkpoint-[1-8]", "logs", "summary.json"))
    assert main([str(stopped), "--to", "hub"]) == 2
    assert f"{stopped} is not finished, and a checkpoint holds more than its model" in capsys.readouterr().err
    # In a process of its own, which has imported no more than the command does.
    environ = {**os.environ, "HF_HOME": str(tmp_path), "HF_TOKEN": "", "HF_HUB_OFFLINE": "0"}
    words = [sys.executable, "-m", "unsloth_ddp.export", str(run), "--to", "hub"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "export: error: --to hub needs a token of the Hub, and none is found; log in once with uv run hf auth login, "
        "or set HF_TOKEN.\n",
    )


def test_a_whole_model_is_not_merged_and_is_served_as_it_is(full_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(full_run), "--to", "merged"]) == 2
    assert f"{full_run} holds a complete model already" in capsys.readouterr().err
    assert main([str(full_run), "--to", "vllm"]) == 0
    assert capsys.readouterr().out == f"vllm serve {full_run}\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--to merged", "already exists; remove it, or give another folder with --output"),
        ("--to merged --output {run}/no/where", "there is no folder"),
        ("--to gguf", "convert_hf_to_gguf.py, which is not on the PATH; git clone"),
        ("--to gguf --llama_cpp {run}/nowhere", "--llama_cpp {run}/nowhere: there is no such folder"),
        ("--to gguf --llama_cpp {run}", "convert_hf_to_gguf.py, which is not in {run}"),
        ("--to gguf --quantize int4", "argument --quantize: invalid choice: 'int4'"),
        ("--to vllm --quantize q8_0", "--quantize is for --to gguf and --to ollama, but --to is vllm; leave it out."),
        ("--to onnx", "argument --to: invalid choice: 'onnx'"),
        ("", "the following arguments are required: --to"),
        ("--to merged --ask=", "--ask is empty"),
        ("--to merged --hub_model_id me/mine", "--hub_model_id is for --to hub, but --to is merged; leave it out."),
        ("--to hub --output here", "--to hub writes none here; leave it out."),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    options: str, sentence: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    (run / "merged").mkdir()
    assert main([str(run), *options.format(run=run).split()]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert printed[-1].startswith("export: error: ") and sentence.format(run=run) in printed[-1]
    assert not any((run / "merged").iterdir())


@pytest.mark.parametrize("to", ["merged", "vllm"])
def test_an_adapter_that_was_copied_in_part_is_damaged(run: Path, to: str, capsys: pytest.CaptureFixture[str]) -> None:
    weights = run / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    before = sorted(run.iterdir())
    assert main([str(run), "--to", to]) == 2
    printed = capsys.readouterr().err.splitlines()[-1]
    assert f"The adapter in {run} is damaged: adapter_model.safetensors cannot be read" in printed
    assert sorted(run.iterdir()) == before


def test_a_base_model_that_was_moved_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(model=str(run / "gone"), dataset=["d"], run_name="mine")
    settings.save(run / "settings.yaml")
    assert main([str(run), "--to", "merged"]) == 2
    assert "If it was moved, change model in the run's settings.yaml." in capsys.readouterr().err


def test_code_of_the_model_is_run_only_if_asked_for(full_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = full_run / "settings.yaml"
    path.write_text(path.read_text().replace("trust_remote_code: false", "trust_remote_code: true"))
    for main_of in (main, chat):
        assert main_of([str(full_run), *(["--to", "vllm"] if main_of is main else ["--ask", "Who?"])]) == 2
        assert "add --trust_remote_code if you trust that model" in capsys.readouterr().err
    assert main([str(full_run), "--to", "vllm", "--trust_remote_code"]) == 0
    assert capsys.readouterr().out == f"vllm serve {full_run} --trust-remote-code\n"


def test_the_quantizer_is_asked_for_before_anything_is_merged(
    run: Path, llama_cpp: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(llama_cpp / "build")
    assert main([str(run), "--to", "gguf", "--quantize", "q4_k_m", "--llama_cpp", str(llama_cpp)]) == 2
    printed = capsys.readouterr()
    assert "--quantize needs llama-quantize, which is not there; build it" in printed.err and printed.out == ""
    # Without it, what the converter makes by itself is still made, and nobody asks it.
    assert main([str(run), "--to", "gguf", "--quantize", "q8_0", "--llama_cpp", str(llama_cpp)]) == 0
    assert "The file was not asked a question" in capsys.readouterr().out
    assert json.loads((run / "gguf/mine-q8_0.gguf").read_text())["type"] == "q8_0"


def test_the_command_for_ollama_is_quoted(full_run: Path, llama_cpp: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder's name is copied into a shell, so a space or a semicolon in it must not end the command."""
    run = full_run.rename(full_run.parent / "my run; echo owned")
    assert main([str(run), "--to", "ollama", "--llama_cpp", str(llama_cpp)]) == 0
    command = capsys.readouterr().out.splitlines()[-1].strip()
    assert shlex.split(command) == ["ollama", "create", run.name, "-f", f"{run}/ollama/Modelfile"]


def test_the_commands_that_a_finished_run_prints_are_taken(
    run: Path, llama_cpp: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLAMA_CPP", str(llama_cpp))
    commands = {step.title: shlex.split(step.command) for step in next_steps(read_run(run))}
    for title, printed in {
        "Chat with it": "", "Export it for llama.cpp": f"Written to {run}/gguf", "Serve it with vLLM": "vllm serve",
    }.items():  # fmt: skip
        words = commands.pop(title)
        tool = words.index("-m") + 1
        command = {"unsloth_ddp.chat": chat, "unsloth_ddp.export": main}[words[tool]]
        more = ["--ask", "Who?"] if command is chat else []
        assert command([*words[tool + 1 :], *more]) == 0, title
        assert printed in capsys.readouterr().out
    # Training is tested elsewhere: the settings are those of the run, under another name.
    (again,) = commands.values()
    settings = parse_settings(again[1:])
    assert (settings.run_name, settings.model) == (f"{run.name}-2", read_run(run).settings["model"])
