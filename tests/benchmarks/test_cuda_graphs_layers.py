"""The benchmark of layers in CUDA graphs: its variants, and the script on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.runs import REPO
from benchmarks.speed.cuda_graphs_layers import VARIANTS, options, tiny
from unsloth_ddp.config.parse import parse_settings


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_run_that_the_kit_takes(name: str) -> None:
    variant = VARIANTS[name]
    given = parse_settings(options(variant, Path("m"), Path("r.jsonl"), Path("o"), cpu=False))
    assert (given.backend, given.method, given.fp8) == (variant.backend, variant.method, variant.fp8)
    assert given.per_device_train_batch_size == variant.packs and given.cuda_graphs == "on"
    assert given.max_length == (8192 if variant.work == "long" else 2048)
    on_cpu = tiny(variant)
    assert (on_cpu is None) == (variant.fp8 or variant.method == "qlora")
    if on_cpu is not None:
        words = options(on_cpu, Path("m"), Path("r.jsonl"), Path("o"), cpu=True)
        assert parse_settings(words).backend == "transformers" and "--cuda_graphs" not in words


@pytest.mark.slow
def test_the_script_measures_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.speed.cuda_graphs_layers", "--work", str(tmp_path / "work"), "--tiny"]
    command += ["--variants", "8b_full_varlen", "8b_qlora", "--json", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not on a CPU: 8b_qlora" in done.stdout
    written = json.loads((tmp_path / "found.json").read_text())
    assert list(written["variants"]) == ["8b_full_varlen"] and written["failed"] == []
    one = written["variants"]["8b_full_varlen"]
    # Four rows of 256 tokens, one after the other; both matrices of seven layers in each of the demo's four blocks.
    assert (one["packs"], one["tokens"], one["sequences"], one["copies"]) == (4, 1024, 0, 56)
    assert one["loss"] > 0 and 0 < one["ms_of_rounds"][0] <= one["ms"] and 0 < one["attention_ms"] < one["kernel_ms"]
