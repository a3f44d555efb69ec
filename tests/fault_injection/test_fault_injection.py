"""A short job killed at random moments, resumed to its end; `UNSLOTH_DDP_TORTURE_RUNS` says how often."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.robustness import fault_injection
from benchmarks.robustness.fault_injection import damage, inject_faults, is_bad
from benchmarks.robustness.killable_job import PATIENCE, Job

RUNS = int(os.environ.get("UNSLOTH_DDP_TORTURE_RUNS", "20"))


@pytest.mark.torture
@pytest.mark.timeout(300 + 120 * RUNS)
def test_whatever_kills_the_job_it_ends_bit_identical(tmp_path):
    found = inject_faults("kit", RUNS, 1, tmp_path, lambda so_far: print(so_far["each"][-1]), time.time() + 86400)
    assert found["runs"] == RUNS
    bad = [each for each in found["each"] if is_bad(each)]
    assert not bad, bad


@pytest.mark.torture
@pytest.mark.timeout(300)
def test_a_job_can_be_struck_after_a_save(tmp_path, monkeypatch):
    monkeypatch.setattr(fault_injection, "STRUCK_AFTER_SAVES", ("kit",))
    found = inject_faults("kit", 1, 3, tmp_path, lambda _: None, time.time() + 86400)
    each = found["each"][0]
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
