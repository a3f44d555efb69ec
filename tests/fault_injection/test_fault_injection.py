"""A short job killed at random moments, resumed to its end; `UNSLOTH_DDP_TORTURE_RUNS` says how often."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.robustness import fault_injection
from benchmarks.robustness.cases import run_cases
from benchmarks.robustness.fault_injection import damage, inject_faults, is_bad, read_options
from benchmarks.robustness.killable_job import PATIENCE, Job

RUNS = int(os.environ.get("UNSLOTH_DDP_TORTURE_RUNS", "20"))


@pytest.mark.torture
@pytest.mark.timeout(300 + 120 * RUNS)
def test_whatever_kills_the_job_it_ends_bit_identical(tmp_path):
    results = tmp_path / "results.json"
    summary = inject_faults(read_options(f"--runs {RUNS} --seed 1 --at_once 2 --json {results}".split()), tmp_path)
    assert summary["runs"] == RUNS
    bad = [each for each in summary["each"] if is_bad(each)]
    assert not bad, bad
    assert json.loads(results.read_text())["each"] == summary["each"]


@pytest.mark.torture
@pytest.mark.timeout(300)
def test_a_job_can_be_struck_after_a_save(tmp_path, monkeypatch):
    monkeypatch.setattr(fault_injection, "STRUCK_AFTER_SAVES", ("kit",))
    each = inject_faults(read_options(["--runs", "1", "--seed", "3"]), tmp_path)["each"][0]
    assert each["after_save"] > 0 and not is_bad(each)
    assert int(each["offered"][0].rpartition("-")[2]) >= each["after_save"]


@pytest.mark.timeout(20)
def test_a_job_that_hangs_before_its_first_save_is_not_waited_for_without_end(tmp_path, monkeypatch):
    job = Job.__new__(Job)
    job.began = time.monotonic() - PATIENCE
    monkeypatch.setattr(job, "wait", lambda _: False)
    assert not job.wait_for_save(tmp_path, 2, 0)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    """A folder with a file of each kind that a checkpoint has."""
    import torch
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(1000)}, tmp_path / "adapter_model.safetensors")
    torch.save({"state": torch.ones(1000)}, tmp_path / "optimizer.pt")
    (tmp_path / "trainer_state.json").write_text('{"global_step": 4}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path


def test_a_whole_checkpoint_is_not_called_damaged(checkpoint):
    assert damage(checkpoint, {path.name for path in checkpoint.iterdir()}) is None


@pytest.mark.parametrize(
    "name", ["adapter_model.safetensors", "optimizer.pt", "trainer_state.json", "chat_template.jinja"]
)
def test_a_missing_or_a_cut_off_file_is_damage(checkpoint, name):
    names = {path.name for path in checkpoint.iterdir()}
    content = (checkpoint / name).read_bytes()
    for left in (len(content) - 8, 0):
        if name.endswith("jinja") and left:
            continue  # any text is a template
        (checkpoint / name).write_bytes(content[:left])
        assert name in str(damage(checkpoint, names))
    (checkpoint / name).unlink()
    assert damage(checkpoint, names) == f"{name} is missing"


def test_a_flipped_bit_in_an_optimizer_is_damage(checkpoint):
    names = {path.name for path in checkpoint.iterdir()}
    content = bytearray((checkpoint / "optimizer.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (checkpoint / "optimizer.pt").write_bytes(content)
    assert "optimizer.pt is damaged" in str(damage(checkpoint, names))


def test_a_results_file_is_continued_by_the_same_command_and_by_no_other(tmp_path):
    words = ["--json", str(tmp_path / "results.json"), "--at_once", "2", "--runs"]
    started: list[int] = []

    def run_case(number: int) -> dict[str, int]:
        started.append(number)
        return {"run": number}

    def run(runs: str, seed: int) -> dict[str, Any]:
        options = read_options([*words, runs])
        return run_cases(run_case, options, {"seed": seed}, {}, lambda cases: {"runs": len(cases)})

    assert run("2", seed=0)["runs"] == 2
    assert run("4", seed=0)["each"] == [{"run": number} for number in range(4)]
    assert sorted(started) == [0, 1, 2, 3]
    with pytest.raises(SystemExit, match="with another seed; name another file"):
        run("4", seed=1)
