"""Measured speeds: what they say of another model, how they are read, written and made from a finished run."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import REPO
from tests.plan.conftest import SHAPE
from unsloth_ddp.plan import calibration as calibrations
from unsloth_ddp.plan.calibration import Calibration, Measurement, SpeedQuery, estimate_speed, load_calibration
from unsloth_ddp.plan.rows import RowLengths
from unsloth_ddp.utils.errors import UserError

SPEEDS = [1, 50, 100, 300, 200]
WANTED = SpeedQuery(
    method="lora", backend="unsloth", precision="bf16", gradient_checkpointing="none", rows="full",
    tokens_a_micro_batch=16384, flops_a_token=3e10,
)  # fmt: skip


def measurement(name: str, flops: float, speed: float, **changed) -> Measurement:
    given = dataclasses.asdict(WANTED) | {"flops_a_token": flops} | changed
    return Measurement(name=name, tokens_per_second_per_gpu=speed, **given)


def test_speed_follows_the_work_of_a_token():
    one = measurement("one", 1e10, 40_000)
    found = estimate_speed(Calibration("gpu", "", [one]), dataclasses.replace(WANTED, flops_a_token=2e10))
    assert (found.tokens_per_second, found.source, found.differences) == (20_000, "one", [])
    large = measurement("large", 4e10, 20_000)
    beyond = dataclasses.replace(WANTED, flops_a_token=8e10)
    assert estimate_speed(Calibration("gpu", "", [large, one]), beyond).tokens_per_second == 10_000
    # Nobody measured anything like it.
    assert estimate_speed(Calibration("gpu", "", [one]), beyond) is None
    few_tokens = dataclasses.replace(WANTED, tokens_a_micro_batch=3000)
    assert estimate_speed(Calibration("gpu", "", [one]), few_tokens) is None


def test_the_nearest_circumstances_are_taken_and_their_differences_told():
    offloaded = measurement("offloaded", 3e10, 2000, gradient_checkpointing="unsloth")
    fewer = measurement("fewer", 3e10, 1000, gradient_checkpointing="unsloth", tokens_a_micro_batch=6000)
    found = estimate_speed(Calibration("gpu", "", [fewer, offloaded]), WANTED)
    assert found.tokens_per_second == 2000
    assert found.differences == ["gradient checkpointing unsloth, not none"]
    found = estimate_speed(Calibration("gpu", "", [fewer]), WANTED)
    assert found.differences[1:] == ["6,000 tokens per micro-batch, not 16,384"]
    for other in ({"method": "full"}, {"rows": "padded"}, {"precision": "fp16"}):
        assert estimate_speed(Calibration("gpu", "", [fewer]), dataclasses.replace(WANTED, **other)) is None


def test_a_run_is_timed_by_what_was_measured_nearest():
    padded = dataclasses.replace(WANTED, rows="padded", gradient_checkpointing="torch", tokens_a_micro_batch=578)
    found = estimate_speed(load_calibration("h200"), padded)
    assert found.source == "Qwen3-1.7B, TRL, checkpointing, 8 chat rows"
    assert found.tokens_per_second == pytest.approx(4000 * 6_986_399_744 / 3e10)
    offloading = dataclasses.replace(padded, gradient_checkpointing="unsloth")
    assert estimate_speed(load_calibration("h200"), offloading).source.startswith("Qwen3-1.7B, Unsloth, offloaded")


def test_the_shipped_calibration_says_where_it_is_from():
    shipped = load_calibration("h200")
    assert shipped.gpu == "NVIDIA H200" and "2026-11-20" in shipped.source
    assert {m.tokens_per_second_per_gpu for m in shipped.measurements} >= {17100, 12100, 6900, 16300, 55000, 2300, 4000}
    measured = json.loads((REPO / "benchmarks/results/speed/speed.json").read_text())["cells"]
    alone = [c for c in measured if (c["contestant"], c["work"], c["processes"]) == ("kit", "chat", 1)]
    runs = {}
    for one in alone:
        runs.setdefault((one["shape"], one["method"]), []).append(one["tokens_per_second_a_gpu"])
    kit = [m.tokens_per_second_per_gpu for m in shipped.measurements if "the kit" in m.name]
    assert sorted(kit) == pytest.approx(sorted(map(statistics.median, runs.values())), abs=1)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"format": 1, "gpu": "g", "source": "s", "measurements": []}',
     '{"format": 1, "gpu": "g", "source": "s", "measurements": [{"name": "x"}]}',
     '{"format": 1, "gpu": "g", "source": "s", "measurements": 3}'],
)  # fmt: skip
def test_a_broken_calibration_gets_a_sentence(content, tmp_path):
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(UserError, match="write one with --calibrate"):
        load_calibration(str(tmp_path / "c.json"))
    with pytest.raises(UserError, match="shipped is h200"):
        load_calibration(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("name", 5, "name is 5, but it has to be text; put it in quotes."),
        ("method", None, "method is None, but it has to be text"),
        ("backend", ["unsloth"], r"backend is \['unsloth'\], but it has to be text"),
        ("tokens_per_second_per_gpu", 0, "not above 0"),
        *(("tokens_a_micro_batch", value, "not above 0") for value in ("", 0, "8")),
    ],
)
def test_a_calibration_with_a_wrong_value_is_refused(field, value, said, tmp_path):
    path = tmp_path / "c.json"
    one = dataclasses.replace(measurement("x", 1e10, 1), **{field: value})
    calibrations.save_calibration(Calibration("g", "s", [one]), path)
    with pytest.raises(UserError, match=f"--calibration {path}: .*{said}"):
        load_calibration(str(path))


# 3,000 tokens, 300 a row, which fill 3 packs of 1,000.
ROWS = RowLengths(np.array([100, 200, 300, 400, 500, 500, 400, 300, 200, 100]), supervised=1)


def finished_run(
    folder: Path, speeds: list[float], packed: bool = False, packs: int | None = None, method: str = "lora"
) -> Path:
    folder.mkdir()
    summary = {
        "device": "NVIDIA X", "backend": "unsloth", "precision": "bf16", "per_device_train_batch_size": 2, "world_size": 2,
        "packing": packed, "packs": packs, "gradient_checkpointing": "torch",
        "settings": {"model": "m", "method": method, "gradient_checkpointing": "auto", "max_length": 1000},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    history = [{"loss": 1.0, "tokens_per_second": speed} for speed in speeds]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    return folder


def test_a_finished_run_becomes_a_measurement(tmp_path):
    gpu, found = calibrations.measure_run(finished_run(tmp_path / "run", SPEEDS), "m", SHAPE, ROWS)
    assert gpu == "NVIDIA X"
    assert (found.tokens_per_second_per_gpu, found.rows, found.tokens_a_micro_batch) == (100, "padded", 600)
    assert found.gradient_checkpointing == "torch"
    with pytest.raises(UserError, match="the run logged 1 usable speeds"):
        calibrations.measure_run(finished_run(tmp_path / "short", [1, 50, 100]), "m", SHAPE, ROWS)
    with pytest.raises(UserError, match="this run trained m, not n; write the file with --model m"):
        calibrations.measure_run(tmp_path / "run", "n", SHAPE, ROWS)
    with pytest.raises(UserError, match="not the folder of a finished run"):
        calibrations.measure_run(tmp_path, "m", SHAPE, ROWS)


def test_a_measurement_is_of_the_runs_own_method_and_packs(tmp_path):
    def measured(name: str, *args) -> Measurement:
        return calibrations.measure_run(finished_run(tmp_path / name, SPEEDS, *args), "m", SHAPE, ROWS)[1]

    lora, full = measured("lora"), measured("full", False, None, "full")
    assert (lora.flops_a_token, full.flops_a_token) == (4 * 940 + 2 * 40, 6 * 900)
    packed = measured("packed", True, 4)
    assert (packed.rows, packed.tokens_a_micro_batch) == ("packed", 2 * 3000 / 4)
    # Of a streamed run packs are not counted: rows are put into them here.
    assert measured("streamed", True).tokens_a_micro_batch == 2 * 3000 / 3
