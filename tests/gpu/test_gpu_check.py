"""The GPU check of benchmarks/, as tests: every launcher and method on the demo, and parity of layouts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from tests.conftest import REPO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        torch.cuda.device_count() < 2, reason=f"needs two CUDA GPUs; this machine shows {torch.cuda.device_count()}"
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    work = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, "-m", "benchmarks.correctness.gpu_check", "--work", str(work)]
    command += ["--json", str(work / "found.json"), "--groups", "0", "1", "2"]
    subprocess.run(command, cwd=REPO, check=True, timeout=880)
    return json.loads((work / "found.json").read_text())


def test_every_launcher_and_method_trains(found):
    assert [run["name"] for run in found["runs"] if run["exit_code"] or run["last_loss"] >= run["first_loss"]] == []


def test_what_is_saved_loads_without_unsloth(found):
    reloaded = [run for run in found["runs"] if "reload" in run]
    assert len(reloaded) == 6
    for run in reloaded:
        # What is left is the arithmetic of two libraries, in bf16 but for one run.
        tolerance = 1e-4 if run["summary"]["precision"] == "fp32" else 0.02
        assert run["reload"]["eval_loss"] == pytest.approx(run["summary"]["eval_loss"], rel=tolerance), run["name"]


def test_layouts_of_one_global_batch_take_the_same_step(found):
    assert [check["backend"] for check in found["parity"]] == ["unsloth", "transformers"]
    for check in found["parity"]:
        assert len(check["launches"]) == 5 and check["tolerance"]["value"] == 1e-6
        assert check["agree"], check["launches"]
