"""Read what a real run leaves, finished and stopped; a document that cannot be written costs one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import ModelCard

from tests.conftest import write_jsonl
from tests.ranks import run_ranks, train
from tests.run.run_folders import SUMMARY, make_run
from tests.run.test_report import Page
from unsloth_ddp.distributed.ranks import Ranks
from unsloth_ddp.distributed.runtime import Runtime
from unsloth_ddp.run.answers import Question
from unsloth_ddp.run.documents import write as documents
from unsloth_ddp.run.documents.record import read_run
from unsloth_ddp.run.documents.write import answer_facts


@pytest.fixture
def job(tmp_path, tiny_model, uneven_rows):
    """Train the tiny model with these options; returns the run's folder."""
    chats = [[("user", f"Who is <b>{i}</b>?"), ("assistant", "It is I.")] for i in range(3)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    held = write_jsonl(tmp_path / "held.jsonl", rows)

    def run(options: str, ranks: int = 1, expected: int = 0) -> Path:
        argv = f"--model {tiny_model} --dataset {uneven_rows} --run_name r --max_length 64 --logging_steps 1".split()
        argv += ["--gradient_checkpointing", "none", "--eval_dataset", str(held), *options.split()]
        result = run_ranks(ranks, train, argv, str(tmp_path), folder=tmp_path / "out")
        assert result.codes == [expected] * ranks, result.output
        return tmp_path / "outputs" / "r"

    return run


def test_a_run_leaves_its_record_its_report_and_its_card(job, uneven_rows):
    folder = job("--max_steps 3 --compare_answers 2", ranks=2)
    run = read_run(folder)
    assert (run.state, run.step, run.max_steps) == ("finished", 3, 3)
    rows = len(uneven_rows.read_text().splitlines())
    assert run.record["data"]["train"]["rows"] == rows
    entries = [entry for entry in run.history if "loss" in entry]
    assert len(entries) == 3
    for entry in entries:
        assert entry["rank_step_seconds_max"] >= entry["rank_step_seconds"] > 0 and entry["peak_memory_bytes"] > 2**20
    (part,) = run.parts
    assert part["last_step"] == 3 and part["world_size"] == 2 and "--max_steps" in part["command"]
    page = Page((folder / "report.html").read_text())
    assert "Who is <b>0</b>?" in page.sections["answers"]
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "peft"
    assert str(folder.parent.parent) not in card.content


def test_a_stopped_run_has_a_report_and_goes_on_in_a_second_part(job):
    options = "--max_steps 4 --save_steps 2"
    folder = job(f"{options} --max_time 0.001", expected=75)
    stopped = read_run(folder)
    assert stopped.state == "stopped" and stopped.parts[-1]["cause"].startswith("max_time")
    page = Page((folder / "report.html").read_text())
    assert f"{stopped.step} of 4 steps; stopped on max_time" in page.text and "Resume it" in page.sections["next"]
    job(options)
    finished = read_run(folder)
    assert [part["first_step"] for part in finished.parts] == [0, stopped.step] and finished.state == "finished"
    assert finished.parts[0]["cause"] and not finished.parts[1]["cause"]
    assert "finished" in Page((folder / "report.html").read_text()).text


@pytest.fixture
def trainer(tmp_path):
    """Stand in for a trainer: the parts that documents read, of a run whose folder is there."""
    folder = make_run(tmp_path / "r")
    state = json.loads((folder / "trainer_state.json").read_text())
    return SimpleNamespace(folder=folder, state=SimpleNamespace(**state))


@pytest.mark.parametrize(
    "error, said",
    [
        (OSError(28, "No space left on device"), "cannot be written: No space left on device."),
        (KeyError("rows"), "is not written, because of an error of the kit: KeyError: 'rows'."),
    ],
)
def test_a_document_that_cannot_be_written_costs_one_sentence(trainer, monkeypatch, capsys, error, said, runtime):
    def fail(*_):
        raise error

    for name in ("write_card", "write_report", "end_record"):
        monkeypatch.setattr(documents, name, lambda *_, **__: fail())
    documents.finished(runtime, trainer, trainer.folder, SUMMARY, [])
    lines = capsys.readouterr().out.splitlines()
    assert [
        line.startswith(str(trainer.folder / name))
        for line, name in zip(lines, ("record.json", "README.md", "report.html"), strict=True)
    ]
    assert all(line.endswith(said) for line in lines)


def test_a_removed_folder_costs_a_sentence(trainer, tmp_path, capsys, runtime):
    documents.stopped(runtime, trainer, tmp_path / "gone", "SIGTERM", 1.0)
    assert capsys.readouterr().out.count("is not written: ") == 2


def test_other_ranks_write_nothing(trainer):
    (trainer.folder / "record.json").unlink()
    documents.stopped(
        Runtime(Ranks(rank=1, world_size=2), "transformers", "cpu", "fp32", "CPU"), trainer, trainer.folder, "x", 1.0
    )
    assert not (trainer.folder / "report.html").exists()


def test_answers_are_kept_with_their_question_and_cut():
    asked = [Question([{"role": "user", "content": "q" * 9000}], " yes ")]
    (kept,) = answer_facts(asked, ["<think>x</think>no"], ["<think>x</think>yes"])
    assert (kept["exact_before"], kept["exact_after"]) == (False, True)
    assert len(kept["turns"][0]["text"]) == 4000
    assert len(answer_facts(asked * 300, ["n"] * 300, ["n"] * 300)) == 200
