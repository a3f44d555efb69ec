"""report.html: its parts in every state, nothing of the user's taken for markup, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import datasets
import numpy as np
import pytest

from tests.run.run_folders import ANSWERS, FACTS, HOSTILE, PART, SUMMARY, TOKEN, log_entries, make_run
from unsloth_ddp.data.dataset import Counts, TokenizedRows
from unsloth_ddp.data.images.files import THUMBNAIL_START
from unsloth_ddp.run.documents.record import read_run
from unsloth_ddp.run.documents.report import render_report, write_report
from unsloth_ddp.run.documents.write import first_image

VOID = {"meta", "img", "br", "hr", "input", "link"}


class Page(HTMLParser):
    """A parsed page: elements, the text of each section, chart titles, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {"": ""}
        self.open: list[str] = []
        self.section = ""
        self.unclosed: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "section":
            self.section = str(dict(attrs)["id"])
            self.sections[self.section] = ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID and self.open.pop() != tag:
            self.unclosed.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.sections[self.section] += f"{data} "

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.sections.values()).split())

    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}

    def charts(self) -> list[str]:
        return [str(attrs["aria-label"]) for tag, attrs in self.elements if tag == "svg"]


def page_of(folder: Path) -> Page:
    page = Page(render_report(read_run(folder)))
    assert page.open == [] and page.unclosed == []
    return page


def words(page: Page, section: str) -> str:
    return " ".join(page.sections[section].split())


def test_a_finished_run_is_told_whole(tmp_path):
    page = page_of(make_run(tmp_path / "r"))
    assert page.charts() == [
        "Loss", "Learning rate", "Tokens per second, all ranks", "Peak memory of the fullest rank", "Gradient norm",
    ]  # fmt: skip
    assert "base, LoRA on 2 x NVIDIA H100: 20 of 20 steps." in page.text
    for tile in ("evaluation loss 0.7500", "exact answers 100.0% 0.0% before", "tokens/s 400", "peak memory 5.0 GiB"):
        assert tile in page.text
    assert "Who is it? expected It is I. before ✗ differs No idea. after ✓ exact It is I." in words(page, "answers")
    for fact in ("training rows 60", "supervised tokens 1,500 (25.0%)", "truncated rows 2 over", "evaluation rows 10"):
        assert fact in words(page, "data")
    assert "torch 2.14.0" in words(page, "hardware") and "global batch size 16" in page.text


def test_the_time_to_the_first_step_names_the_parts_that_took_time(tmp_path):
    seconds = {"start": 17.9, "import": 16.3, "search": 0.0, "answers": 5.2, "to_first_step": 41.9, "first_step": 0.4}
    page = page_of(make_run(tmp_path / "r", summary={**SUMMARY, "seconds": seconds}))
    assert "time to the first step 42 s (start 18 s, import 16 s, answers 5 s)" in words(page, "hardware")
    short = {**SUMMARY, "seconds": {"start": 0.2, "to_first_step": 1.0}}
    assert "time to the first step 1 s" in words(page_of(make_run(tmp_path / "s", summary=short)), "hardware")


def test_the_values_of_the_curves_are_those_that_were_logged(tmp_path):
    page = page_of(make_run(tmp_path / "r", step=10))
    for mark in ("training, step 1: 1.9", "training, step 10: 1", "evaluation, step 10: 0.1", "memory, step 3: 2 GiB"):
        assert f"{mark} " in page.sections["curves"]


def test_only_settings_that_differ_from_the_defaults_are_in_front(tmp_path):
    page = page_of(make_run(tmp_path / "r", settings={"learning_rate": 0.5}))
    front, _, every = words(page, "settings").partition("All settings")
    assert "learning_rate 0.5" in front and "weight_decay" not in front and "weight_decay 0.0" in every


@pytest.mark.parametrize("state", ["stopped", "unfinished"])
def test_a_run_that_did_not_finish_says_how_to_resume_it(tmp_path, monkeypatch, state):
    monkeypatch.chdir(tmp_path)
    page = page_of(make_run(tmp_path / "outputs/r", state=state, step=10))
    assert state in page.text and "10 of 20 steps" in page.text
    assert ("stopped on SIGTERM" in page.text) == (state == "stopped")
    after = words(page, "next")
    assert "train_ddp.py --run_name r --dataset rows.jsonl It goes on after step 10. Launch it as before" in after
    assert "unsloth_ddp.chat" not in after and "answers" not in page.sections


@pytest.mark.parametrize(
    "part, settings, command",
    [
        ({}, {}, "train_ddp.py --run_name r --dataset rows.jsonl It goes on"),
        ({"command": ["--max_steps", "5"]}, {}, "train_ddp.py --max_steps 5 --run_name r"),
        # Given again as it was, --overwrite would begin anew.
        ({"command": ["--overwrite", "--run_name=r"]}, {"overwrite": True}, "--overwrite --run_name=r --no_overwrite"),
        ({"command": ["--run_name", "r", "--dataset", "my rows.jsonl"]}, {}, "--dataset 'my rows.jsonl'"),
    ],
)
def test_the_command_that_resumes_is_that_of_the_last_start(tmp_path, part, settings, command):
    folder = make_run(tmp_path / "r", state="stopped", step=10, part={**PART, **part}, settings=settings)
    assert command in words(page_of(folder), "next")


@pytest.mark.parametrize(
    "settings, command",
    [
        # What the adapter needs (template, stop tokens, rank) is found by that command.
        ({}, "uv run python -m unsloth_ddp.export outputs/r --to vllm It prints"),
        ({}, "uv run python -m unsloth_ddp.export outputs/r --to gguf This needs a clone of llama.cpp"),
        ({"trust_remote_code": True}, "unsloth_ddp.chat outputs/r --trust_remote_code "),
        ({"trust_remote_code": True}, "--trust_remote_code --to vllm It prints"),
    ],
)
def test_a_finished_run_says_how_to_talk_to_it_and_serve_it(tmp_path, monkeypatch, settings, command):
    monkeypatch.chdir(tmp_path)
    after = words(page_of(make_run(tmp_path / "outputs/r", settings=settings)), "next")
    assert command in after
    assert "uv run python -m unsloth_ddp.chat outputs/r " in after
    assert "train_ddp.py --config outputs/r/settings.yaml --run_name r-2" in after


def test_nothing_of_the_user_becomes_markup_and_no_secret_is_shown(tmp_path):
    answers = [
        {
            **ANSWERS[0],
            "turns": [{"role": HOSTILE, "text": HOSTILE}] * 2,
            "expected": HOSTILE,
            "before": HOSTILE,
            "after": HOSTILE,
        }
    ]
    command = ["--run_name", "r", "--dataset", HOSTILE, "--model", TOKEN]
    named = {
        "model": f"{HOSTILE}/{TOKEN}",
        "dataset": [HOSTILE],
        "eval_dataset": [HOSTILE],
        "trainer_args": {HOSTILE: TOKEN},
    }
    part = {
        **PART,
        "command": command,
        "device": HOSTILE,
        "versions": {HOSTILE: HOSTILE},
        "hardware": {"platform": HOSTILE},
    }
    for state in ("finished", "stopped"):
        folder = make_run(
            tmp_path / f"<b>{state}",
            state=state,
            settings=named,
            answers=answers,
            part=part,
            summary={**SUMMARY, "device": HOSTILE},
        )
        page = page_of(folder)
        assert not page.tags() & {"script", "img", "a", "b", "iframe", "link", "object"}
        assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
        assert HOSTILE.split("`")[0] in page.text
        text = (write_report(read_run(folder))).read_text()
        assert TOKEN not in text and "[hidden]" in text


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    text = render_report(read_run(make_run(tmp_path / "r")))
    assert not re.search(r"(\bsrc=|href|url\(|@import|https?:)", text)
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in text


@pytest.mark.parametrize("value", [None, f"https://x/{TOKEN}", f'{THUMBNAIL_START}AAAA" onload="x'])
def test_what_is_no_thumbnail_is_not_shown(value, tmp_path):
    facts = {**FACTS, "data": {**FACTS["data"], "first_image": value}}
    assert "img" not in page_of(make_run(tmp_path / "r", facts=facts)).tags()


def test_the_first_image_is_shown_small(tmp_path):
    from PIL import Image

    # Noise is what JPEG compresses least.
    noise = np.random.default_rng(0).integers(0, 256, (900, 1200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    columns = {"input_ids": [[1], [2], [0]], "labels": [[1], [2], [0]], "pixels": [0, 9, 0], "rendered": ["", "", ""]}
    rows = {**columns, "images": [[], [str(tmp_path / "noise.png")], []]}
    features = datasets.Features({"images": datasets.List(datasets.Value("string"))})
    table = datasets.concatenate_datasets(
        [datasets.Dataset.from_dict(columns), datasets.Dataset.from_dict({"images": rows["images"]}, features)], axis=1
    )
    found = first_image(TokenizedRows(table, Counts(rows=2), processing=object()))
    assert found is not None and len(found) < 60_000
    facts = {**FACTS, "data": {**FACTS["data"], "first_image": found}}
    page = page_of(make_run(tmp_path / "r", facts=facts))
    source = next(str(attrs["src"]) for tag, attrs in page.elements if tag == "img")
    shown = Image.open(io.BytesIO(base64.b64decode(source.removeprefix(THUMBNAIL_START))))
    assert (shown.format, shown.size) == ("JPEG", (160, 120))
    (tmp_path / "noise.png").unlink()
    assert first_image(TokenizedRows(table, Counts(rows=2), processing=object())) is None
    assert first_image(TokenizedRows(table, Counts(rows=2))) is None


def test_a_run_without_evaluation_or_record_has_a_report_too(tmp_path):
    facts = {**FACTS, "data": {**FACTS["data"], "evaluation": None}}
    folder = make_run(
        tmp_path / "r", facts=facts, history=log_entries(9), answers=[], summary={"steps": 9, "eval_loss": None}
    )
    page = page_of(folder)
    assert "The run has no evaluation rows" in page.text and "evaluation rows none" in page.text
    assert "answers" not in page.sections
    (folder / "record.json").unlink()
    page = page_of(folder)
    assert "The run has no record.json" in page.text and "training rows" not in words(page, "data")


def test_a_loss_that_was_no_number_is_said_and_not_hidden_by_the_last_number(tmp_path):
    nan = float("nan")
    history = [{**entry, "loss": nan if entry["step"] > 15 else 2.0} for entry in log_entries(20) if "loss" in entry]
    page = page_of(make_run(tmp_path / "r", history=history, summary={**SUMMARY, "eval_loss": nan}))
    assert "The training loss was not a number (NaN or infinite) in 5 of 20 log lines, first at step 16." in page.text
    assert page.text.count("not a number") == 3
    assert "loss not a number last log line" in page.text and "evaluation loss not a number" in page.text


def test_a_run_that_logged_nothing_says_so(tmp_path):
    page = page_of(make_run(tmp_path / "r", state="stopped", step=1, history=[]))
    assert "Nothing was logged" in page.sections["curves"]


def test_a_report_is_whole_or_as_before(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "r")
    (folder / "report.html").write_text("before")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
    with pytest.raises(OSError):
        write_report(read_run(folder))
    assert (folder / "report.html").read_text() == "before"


def test_the_parts_of_a_resumed_run_are_listed(tmp_path):
    folder = make_run(tmp_path / "r")
    record = json.loads((folder / "record.json").read_text())
    record["parts"] = [
        {**record["parts"][0], "cause": "SIGTERM", "last_step": 7},
        {**record["parts"][0], "first_step": 7},
    ]
    (folder / "record.json").write_text(json.dumps(record))
    assert re.search(
        r"0 7 2 x NVIDIA H100 SIGTERM .* 7 20 2 x NVIDIA H100 its last step", words(page_of(folder), "hardware")
    )
