"""Run the command on one node: its options, its table and its exit codes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DEMO_MODEL, REPO
from tests.preflight.rows import documented, undocumented
from unsloth_ddp.config.options import Settings
from unsloth_ddp.preflight import checks
from unsloth_ddp.preflight.__main__ import parse
from unsloth_ddp.preflight.checks import Check
from unsloth_ddp.preflight.job import read_process_info
from unsloth_ddp.preflight.node import run as node_checks
from unsloth_ddp.utils.errors import UserError


def test_the_table_shows_nodes_that_saw_the_same_in_one_line():
    assert checks.merge_values({0: "a", 1: "a"}) == "a"
    assert checks.merge_values({0: "a", 1: "b", 2: "a"}) == "nodes 0, 2: a\nnode 1: b"
    text = checks.render_checks([Check("disk", {0: "full [1]"}, "failure", "Free some.")], "Preflight", width=100)
    assert all(part in text for part in ("Preflight", "disk", "full [1]", "failure", "Free some."))
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--timeout", "soon"], "--timeout is soon"),
        (["--timeout", "0"], "--timeout is 0"),
        (["--jsn"], "there is no option jsn"),
        (["--learning_rate", "fast"], "learning_rate is 'fast'"),
    ],
)
def test_mistakes_in_the_options_are_refused(argv, sentence):
    with pytest.raises(UserError, match=sentence):
        parse(argv)


def test_preflights_options_are_told_from_the_runs():
    options, settings = parse(["--json", "--learning_rate", "1", "--timeout", "5", "--use_cpu"])
    assert (options.json, options.timeout, settings.learning_rate, settings.use_cpu) == ("-", 5, 1.0, True)
    assert parse(["--json", "f.json"])[0].json == "f.json"


def test_help_is_preflights_own(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    printed = capsys.readouterr().out
    assert printed.startswith("usage: python -m unsloth_ddp.preflight") and "those of train_ddp.py" in printed


def preflight(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Preflight as a user starts it, on this machine alone."""
    command = [sys.executable, "-m", "unsloth_ddp.preflight", *argv]
    env = {**os.environ, **environ}
    return subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_one_node_is_checked_with_plain_python(tmp_path):
    done = preflight("--use_cpu", "--output_dir", str(tmp_path / "out"), "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["exit_code"]) == (0, 0), done.stdout
    assert {check["verdict"] for check in report["checks"]} == {"ok"}, done.stdout
    names = {check["name"] for check in report["checks"]}
    made = {"environment", "output folder", "shared memory", "GPUs", "versions", "kit", "settings", "data", "model"}
    assert made <= names
    assert undocumented(report) == set()
    assert not (tmp_path / "out").exists()


def test_every_row_that_the_page_lists_can_be_made():
    source = "".join(path.read_text() for path in (REPO / "unsloth_ddp" / "preflight").rglob("*.py"))
    made = {
        name
        for name in documented()
        if f'"{name.removesuffix("NAME")}' in source or f'"{name} (' in source or f'"{name}, ' in source
    }
    assert documented() == made


def test_a_failure_is_exit_code_1_and_a_mistake_2(tmp_path):
    (tmp_path / "file").write_text("")
    argv = ["--use_cpu", "--output_dir", str(tmp_path / "file"), "--dataset", str(tmp_path / "no.jsonl")]
    done = preflight(*argv, "--model", str(DEMO_MODEL))
    assert done.returncode == 1
    assert "preflight: 2 failures (output folder, data: dataset no.jsonl)" in done.stdout
    done = preflight("--no_such_option", UNSLOTH_DDP_EXIT_CODE_FILE=str(tmp_path / "code"))
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "preflight: error: command line: there is no option no_such_option; python -m unsloth_ddp.preflight --help "
        "and train_ddp.py --help list them all.\n"
    )
    assert (tmp_path / "code").read_text() == "2\n"


def rows_check(folder: Path, *sources: str, **options: Any) -> Check:
    """The row of the table about the rows of these files in a folder."""
    dataset = [one if "/" in one else str(folder / one) for one in sources]
    settings = Settings(model=str(DEMO_MODEL), dataset=dataset, use_cpu=True, **options)
    checks = node_checks.machine_checks(read_process_info({}), settings, {}, [], "")
    return next(check for check in checks if check.name == "rows")


def test_the_first_rows_of_every_file_are_read_as_a_run_reads_them(tmp_path: Path) -> None:
    good = json.dumps({"text": "words"})
    (tmp_path / "good.jsonl").write_text(f"{good}\n" * 150)
    (tmp_path / "bad.jsonl").write_text(f'{good}\n{{"question": "Who?"}}\n')
    (tmp_path / "late.jsonl").write_text(f"{good}\n" * 100 + "no JSON\n")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "notes.txt").write_text("words")
    assert rows_check(tmp_path, "good.jsonl", "late.jsonl") == Check("rows", {0: "first 200 of 2 files"})
    for source, said in (
        ("bad.jsonl", f"{tmp_path}/bad.jsonl:2: unknown columns (question); accepted columns"),
        ("empty.jsonl", "empty.jsonl holds no rows"),
        ("notes.txt", "notes.txt is not a .jsonl"),
        (".", "is a folder"),
    ):
        refused = rows_check(tmp_path, "good.jsonl", source)
        assert refused.verdict == "failure" and said in refused.remedy
    evaluated = rows_check(tmp_path, "good.jsonl", eval_dataset=[str(tmp_path / "bad.jsonl")])
    assert "bad.jsonl:2" in evaluated.remedy
    # The row `data` reports a file that is missing, and a folder of a stream may hold empty files.
    assert rows_check(tmp_path, "good.jsonl", "no.jsonl").values == {0: "first 100 of 1 file"}
    (tmp_path / "shards").mkdir()
    for name in ("good", "empty"):
        (tmp_path / f"{name}.jsonl").rename(tmp_path / "shards" / f"{name}.jsonl")
    streamed = rows_check(tmp_path, "shards", "owner/name", streaming=True)
    assert streamed == Check("rows", {0: "first 100 of 2 files; Hub datasets not read"})


def test_variables_that_cannot_be_read_are_a_row_too(tmp_path):
    done = preflight("--use_cpu", NNODES="2")
    assert done.returncode == 1
    assert "NODE_RANK is not set on this node" in " ".join(done.stdout.split())
    done = preflight("--use_cpu", "--json", str(tmp_path / "new" / "report.json"), NNODES="2")
    report = json.loads((tmp_path / "new" / "report.json").read_text())
    assert (done.returncode, report["exit_code"], report["checks"][0]["name"]) == (1, 1, "environment")


@pytest.mark.parametrize(
    ("launcher", "words", "devices", "verdict", "remedy"),
    [
        ({}, "", [], "ok", ""),
        ({"UNSLOTH_FSDP2": "1"}, "", [], "ok", ""),
        ({"UNSLOTH_FSDP2": "1"}, "--optim adafactor", [], "failure", "optim adafactor cannot be combined with"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "", [], "failure", "sharding zero2 needs GPUs and none is used here"),
        ({"UNSLOTH_FSDP2": "1"}, "", [{"name": "H200"}], "ok", ""),
        (
            {"UNSLOTH_FSDP2": "1"},
            "--gradient_checkpointing unsloth",
            [{"name": "H200"}],
            "failure",
            "cannot be combined with",
        ),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "", [{"name": "H200"}], "failure", "DeepSpeed, which is not installed"),
        ({}, "--backend unsloth", [], "failure", "backend unsloth needs an accelerator"),
    ],
)
def test_a_sharding_that_training_would_refuse_is_a_failure(
    launcher, words, devices, verdict, remedy, tmp_path, monkeypatch
):
    # Without DeepSpeed only: what is read of Transformers meanwhile is kept for other tests.
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "deepspeed" else find(name))
    _, settings = parse(["--output_dir", str(tmp_path / "outputs"), *words.split()])
    environ = {**os.environ, **launcher}
    found = node_checks.machine_checks(read_process_info(environ), settings, environ, devices, "")
    row = next(check for check in found if check.name == "sharding")
    assert (row.verdict, remedy in row.remedy) == (verdict, True), row
